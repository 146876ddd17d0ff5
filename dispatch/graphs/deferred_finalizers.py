"""Work that must not run while a CUDA graph is captured, deferred until no capture is under way.

Note [Finalizers and captured graphs] Objects die at any moment: also while a stream is captured, by a recording of
ours, by torch.compile, by the user. A finalizer that then waits for the device, unmaps memory or unlocks pages is not
only refused by CUDA: it invalidates the capture, and torch's generator and allocator stay as if it were still on. So
finalizers hand such work to `run_or_defer`. What has to wait is tried again by whatever asks for memory of the same
kind, when a capture of ours ends, and after each garbage collection, of which there are enough in any program that
makes garbage; none of it is ever dropped.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from subtensors.kernels.memory.cuda_reservation import has_driver, is_captured
from subtensors.kernels.runtime.gc_pause import gc_paused

Work = Callable[[], None]

STREAMS = 32
"""How many torch has of each priority; it hands them out by turns."""

_log = logging.getLogger(__name__)
_waiting: deque[Work] = deque()
_is_busy = Lock()
_counts = Lock()
_captures = 0
_streams: dict[int, list[int]] = {}
"""Handles of torch's streams of each watched device."""


def is_capturing() -> bool:
    """Return whether a recording captures, or the current stream is captured, or a torch stream of a watched device."""
    if _captures > 0:
        return True
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing() or any(map(is_captured, _streams.values()))


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
            for _ in range(STREAMS)
        ]


def run_or_defer(work: Work) -> None:
    """Run work now, or after the capture that is under way.

    Args:
        work: frees what a dead object held. If it raises RuntimeError it is called again later, and continues.

    Example:
        >>> run_or_defer(lambda: print("given back"))
        given back
    """
    _waiting.append(work)
    run_deferred()
    if _waiting and _after_collection not in gc.callbacks:
        gc.callbacks.append(_after_collection)


def run_deferred() -> None:
    """Run the deferred work, unless a capture is still under way or another caller is running it."""
    if not _waiting or is_capturing() or not _is_busy.acquire(blocking=False):
        return
    try:
        while _waiting:
            work = _waiting.popleft()
            try:
                work()
            except RuntimeError as error:
                # Another library's or thread's capture, which we could not know of.
                _waiting.appendleft(work)
                _log.debug("memory is given back later: %s", error)
                return
            del work  # what it held may die, and hand in more
        if _after_collection in gc.callbacks:
            gc.callbacks.remove(_after_collection)
    finally:
        _is_busy.release()


def waiting() -> int:
    """The number of deferred pieces of work."""
    return len(_waiting)


def _after_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop":
        run_deferred()


@contextmanager
def no_gc_during_capture() -> Iterator[None]:
    """A context for capturing a graph: no garbage is collected, and finalizers' work is deferred until it ends."""
    global _captures
    with _counts:
        _captures += 1
    try:
        with gc_paused():
            yield
    finally:
        with _counts:
            _captures -= 1
        run_deferred()
