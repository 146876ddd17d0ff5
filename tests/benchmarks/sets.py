"""The parameter sets that optimizers are measured on."""

from __future__ import annotations

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], torch.dtype]


def _llama_1b() -> list[tuple[int, ...]]:
    """The 146 shapes of Llama-3.2-1B: tied embedding, 16 blocks, final norm."""
    hidden, mlp, key_value, vocabulary = 2048, 8192, 512, 128256
    attention = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    block = [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *block * 16, (hidden,)]


def _gpt_24() -> list[tuple[int, ...]]:
    """The 96 weight matrices of 24 transformer layers, 768 wide."""
    width = 768
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 24


def _mixed() -> list[Spec]:
    """1000 tensors of five shapes, each shape half in float32 and half in bfloat16."""
    shapes = [(4096,), (1024, 1024), (1024, 256), (64,), (333, 77)]
    return [(shapes[i % 5], (torch.float32, torch.bfloat16)[i % 2]) for i in range(1000)]


_MAIN: dict[str, list[Spec]] = {
    "tiny1000": [((64,), torch.float32)] * 1000,
    "mid1000": [((1024, 256), torch.float32)] * 1000,
    "llama1b": [(shape, torch.float32) for shape in _llama_1b()],
    "mixed": _mixed(),
}
_FIRST_STEP: dict[str, list[Spec]] = {
    f"first{count}": [((256, 256), torch.float32)] * count for count in (10, 100, 1000, 2000)
}
_MATRICES: dict[str, list[Spec]] = {"gpt24": [(shape, torch.float32) for shape in _gpt_24()]}
SETS = {**_MAIN, **_FIRST_STEP, **_MATRICES}
MAIN_SETS = list(_MAIN)
MATRIX_SETS = list(_MATRICES)
FIRST_STEP_SETS = list(_FIRST_STEP)
"""Equal tensors in growing number: for how the first step grows."""


def specs(name: str, tiny: bool) -> list[Spec]:
    """The shapes and dtypes of a set.

    Args:
        name: of the set, a key of `SETS`.
        tiny: give its first tensors cut down to a few elements, for a run that only shows that everything works.

    Returns:
        one shape and dtype a tensor.

    >>> len(specs("llama1b", tiny=False)), specs("llama1b", tiny=True)[0]
    (146, ((8, 8), torch.float32))
    """
    full = SETS[name]
    return [(tuple(min(size, 8) for size in shape), dtype) for shape, dtype in full[:12]] if tiny else full


def parameters(name: str, tiny: bool, device: str) -> list[Tensor]:
    """Parameters of a set with gradients in place, both normally distributed."""
    torch.manual_seed(0)
    result = []
    for shape, dtype in specs(name, tiny):
        parameter = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        parameter.grad = torch.randn_like(parameter)
        result.append(parameter)
    return result


def least_traffic(name: str, tiny: bool, master_weights: bool) -> int:
    """The bytes that one Adam step must move over a set.

    A parameter, its master copy and its two moments are read and written, its gradient is read. Moments have the dtype
    of the parameter, or of the float32 master where there is one; a parameter with a master is only written.
    That is 28 bytes for a float32 parameter, 14 for a bfloat16 one, and 28 for a bfloat16 one with a master.

    >>> least_traffic("tiny1000", tiny=False, master_weights=False) // 64_000
    28
    """
    total = 0
    for shape, dtype in specs(name, tiny):
        if master_weights and dtype.itemsize < 4:
            each = 2 * dtype.itemsize + 6 * 4
        else:
            each = 7 * dtype.itemsize
        total += each * torch.Size(shape).numel()
    return total
