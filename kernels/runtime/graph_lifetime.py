"""Keeping the memory that a CUDA graph uses for as long as the graph lives, and copies to the device that do so.

A graph captured by other code, `torch.cuda.graph` say, holds bare addresses and notifies nobody when it dies. But CUDA
lets a graph own a *user object*: when the last graph and the last executable made of it are destroyed, CUDA calls a C
function. That must neither call CUDA nor run Python, which may be finalized by then, so it is `sem_post` of the C
library, on a semaphore that is checked when the next graph is captured.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from threading import RLock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_log = logging.getLogger("subtensors.fused")

_SEMAPHORE_BYTES = 64
"""The size allocated for a `sem_t`, which takes 32 bytes on Linux."""

# cuda.h: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE.
_NO_DESTRUCTOR_SYNC, _MOVE = 1, 1

_changing = RLock()
_kept: list[tuple[int, object]] = []
"""Objects in use by a graph, each with the semaphore that the graph's end posts."""
_unused: list[object] = []
"""Objects whose graph has died. Freed only while nothing is captured: freeing memory may call the driver."""


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy of `array` on `device`, without waiting for it.

    While a graph is being captured the copy becomes part of it and reads the host memory again at each
    replay, so that memory is kept as long as the graph lives.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        keep_with_graph(pinned)
    else:
        drop_unused()
    return pinned.to(device, non_blocking=True)


def keep_with_graph(memory: object) -> None:
    """Keep tensors, or an object that refers to them, until the graph that the stream is captured into has died."""
    with _changing:
        dead = [semaphore for semaphore, _ in _kept if _is_posted(semaphore)]
        if dead:
            _unused.extend(entry[1] for entry in _kept if entry[0] in dead)
            _kept[:] = [entry for entry in _kept if entry[0] not in dead]
            for semaphore in dead:
                _c_library().free(semaphore)
        _kept.append((_new_semaphore(), memory))


def drop_unused() -> None:
    """Drop the objects of graphs that were found dead; nothing may be captured during the call."""
    with _changing:
        unused = _unused[:]
        _unused.clear()
    del unused  # whose finalizers may come back here


def _new_semaphore() -> int:
    """Return a semaphore that is posted when the graph now captured has died; never, where CUDA has no user objects."""
    c_library = _c_library()
    semaphore: int = c_library.malloc(_SEMAPHORE_BYTES)
    c_library.sem_init(semaphore, 0, 0)
    try:
        _post_when_graph_dies(semaphore)
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("the memory that this CUDA graph uses is never freed: %s", error)
    return semaphore


def _post_when_graph_dies(semaphore: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    status, number, graph, nodes, count, owned = c_int(), c_uint64(), c_void_p(), c_void_p(), c_size_t(), c_void_p()
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    results = [byref(result) for result in (status, number, graph, nodes, count)]
    _check(cuda.cuStreamGetCaptureInfo_v2(stream, *results))
    post = ctypes.cast(_c_library().sem_post, c_void_p)
    _check(cuda.cuUserObjectCreate(byref(owned), c_void_p(semaphore), post, c_uint(1), c_uint(_NO_DESTRUCTOR_SYNC)))
    _check(cuda.cuGraphRetainUserObject(graph, owned, c_uint(1), c_uint(_MOVE)))


def _is_posted(semaphore: int) -> bool:
    value = c_int()
    _c_library().sem_getvalue(semaphore, byref(value))
    return value.value > 0


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver does not let a graph own an object: error {code}")


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = c_void_p, [c_size_t]
    library.free.restype, library.free.argtypes = None, [c_void_p]
    library.sem_init.argtypes = [c_void_p, c_int, c_uint]
    library.sem_getvalue.argtypes = [c_void_p, POINTER(c_int)]
    return library
