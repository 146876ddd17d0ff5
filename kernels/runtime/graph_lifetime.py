"""Keeping what a CUDA graph reads and writes for as long as the graph lives, and no longer.

A graph captured by somebody else, `torch.cuda.graph` say, holds bare addresses and tells nobody when it dies. But CUDA
lets a graph own a *user object*: when the last graph and the last executable made of it are gone, CUDA calls a C
function. That must neither call CUDA nor run Python, which may be gone by then, so it is `sem_post` of the C library,
on a semaphore that is looked at when the next graph is captured.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache

import torch

_log = logging.getLogger("subtensors.fused")

_SEMAPHORE_BYTES = 64
"""Room for a `sem_t`; 32 bytes on Linux."""

# cuda.h: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE.
_NO_DESTRUCTOR_SYNC, _MOVE = 1, 1

_kept: list[tuple[int, object]] = []
_dead: list[object] = []
"""Released only while nothing is captured: freeing memory may ask the device."""


def keep_with_graph(thing: object) -> None:
    """Keep this until the graph that the current stream is captured into has died.

    Args:
        thing: tensors, or what holds them.
    """
    dead = [semaphore for semaphore, _ in _kept if _is_posted(semaphore)]
    if dead:
        _dead.extend(kept for semaphore, kept in _kept if semaphore in dead)
        _kept[:] = [(semaphore, kept) for semaphore, kept in _kept if semaphore not in dead]
        for semaphore in dead:
            _c_library().free(semaphore)
    _kept.append((_owned_by_graph(), thing))


def let_go() -> None:
    """Drop what was kept for graphs that were found dead; nothing may be captured during the call."""
    _dead.clear()


def kept() -> int:
    """Return the number of objects that are kept for graphs, as of the last check."""
    return len(_kept)


def _owned_by_graph() -> int:
    """A semaphore that is posted when the graph now captured has died; never, where CUDA won't tell."""
    c_library = _c_library()
    semaphore: int = c_library.malloc(_SEMAPHORE_BYTES)
    c_library.sem_init(semaphore, 0, 0)
    try:
        _post_when_graph_dies(semaphore)
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("what this CUDA graph uses is kept for good: %s", error)
    return semaphore


def _post_when_graph_dies(semaphore: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    status, number, graph, nodes, count, owned = c_int(), c_uint64(), c_void_p(), c_void_p(), c_size_t(), c_void_p()
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    asked = [byref(answer) for answer in (status, number, graph, nodes, count)]
    _check(cuda.cuStreamGetCaptureInfo_v2(stream, *asked))
    post = ctypes.cast(_c_library().sem_post, c_void_p)
    _check(cuda.cuUserObjectCreate(byref(owned), c_void_p(semaphore), post, c_uint(1), c_uint(_NO_DESTRUCTOR_SYNC)))
    _check(cuda.cuGraphRetainUserObject(graph, owned, c_uint(1), c_uint(_MOVE)))


def _is_posted(semaphore: int) -> bool:
    value = c_int()
    _c_library().sem_getvalue(semaphore, byref(value))
    return value.value > 0


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver would not let a graph own an object: error {code}")


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = c_void_p, [c_size_t]
    library.free.restype, library.free.argtypes = None, [c_void_p]
    library.sem_init.argtypes = [c_void_p, c_int, c_uint]
    library.sem_getvalue.argtypes = [c_void_p, POINTER(c_int)]
    return library
