"""CUDA graphs that share one private memory pool: captured one at a time on one stream, replayed one at a time.

A CUDA graph holds bare addresses, so the memory that it writes must stay reserved while it lives. If each graph of a
runner, one a bucket, had memory of its own, ten buckets would need ten times the memory of a forward pass. But graphs
that are replayed one at a time can share memory: one graph's intermediate values lie where another's lay.

    pool           |--------- the same memory for all -----------|
    graph of 32    [ intermediate values          |   results    ]       captured first, by run.warmup
    graph of 16    [ intermediate values | results ]                     adds nothing
    graph of 8     [ interm. | res. ]                                    adds nothing

    stream         replay 16 -> copy its results out -> replay 8 -> copy its results out -> ...

`run.warmup` captures the largest graph first, and smaller ones fit into its memory. If calls bring the sizes in another
order, segments of the pool grow in place (`capture.growing_segments`): a larger graph could not use the fixed
segments of a smaller one. After a capture the results are known by non-owning aliases alone, so that the next capture
may use their memory too. A replay therefore overwrites the results of all other graphs: they are copied out before the
next replay, and each replay waits for the last one on the device (`GraphPool.wait_for_last_replay`). Dropping a graph
returns its part to the pool; torch frees the pool as a whole, with its last graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.graphs import capture as capture_module
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.runtime.launcher import current_stream, on_stream

T = TypeVar("T")


class GraphPool:
    """A memory pool of one device, and the stream that its graphs are captured on.

    Args:
        device: a CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = unshared_stream(device)
        _pools.add(self)
        self._last: list[torch.cuda.Stream] = [torch.cuda.current_stream(device)]
        """The stream of the last replay or first run, which the finalizer knows, too."""
        self._last_number = current_stream(device)
        self._handle: capture_module.PoolHandle | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        deferred_finalizers.watch(device)
        weakref.finalize(
            self, deferred_finalizers.run_or_defer, partial(_reset, self.graphs, self._last)
        ).atexit = False

    def run(self, program: Callable[[], T]) -> T:
        """Run a program on the pool's stream before its capture: libraries initialize then, outside of the pool."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with on_stream(self.stream):
                capture_module.make_workspaces(self.device)
                return program()
        finally:
            current.wait_stream(self.stream)

    def capture(self, program: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a program; other threads may go on using the device.

        Args:
            program: what to capture; it, or the same program at another size, has been `run` before.

        Returns:
            The graph, and the program's result: tensors in the pool, whose values are undefined before a replay.

        Raises:
            Exception: the program or CUDA raised it; the pool and its other graphs are unchanged.
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
                capture_module.make_workspaces(self.device)
                with capture_module.growing_segments(), capture_module.capturing(graph, self.device, self._handle):
                    out = program()
        except BaseException:
            self._replace_stuck_stream()
            self._forget_handle_if_empty()
            raise
        current.wait_stream(self.stream)
        self.graphs.append(graph)
        return graph, out

    def non_owning_aliases(self, tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return, for each tensor in the pool, an alias that does not keep its memory allocated.

        With the tensors themselves deleted, the next capture may use the memory of a graph's results. An alias is valid
        until another graph of the pool is replayed.
        """
        segments = capture_module.segments(self._handle)
        aliases = {}
        for t in tensors:
            if _is_inside(t, segments):
                storage = t.untyped_storage()
                memory = tensor_from_address(storage.data_ptr(), storage.nbytes(), t.device, None).untyped_storage()
                empty = torch.empty(0, dtype=t.dtype, device=t.device)
                aliases[t] = empty.set_(memory, t.storage_offset(), t.shape, t.stride())
        return aliases

    def outside(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return some tensors without plain ones in the pool's memory."""
        segments = capture_module.segments(self._handle)
        return [t for t in tensors if type(t) is not Tensor or t.layout != torch.strided or not _is_inside(t, segments)]

    def _replace_stuck_stream(self) -> None:
        """Replace the stream if a failed capture could not be ended on it."""
        with on_stream(self.stream):
            is_stuck = torch.cuda.is_current_stream_capturing()
        if is_stuck:
            self.stream = unshared_stream(self.device)

    def wait_for_last_replay(self) -> None:
        """Make the current stream wait for the last replay or first run, if that was on another; it is the next one."""
        number = current_stream(self.device)
        if number != self._last_number:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._last[0])
            self._last[0], self._last_number = current, number

    def drop(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy a graph, after its last replay; with the last graph the pool's memory is freed."""
        self._last[0].synchronize()
        capture_module.destroy(graph)
        self.graphs.remove(graph)
        self._forget_handle_if_empty()

    def _forget_handle_if_empty(self) -> None:
        """Forget the handle of a pool without graphs: torch frees that pool, and refuses its handle from then on."""
        if not self.graphs:
            self._handle = None

    def bytes(self) -> int:
        """Return the bytes of device memory in the pool."""
        return sum(segment["total_size"] for segment in capture_module.segments(self._handle))

    def active_bytes(self) -> int:
        """Return the bytes of the pool that are allocated to tensors, such as those that a program has kept."""
        return sum(segment["active_size"] for segment in capture_module.segments(self._handle))


def _is_inside(t: Tensor, segments: Iterable[capture_module.PoolSegment]) -> bool:
    address = t.untyped_storage().data_ptr()
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in segments)


_pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()


def unshared_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of no other pool, if there is one: graphs of one stream write to the same workspaces."""
    taken = {pool.stream.cuda_stream for pool in [*_pools] if pool.device == device}
    for _ in range(deferred_finalizers.STREAMS_PER_PRIORITY):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            break
    return stream


def _reset(graphs: list[torch.cuda.CUDAGraph], last: list[torch.cuda.Stream]) -> None:
    last[0].synchronize()
    for graph in graphs:
        capture_module.destroy(graph)
    graphs.clear()


@contextmanager
def capture_modes(requires_grad: bool = False) -> Iterator[None]:
    """A context for captures and runs of the program: no inference mode or autocast cache, backward on this thread.

    A capture serves all later calls, so it makes plain tensors and keeps nothing that the caller's contexts own.

    Args:
        requires_grad: whether autograd tracks the program.
    """
    # An autocast context frees its cache of cast weights at its end, under a graph.
    has_cache: bool = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        # The mode of inference decides on autograd's threads as well, so that these come after it. A backward runs on
        # this thread: the capture is its own, and another thread's backward may wait for the lock.
        with (
            torch.inference_mode(False),
            torch.autograd.set_multithreading_enabled(False),
            torch.set_grad_enabled(requires_grad),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(has_cache)
