"""State of many parameters begun at once: each tensor has memory of its own, and they are filled together.

With a fill for each tensor, those would be most of a first step over thousands of them: Adam begins three a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.dispatch import captures
from subtensors.dispatch.plain_types import PLAIN_TYPES

LARGE = 64 << 20
"""Bytes of state that has room of its own."""
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def can_begin_with_others(p: Tensor) -> bool:
    """Is this a tensor whose state torch's foreach calls can fill beside that of others?"""
    return type(p) in PLAIN_TYPES and p.dtype in _DTYPES and p.layout is torch.strided


@contextmanager
def room_for_state(params: Sequence[Tensor], entries: int) -> Iterator[None]:
    """What is begun meanwhile is apart from other tensors, where it is large, and torch has given back what it cached.

    State lives as long as the model. Between the first backward's gradients, or in what that left, it would break
    segments up that the next backward, or a graph's memory, wants whole. So it has a pool of its own, which is gone as
    soon as it is filled: the memory goes back as that of other tensors does, where torch gives back what it caches.

    Args:
        params: of one device.
        entries: how many each of them has.
    """
    device, nbytes = params[0].device, entries * sum(p.nbytes for p in params)
    if device.type != "cuda" or nbytes < LARGE or captures.is_capturing():
        yield
        return
    torch.cuda.empty_cache()
    if torch.cuda.get_allocator_backend() != "native":  # others have no pools
        yield
        return
    with torch.cuda.device(device), torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
        yield


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
