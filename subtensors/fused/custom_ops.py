"""Custom ops of fused math: a fused call in a compiled graph, and stochastic rounding to bfloat16.

Dynamo records `subtensors::fused` with TensorLists as its tensors, one node for any number of elements. Below Dynamo
`_on_lists` decides: a packed list is one flat tensor, so the compiler gets the math itself; of other lists the op gets
the elements, and stays opaque. It declares the tensors that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.lists.list_call import ListCall
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.kernels.runtime.custom_ops import define
from subtensors.lists.tensor_list import TensorList
from subtensors.lists.torch_function import RULES

Kind = tuple[object, ...]
"""An argument: ("list", dtype), ("tensor", dtype, rank), ("float",), ("int",) or ("static", value)."""

functions: WeakValueDictionary[int, FusedFunction] = WeakValueDictionary()
"""The functions of `st.fused` by number, a constant that compiled code may hold."""


class CompiledCall(NamedTuple):
    """The properties that all calls from one place in a compiled function share."""

    fusion: FusedFunction
    kinds: tuple[Kind, ...]
    names: tuple[str | None, ...]
    written: tuple[int, ...]
    is_traceable: bool
    """True if tensors may stand for its dynamic scalars; False where an op insists on a number, as `alpha=` does."""


compiled_calls: dict[str, CompiledCall] = {}
"""Calls by the name that a graph holds; never dropped, and shared by all functions that do the same."""


def split_by_keyword(values: Sequence[PyTree], names: Sequence[str | None]) -> tuple[Args, Kwargs]:
    """Positional and named arguments, from values and the keyword of each; None for a positional one."""
    args = tuple([v for v, name in zip(values, names, strict=True) if name is None])
    return args, {name: v for v, name in zip(values, names, strict=True) if name is not None}


def _arguments(
    signature: str,
    count: int,
    writes: Sequence[PyTree],
    reads: Sequence[PyTree],
    numbers: Sequence[PyTree],
    spread: bool,
) -> tuple[Args, Kwargs]:
    """The arguments of the fused function, from those of `subtensors::fused`.

    With `spread`, `writes` and `reads` hold the `count` elements of each list, rather than the lists.
    """
    _, kinds, names, written, _ = compiled_calls[signature]
    sources = {True: iter(writes), False: iter(reads)}
    remaining = iter(numbers)
    values: list[PyTree] = []
    for position, kind in enumerate(kinds):
        source = sources[position in written]
        match kind[0]:
            case "list":
                values.append(TensorColumn([next(source) for _ in range(count)]) if spread else next(source))
            case "tensor":
                values.append(next(source))
            case "float" | "int":
                values.append(next(remaining))
            case _:
                values.append(kind[1])
    return split_by_keyword(values, names)


def _run(
    signature: str, count: int, writes: Sequence[Tensor], reads: Sequence[Tensor], numbers: Sequence[Tensor]
) -> None:
    fusion, kinds, _, written, _ = compiled_calls[signature]
    numeric = [k[0] for k in kinds if k[0] in ("float", "int")]
    scalars = [float(n) if k == "float" else int(n) for n, k in zip(numbers, numeric, strict=True)]
    args, kwargs = _arguments(signature, count, writes, reads, scalars, spread=True)
    with torch.no_grad():
        if fusion.reads_values and fusion.writes(*args, **kwargs) != written:
            raise RuleError(
                f"{fusion.name} writes to other arguments than when it was compiled, since a value "
                "that it reads changed: pass that value as an argument"
            )
        fusion(*args, **kwargs)


define(
    "fused",
    "str signature, int count, Tensor(a!)[] writes, Tensor[] reads, Tensor[] numbers",
    "()",
    _run,
    lambda *_: None,
)


@RULES.register(torch.ops.subtensors.fused.default)
def _on_lists(call: ListCall[TensorList]) -> None:
    """The call on lists: the math itself on packed lists, one op on all elements of other lists."""
    signature, _, writes, reads, numbers = call.args
    traced = compiled_calls[signature]
    # A compiled graph would keep the values that the math reads; the op reads them at each call.
    if traced.is_traceable and not traced.fusion.reads_values and all(x.arena is not None for x in call.lists):
        args, kwargs = _arguments(signature, 1, writes, reads, numbers, spread=False)
        traced.fusion.function(*args, **kwargs)
        return
    count = len(call.lists[0].tensors)

    def spread(values: Sequence[Tensor]) -> list[Tensor]:
        return [t for v in values for t in (v.tensors if isinstance(v, TensorList) else [v])]

    torch.ops.subtensors.fused(signature, count, spread(writes), spread(reads), numbers)


def _round(x: Tensor, salt: int = 0) -> Tensor:
    x = x.float()
    noise = torch.randint_like(x, 1 << 16, dtype=torch.int32)
    rounded = ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


define(
    "stochastic_round",
    "Tensor x, int salt=0",
    "Tensor",
    _round,
    lambda x, salt=0: torch.empty_like(x, dtype=torch.bfloat16),
    tags=[torch.Tag.nondeterministic_seeded],
)


def stochastic_round_(target: Tensor, source: Tensor) -> Tensor:
    """Write `source` to a bfloat16 tensor, rounding up with the probability of the part that is cut off.

    The expectation of the result is `source`, so updates smaller than half a bfloat16 step are not lost but
    taken now and then. Inside `st.fused` math it is part of the kernel's store.

    Args:
        target: bfloat16, written in place; any shape.
        source: float32 of a shape that broadcasts to it.

    Returns:
        `target`.

    Raises:
        TypeError: `target` is not bfloat16.

    Example:
        >>> import torch
        >>> p = torch.ones(10_000, dtype=torch.bfloat16)
        >>> _ = stochastic_round_(p, torch.full((10_000,), 1 + 2 ** -9))
        >>> sorted(p.unique().tolist()), 0.2 < (p > 1).float().mean().item() < 0.3
        ([1.0, 1.0078125], True)

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
    """
    for name, given in (("target", target), ("source", source)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} of stochastic_round_ is a tensor, got {shown(given)}")
        is_dense = type(given) not in PLAIN_TYPES or (given.layout is torch.strided and not given.is_quantized)
        if not is_dense or given.is_nested is True:
            raise TypeError(f"{name} of stochastic_round_ is dense, got {shown(given)} of layout {given.layout}")
    if target.dtype != torch.bfloat16:
        raise TypeError(f"stochastic_round_ writes to a target of bfloat16, got {target.dtype}")
    return target.copy_(torch.ops.subtensors.stochastic_round(source))
