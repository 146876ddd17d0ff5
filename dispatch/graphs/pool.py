"""CUDA graphs that share one private memory pool: captured one at a time on one stream, replayed one at a time.

Note [One pool for all graphs]
Graphs whose memory is one pool overwrite each other's results, so a result is copied out before the next replay, on the
same stream. What a graph needs beyond what the others left in the pool is all that it adds, whatever their order:
the pool's segments grow where they are, since a larger graph could do nothing with segments of a smaller one's sizes.
A graph that is dropped gives its part back to the pool; torch gives a pool back to the device as a whole, when none of
its graphs is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.graphs import capture as capture_module
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.graphs.cublas_workspaces import make_workspaces
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.runtime.current_device import current_stream, on_stream

T = TypeVar("T")


class GraphPool:
    """A memory pool of one device, and the stream that fills it.

    Args:
        device: a CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream_of_its_own(device)
        _living.add(self)
        self._last: torch.cuda.Stream = torch.cuda.current_stream(device)
        self._last_number = current_stream(device)
        self._handle: Any = None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        deferred_finalizers.watch(device)
        weakref.finalize(self, deferred_finalizers.run_or_defer, partial(_reset, self.graphs)).atexit = False

    def run(self, program: Callable[[], T]) -> T:
        """Run on the pool's stream what will be captured: libraries get ready then, outside of the pool."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with on_stream(self.stream):
                make_workspaces(self.device)
                return program()
        finally:
            current.wait_stream(self.stream)

    def capture(self, program: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a program; other threads may go on using the device.

        Args:
            program: what to capture; it, or the like of it, has been `run` before.

        Returns:
            The graph, and what the program returned: tensors in the pool, which hold nothing before a replay.

        Raises:
            Exception: what the program or CUDA raised; the pool and its other graphs are as they were.
            RuntimeError: the current stream is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph can't be captured while the current stream is part of another one")
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        graph = capture_module.new_graph(self.device)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with deferred_finalizers.no_gc_during_capture(), on_stream(self.stream):
                make_workspaces(self.device)
                with capture_module.growing_segments(), capture_module.captured(graph, self.device, self._handle):
                    out = program()
        except BaseException:  # raised again, once the stream and the pool are in order
            self._leave_a_stuck_stream()
            self._forget_if_empty()
            raise
        current.wait_stream(self.stream)
        self.graphs.append(graph)
        return graph, out

    def unowned(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """For each tensor that is in the pool the same one without a claim on its memory.

        What a graph returned is then in nobody's way when the next graph is captured, and holds until that is replayed.
        """
        segments = capture_module.pool_segments(self._handle)
        found = {}
        for t in tensors:
            held = t.untyped_storage()
            if any(begin <= held.data_ptr() < end for begin, end in segments):
                there = tensor_from_address(held.data_ptr(), held.nbytes(), t.device, None).untyped_storage()
                empty = torch.empty(0, dtype=t.dtype, device=t.device)
                found[t] = empty.set_(there, t.storage_offset(), t.shape, t.stride())
        return found

    def _leave_a_stuck_stream(self) -> None:
        """Take another stream where a failed capture could not be ended on this one."""
        with on_stream(self.stream):
            is_stuck = torch.cuda.is_current_stream_capturing()
        if is_stuck:
            self.stream = _stream_of_its_own(self.device)

    def order(self) -> None:
        """Make the current stream wait for the last replay, if that was on another stream."""
        number = current_stream(self.device)
        if number != self._last_number:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._last)
            self._last, self._last_number = current, number

    def drop(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy a graph, after its last replay; with the last one the pool's memory is torch's again."""
        self._last.synchronize()
        graph.reset()
        self.graphs.remove(graph)
        self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        """A pool that no graph owns is torch's, which refuses its handle from then on."""
        if not self.graphs:
            self._handle = None

    def bytes(self) -> int:
        """The device memory that the pool holds."""
        return capture_module.pool_bytes(self._handle) if self._handle is not None else 0

    def held_bytes(self) -> int:
        """The part of it that tensors hold: what a program keeps of its capture, once its results are `unowned`."""
        return capture_module.held_bytes(self._handle) if self._handle is not None else 0


_living: weakref.WeakSet[GraphPool] = weakref.WeakSet()


def _stream_of_its_own(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other pool has, if there is one: graphs of one stream write to the same workspaces."""
    taken = {pool.stream.cuda_stream for pool in [*_living] if pool.device == device}
    for _ in range(deferred_finalizers.STREAMS):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            break
    return stream


def _reset(graphs: list[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.reset()
    graphs.clear()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Without autocast's cache of casted weights, which the end of the autocast context frees under a graph."""
    enabled: bool = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
