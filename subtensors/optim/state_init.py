"""State of many parameters begun at once: each tensor has memory of its own, and they are filled together.

With a fill for each tensor, those would be most of a first step over thousands of them: Adam begins three a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES

EMPTY_CACHE_BYTES = 64 << 20
"""Bytes of state for which room is made."""
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def can_begin_with_others(p: Tensor) -> bool:
    """Is this a tensor whose state torch's foreach calls can fill beside that of others?"""
    return type(p) in PLAIN_TYPES and p.dtype in _DTYPES and p.layout is torch.strided


def make_room(params: Sequence[Tensor], entries: int) -> None:
    """Have torch give the memory that it caches back, where what will be begun is large.

    State lives as long as the model. Begun in what the first backward left, it would break segments up that the next
    backward, or a graph's memory, wants whole.

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
"""For what a declared entry starts as, what makes it for many parameters."""
