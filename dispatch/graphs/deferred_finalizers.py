"""Finalizers' work that must not run while a CUDA graph is captured, deferred until no capture is under way.

Note [Finalizers and captured graphs]
Objects are deleted at any moment: also while a stream is captured, by this package, by torch.compile or by the user. If
a finalizer then synchronizes the device, unmaps memory or unlocks pages, CUDA does not only refuse that: it invalidates
the capture, and torch's generator and allocator stay in the state of a capture. So finalizers pass such work to
`run_or_defer`. Deferred work is tried again when memory of the same kind is allocated, when a capture by this package
ends, and after each garbage collection; none of it is ever dropped.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from subtensors.kernels.memory.cuda_reservation import any_capturing, has_driver
from subtensors.kernels.runtime.gc_pause import gc_paused

Work = Callable[[], None]

STREAMS_PER_PRIORITY = 32
"""The number of streams that torch creates for each priority, and hands out in turn."""

_log = logging.getLogger(__name__)
_deferred: deque[Work] = deque()
_is_running = Lock()
_capture_count = Lock()
_captures = 0
_streams: dict[int, list[int]] = {}
"""Handles of torch's streams of each watched device."""


def is_capturing() -> bool:
    """Return whether this package, the current stream, or a torch stream of a watched device is capturing."""
    if _captures > 0:
        return True
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing() or any(map(any_capturing, _streams.values()))


def watch(device: torch.device) -> None:
    """Make `is_capturing` also report captures by other threads, on torch's own streams of this device.

    A capture on a stream that another library made is seen only by the thread whose current stream that is; so is any
    capture where the package cuda-bindings is not installed.

    Args:
        device: a CUDA device with its index, or a CPU, for which there is nothing to do.
    """
    if device.type == "cuda" and device.index not in _streams and has_driver():
        lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        _streams[device.index] = [
            torch.cuda.Stream(device, priority=p).cuda_stream
            for p in range(lowest, highest - 1, -1)
            for _ in range(STREAMS_PER_PRIORITY)
        ]


def run_or_defer(work: Work) -> None:
    """Run work now, or after the capture that is under way.

    Args:
        work: frees the resources of a deleted object. If it raises RuntimeError it is called again later.

    Example:
        >>> run_or_defer(lambda: print("freed"))
        freed
    """
    _deferred.append(work)
    run_deferred()
    if _deferred and _after_collection not in gc.callbacks:
        gc.callbacks.append(_after_collection)


def run_deferred() -> None:
    """Run the deferred work, unless a capture is still under way or another caller is running it."""
    if not _deferred or is_capturing() or not _is_running.acquire(blocking=False):
        return
    try:
        while _deferred:
            work = _deferred.popleft()
            try:
                work()
            except RuntimeError as error:
                # A capture of another library or thread that `is_capturing` does not see.
                _deferred.appendleft(work)
                _log.debug("memory is freed later: %s", error)
                return
            del work  # objects that it refers to may be deleted now, and defer more work
        if _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)
    finally:
        _is_running.release()


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        run_deferred()


@contextmanager
def no_gc_during_capture() -> Iterator[None]:
    """A context for capturing a graph: no garbage is collected, and finalizers' work is deferred until its exit."""
    global _captures
    with _capture_count:
        _captures += 1
    try:
        with gc_paused():
            yield
    finally:
        with _capture_count:
            _captures -= 1
        run_deferred()
