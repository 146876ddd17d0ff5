"""Initialization of many parameters' state at once: each tensor has its own memory, and all are filled together.

One fill a tensor would take most of a first step over thousands of parameters: Adam makes three tensors a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES

EMPTY_CACHE_BYTES = 64 << 20
"""The least bytes of new state for which torch's cache is emptied first."""
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def can_begin_with_others(p: Tensor) -> bool:
    """Return whether torch's foreach calls can fill this parameter's state together with that of others."""
    return type(p) in PLAIN_TYPES and p.dtype in _DTYPES and p.layout is torch.strided


def make_room(params: Sequence[Tensor], entries: int) -> None:
    """Empty torch's CUDA cache before a large initialization.

    State lives as long as the model. In the blocks that the first backward left in the cache, it would break up
    segments that the next backward, or a graph's memory, needs whole.

    Args:
        params: of one device.
        entries: how many each of them has.
    """
    nbytes = entries * sum(p.nbytes for p in params)
    if params[0].device.type == "cuda" and nbytes >= EMPTY_CACHE_BYTES and not deferred_finalizers.is_capturing():
        torch.cuda.empty_cache()


def counts(params: Sequence[Tensor]) -> list[Tensor]:
    """For each parameter a 0-d float32 zero, all on one device."""
    first = torch.empty((), dtype=torch.float32, device=params[0].device)
    made = [torch.empty_like(first) for _ in params]
    torch._foreach_zero_(made)
    return made


def zeros(params: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """For each parameter zeros of its size and strides.

    Args:
        params: of one device and dtype.
        dtype: of the zeros.
    """
    made = [torch.empty_like(p, dtype=dtype) for p in params]
    torch._foreach_zero_(made)
    return made


def copies(params: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """For each parameter a copy; arguments as in `zeros`."""
    made = [torch.empty_like(p, dtype=dtype) for p in params]
    torch._foreach_copy_(made, [p.detach() for p in params])
    return made


AT_ONCE: dict[Callable[[Tensor], Tensor], Callable[[Sequence[Tensor], torch.dtype], list[Tensor]]] = {
    torch.zeros_like: zeros,
    torch.clone: copies,
}
"""Functions that initialize an entry of many parameters, by the function that `state` declares for it."""
