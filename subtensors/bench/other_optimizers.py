"""Optimizers other than Adam, each on the set that suits it, beside their peers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from subtensors.bench.variants import Step, Variant

WIDE = ("llama1b",)
MATRICES = ("gpt24",)


def _torch(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    step: Step = getattr(torch.optim, name)(parameters, **arguments).step
    return step


def _ours(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    from subtensors import optim  # here, so that a peer's process does not hold it

    step: Step = getattr(optim, name)(parameters, **arguments).step
    return step


def _bitsandbytes(parameters: list[Tensor]) -> Step:
    import bitsandbytes

    step: Step = bitsandbytes.optim.AdamW8bit(parameters).step
    return step


def _torchao(parameters: list[Tensor]) -> Step:
    from torchao.optim import AdamW8bit

    step: Step = AdamW8bit(parameters).step
    return step


def _heavyball(name: str, parameters: list[Tensor], **arguments: Any) -> Step:
    import heavyball

    step: Step = getattr(heavyball, name)(parameters, **arguments).step
    return step


def _variant(make: Any, name: str, sets: tuple[str, ...], element_bytes: float, **arguments: Any) -> Variant:
    return Variant(functools.partial(make, name, **arguments), sets=sets, element_bytes=element_bytes)


SCALES = 4 / 256
"""Bytes an element of a block's scale."""

OTHERS: dict[str, Variant] = {
    "sgd-foreach": _variant(_torch, "SGD", WIDE, 20, momentum=0.9, foreach=True),
    "sgd-fused": _variant(_torch, "SGD", WIDE, 20, momentum=0.9, fused=True),
    "sgd-subtensors": _variant(_ours, "SGD", WIDE, 20, momentum=0.9),
    "adamw-fused": _variant(_torch, "AdamW", WIDE, 28, fused=True),
    "adamw-subtensors": _variant(_ours, "AdamW", WIDE, 28),
    "adamw-int8-subtensors": _variant(_ours, "AdamW", WIDE, 16 + 4 * SCALES, state_dtype="int8"),
    "adamw-bf16-subtensors": _variant(_ours, "AdamW", WIDE, 20, state_dtype=torch.bfloat16),
    "adamw-8bit-bitsandbytes": Variant(
        _bitsandbytes, sets=WIDE, element_bytes=16 + 4 * SCALES, needs_gpu=True, package="bitsandbytes"
    ),
    "adamw-8bit-torchao": Variant(
        _torchao, sets=WIDE, element_bytes=16 + 4 * SCALES, needs_gpu=True, package="torchao"
    ),
    "muon-torch": _variant(_torch, "Muon", MATRICES, 20),
    "muon-subtensors": _variant(_ours, "Muon", MATRICES, 20),
    "muon-heavyball": Variant(
        functools.partial(_heavyball, "Muon"), sets=MATRICES, element_bytes=20, needs_gpu=True, package="heavyball"
    ),
    # The roots are those of the first step, so that "first s" holds the eigendecompositions and "step ms" the rest.
    "shampoo-subtensors": _variant(_ours, "Shampoo", MATRICES, 12, update_freq=1 << 30),
}
"""Ours beside torch's; 8-bit peers where they are installed."""
