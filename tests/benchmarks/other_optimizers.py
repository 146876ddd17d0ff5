"""Optimizers other than Adam, each on the set that suits it, beside their peers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.variants import Step, Variant

WIDE = ("llama1b",)
MANY = ("mid1000",)
MATRICES = ("gpt24",)


def _torch(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    step: Step = getattr(torch.optim, name)(parameters, **arguments).step
    return step


def _ours(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    from subtensors import optim  # here, so that a peer's process does not hold it

    step: Step = getattr(optim, name)(parameters, **arguments).step
    return step


def _clipped(parameters: list[Tensor]) -> Step:
    """torch's two calls, which are one step here."""
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return step


def _sharded(make: Any, parameters: list[Tensor]) -> Step:
    """The step over the same parameters as DTensors, which FSDP2 makes of them; the one process there is has all."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    device = parameters[0].device.type
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, and not exported explicitly
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    spread: list[Tensor] = []
    for p in parameters:
        assert p.grad is not None
        spread.append(torch.nn.Parameter(DTensor.from_local(p.detach(), mesh, [Shard(0)], run_check=False)))
        spread[-1].grad = DTensor.from_local(p.grad, mesh, [Shard(0)], run_check=False)
    step: Step = make(spread)
    return step


def _shampoo_loop(parameters: list[Tensor]) -> Step:
    """The math of `st.optim.Shampoo` matrix by matrix; as there, the roots are those of the first step."""
    from subtensors.optim.algorithms.shampoo import matrix_power

    moments: list[list[Tensor]] = []
    roots: list[list[Tensor]] = []

    @torch.no_grad()
    def step() -> None:
        for i, p in enumerate(parameters):
            assert p.grad is not None
            sides = [p.grad @ p.grad.mT, p.grad.mT @ p.grad]
            if i == len(moments):
                moments.append(sides)
                roots.append([matrix_power(side, -1 / 4, 1e-4) for side in sides])
            else:
                for moment, side in zip(moments[i], sides, strict=True):
                    moment.add_(side)
            left, right = roots[i]
            p.sub_(0.1 * (left @ p.grad @ right))

    return step


def _bitsandbytes(name: str, parameters: list[Tensor]) -> Step:
    import bitsandbytes

    step: Step = getattr(bitsandbytes.optim, name)(parameters).step
    return step


def _torchao(parameters: list[Tensor]) -> Step:
    from torchao.optim import AdamW8bit

    step: Step = AdamW8bit(parameters).step
    return step


def _heavyball(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    import heavyball

    heavyball.utils.compile_mode = "default"  # its own mode also tunes every kernel, for minutes
    optimizer = getattr(heavyball, name)(parameters, **arguments)
    optimizer.consume_grad = False  # the next step is measured with the same gradients
    step: Step = optimizer.step
    return step


def _variant(make: Any, name: str, sets: tuple[str, ...], element_bytes: float, **arguments: Any) -> Variant:
    return Variant(functools.partial(make, name, **arguments), sets=sets, element_bytes=element_bytes)


def _peer(package: str, make: Any, sets: tuple[str, ...], element_bytes: float) -> Variant:
    return Variant(make, sets=sets, element_bytes=element_bytes, needs_gpu=True, package=package)


SCALES = 4 / 256
"""Bytes an element of a block's scale."""

CODES = 16 + 4 * SCALES
"""Bytes an element of AdamW with moments of 8 bits: the parameter, the gradient, two moments and their scales."""

FOREVER = 1 << 30
"""Steps from one computation of the roots to the next: "first s" then holds the eigendecompositions, "step ms" none."""

OTHERS: dict[str, Variant] = {
    "sgd-foreach": _variant(_torch, "SGD", WIDE, 20, momentum=0.9, foreach=True),
    "sgd-fused": _variant(_torch, "SGD", WIDE, 20, momentum=0.9, fused=True),
    "sgd-subtensors": _variant(_ours, "SGD", WIDE, 20, momentum=0.9),
    "adamw-fused": _variant(_torch, "AdamW", WIDE, 28, fused=True),
    "adamw-subtensors": _variant(_ours, "AdamW", WIDE, 28),
    "adamw-int8-subtensors": _variant(_ours, "AdamW", WIDE, CODES, state_dtype="int8"),
    "adamw-bf16-subtensors": _variant(_ours, "AdamW", WIDE, 20, state_dtype=torch.bfloat16),
    "adamw-8bit-bitsandbytes": _peer("bitsandbytes", functools.partial(_bitsandbytes, "AdamW8bit"), WIDE, CODES),
    "adamw-8bit-torchao": _peer("torchao", _torchao, WIDE, CODES),
    "adamw-sharded-foreach": Variant(
        functools.partial(_sharded, functools.partial(_torch, "AdamW", foreach=True)), sets=MANY, element_bytes=28
    ),
    "adamw-sharded-subtensors": Variant(
        functools.partial(_sharded, functools.partial(_ours, "AdamW")), sets=MANY, element_bytes=28
    ),
    # The norm reads the gradients once more.
    "adamw-clipped-fused": Variant(_clipped, sets=WIDE, element_bytes=32),
    "adamw-clipped-subtensors": _variant(_ours, "AdamW", WIDE, 32, max_norm=1.0),
    # The length of the step is known when all of it was computed: the parameter and both moments are read again.
    "lamb-bitsandbytes": _peer("bitsandbytes", functools.partial(_bitsandbytes, "LAMB"), WIDE, 40),
    "lamb-subtensors": _variant(_ours, "LAMB", WIDE, 40),
    "muon-torch": _variant(_torch, "Muon", MATRICES, 20),
    "muon-subtensors": _variant(_ours, "Muon", MATRICES, 20),
    "muon-heavyball": _peer("heavyball", functools.partial(_heavyball, "Muon"), MATRICES, 20),
    "shampoo-loop": Variant(_shampoo_loop, sets=MATRICES, element_bytes=12),
    "shampoo-subtensors": _variant(_ours, "Shampoo", MATRICES, 12, update_freq=FOREVER),
}
"""Ours beside torch's, a loop where torch has none, and peers where they are installed."""
