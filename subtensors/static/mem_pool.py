"""A memory pool of torch's allocator whose segments lie in an arena, for ordinary tensors and captured graphs.

The allocator requests segments of some MiB, and splits them itself. A segment is an allocation of the arena, as the
memory of a tensor is.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TypeVar
from weakref import ref

import torch

from subtensors.dispatch.torch_internals import memory
from subtensors.static.allocation import Allocation

_log = logging.getLogger(__name__)

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


Arena = TypeVar("Arena")

# Kept forever: torch may call them whenever a tensor is deleted.
_callbacks: list[object] = []
_segments: dict[int, tuple[object, Allocation]] = {}
"""Torch's segments by address. Tensors of a pool do not refer to the arena, so the segments keep it alive."""


def pool_over(
    arena: Arena, device: torch.device, address: int, allocate_segment: Callable[[Arena, int], Allocation]
) -> torch.cuda.MemPool:
    """Return a memory pool whose segments are allocated from an arena on a CUDA device, which begins at an address.

    The function allocates a number of bytes of the arena, or raises.
    """
    weak = ref(arena)

    def allocate(size: int, _device: int, stream: int) -> int | None:
        owner = weak()
        if owner is None:
            return None
        try:
            part = allocate_segment(owner, size)
        except (RuntimeError, ImportError) as error:
            # No exception may pass through torch's allocator; if it gets no memory it raises OutOfMemoryError itself.
            _log.warning("an arena has no segment of %d bytes for a pool: %s", size, error)
            return None
        _segments[address + part.start] = owner, part
        return address + part.start

    def free(segment: int, size: int, _device: int, stream: int) -> None:
        _segments.pop(segment, None)

    entry_points = _Allocate(allocate), _Free(free)
    _callbacks.append(entry_points)
    with torch.cuda.device(device):  # a pool belongs to the device that is current at its creation
        return torch.cuda.MemPool(memory.custom_allocator(*entry_points))


def segments_of(arena: object) -> set[int]:
    """Return the addresses of the segments that pools have allocated from an arena."""
    return {address for address, (owner, _) in list(_segments.items()) if owner is arena}
