"""Torch's allocator over an arena: memory allocated from a pool, captured graphs' too, lies in the arena.

The allocator asks for segments of some MiB, and cuts them up itself. A segment is a part of the arena like any other.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import torch

from subtensors.dispatch.torch_internals import memory

if TYPE_CHECKING:
    from subtensors.static.allocation import Carving
    from subtensors.static.arena import Arena

_log = logging.getLogger(__name__)

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

# Torch may call these whenever a tensor dies, so that they stay.
_callbacks: list[object] = []
# An arena stays while torch holds a segment of it: tensors of a pool do not refer to the arena.
_segments: dict[int, tuple[Arena, Carving]] = {}


def pool_over(arena: Arena, take: Callable[[Arena, int], Carving]) -> torch.cuda.MemPool:
    """A memory pool whose segments are parts of an arena.

    Args:
        arena: on a CUDA device.
        take: takes a part of the arena of a size in bytes, or raises.
    """
    weak = ref(arena)

    def allocate(size: int, device: int, stream: int) -> int | None:
        owner = weak()
        if owner is None:
            return None
        try:
            part = take(owner, size)
        except (RuntimeError, ImportError) as error:
            # An exception can't pass through torch's allocator; without memory it raises OutOfMemoryError itself.
            _log.warning("an arena has no segment of %d bytes for a pool: %s", size, error)
            return None
        address = owner.address + part.start
        _segments[address] = owner, part
        return address

    def free(address: int, size: int, device: int, stream: int) -> None:
        _segments.pop(address, None)

    entry_points = _Allocate(allocate), _Free(free)
    _callbacks.append(entry_points)
    with torch.cuda.device(arena.device):  # a pool is of the device that is current when it is made
        return torch.cuda.MemPool(memory.custom_allocator(*entry_points))


def segments_of(arena: Arena) -> set[int]:
    """The addresses of the parts that pools hold."""
    return {address for address, (owner, _) in list(_segments.items()) if owner is arena}
