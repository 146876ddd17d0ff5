"""Recording fused calls once and replaying them as a CUDA graph, with dynamic scalars and addresses.

    pass 1, survey    make the calls without launching: plans and kernels get compiled, launches get their offsets
    pass 2, record    make the calls again under stream capture; their launches become a CUDA graph
    replay            copy the scalars and addresses that changed to the device, in one copy; then run the graph

Every launch reads its scalars and its pointer table from one buffer that the recording owns, laid out as

    scalars of launch 0, 1, ... | table of launch 0, 1, ...

so that a new learning rate is a copy of a few bytes, and gradients at new addresses are a copy of some bytes a tensor.
Both are copied from pinned memory on the stream of the replay (`dynamic_scalars.WordBuffer`): they are in order, and
the host never waits.

Where Triton interprets kernels on the CPU there is no graph: the launches are kept, and made again at each replay.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs import capture, deferred_finalizers
from subtensors.dispatch.graphs.dynamic_scalars import (
    DynamicScalars,
    LaunchScalars,
    NotRecordable,
    Recordable,
    WordBuffer,
    Words,
)
from subtensors.dispatch.graphs.pool import unshared_stream
from subtensors.dispatch.ops.errors import AddressError
from subtensors.kernels.fused.launch import Grid
from subtensors.kernels.runtime.launcher import current_stream, on_stream


@dataclass
class Launch(LaunchScalars):
    """One launch of a recording."""

    arenas: list[Tensor] = field(default_factory=list)
    table_offset: int = 0
    """The offset of its pointer table."""
    pointers: Words = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    moving: dict[int, Words] = field(default_factory=dict)
    """For each parameter with changing addresses, their indices in the argument of `move`; -1 for null pointers."""


class CudaTape:
    """Launches that are replayed as a CUDA graph.

    Args:
        device: a CUDA device, with its index.
        has_ops: whether there are torch ops among the calls.
    """

    def __init__(self, device: torch.device, has_ops: bool) -> None:
        self.device, self.has_ops = device, has_ops
        self.graph = capture.new_graph(device)
        self.replay: Callable[[], None] = self.graph.replay

    def record(self, calls: Callable[[], object]) -> None:
        """Capture the calls on a stream of their own; other threads may go on using the device."""
        current, side = torch.cuda.current_stream(self.device), unshared_stream(self.device)
        side.wait_stream(current)
        pool = torch.cuda.graph_pool_handle()
        with deferred_finalizers.no_gc_during_capture(), on_stream(side):
            if self.has_ops:
                capture.make_workspaces(self.device)
            with capture.capturing(self.graph, self.device, pool):
                calls()
        current.wait_stream(side)

    def add(self, run: Callable[[], None]) -> None:
        """Capture one launch."""
        run()

    def reset(self) -> None:
        """Destroy the graph; this would invalidate a capture that is under way."""
        if self.has_ops:  # which work in the graph's memory
            torch.cuda.synchronize(self.device)
        capture.destroy(self.graph)


class HostTape:
    """Launches that are replayed one by one, for kernels that Triton interprets."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], None]] = []

    def record(self, calls: Callable[[], object]) -> None:
        """Make the calls, which add their launches."""
        calls()

    def add(self, run: Callable[[], None]) -> None:
        """Keep one launch."""
        self.runs.append(run)

    def replay(self) -> None:
        """Make the launches."""
        for run in self.runs:
            run()

    def reset(self) -> None:
        """Drop the launches."""
        self.runs.clear()


class Recording:
    """A sequence of fused calls that is replayed as one.

    Args:
        device: of all calls.
        has_ops: whether the calls run torch ops besides the launches.

    Example:
        >>> import torch
        >>> from subtensors.dispatch.fused.fused_function import FusedFunction
        >>> from subtensors.dispatch.fused.tensor_columns import TensorColumn
        >>> add = FusedFunction(lambda p, n: p.add_(n))
        >>> Recording(torch.device("cpu")).record(lambda: add(TensorColumn([torch.ones(2)]), 1.0), [])
        Traceback (most recent call last):
        ...
        subtensors.dispatch.graphs.dynamic_scalars.NotRecordable: 1 torch ops an element, joined or cut
    """

    def __init__(self, device: torch.device, has_ops: bool = False) -> None:
        self.device = device
        self.scalars = DynamicScalars()
        """The numbers of the launches; its `source` says which call those come from that are being recorded."""
        self.launches: list[Launch] = []
        self.written: list[Tensor] = []
        """Tensors whose versions a replay must increment: see `TritonExecutor.observed`."""
        self._key = next(_keys)
        self._grids: list[Grid] = []
        self._pending: Iterator[Launch] | None = None
        self._tape = CudaTape(device, has_ops) if device.type == "cuda" else HostTape()
        self._words = WordBuffer(0, torch.device("cpu"))
        """The numbers and tables."""
        self._moving_bytes = self._written_starts = self._written_ends = np.zeros(0, np.int64)
        deferred_finalizers.watch(device)
        weakref.finalize(
            self, deferred_finalizers.run_or_defer, partial(_release, self._grids, self._key, self._tape)
        ).atexit = False

    def record(self, calls: Callable[[], object], moving: Sequence[Tensor]) -> None:
        """Make the calls twice, without running them, and keep their launches.

        Args:
            calls: makes the same fused calls both times.
            moving: tensors whose addresses may differ at each replay; `move` takes the new ones.

        Raises:
            NotRecordable: a call does not run as one launch of kernels.
            AddressError: the calls of the second pass are not those of the first.
        """
        with _recording(self):
            calls()
        self._lay_out()
        moving_indices = {address: i for i, t in enumerate(moving) if (address := t.data_ptr())}
        self._moving_bytes = np.asarray([t.nbytes for t in moving], np.int64)
        self._pending = iter(self.launches)
        with _recording(self):
            self._tape.record(calls)
        if next(self._pending, None) is not None:
            raise AddressError("a step changed while it was recorded: it made fewer calls in the second pass")
        nothing = np.zeros(0, np.int64)
        spans = [(nothing, nothing)]
        for launch in self.launches:
            for i, row in enumerate(launch.pointers):
                index = np.asarray([moving_indices.get(address, -1) for address in row.tolist()], np.int64)
                if i not in launch.executor.hosts and index.max(initial=-1) >= 0:
                    if ((index < 0) & (row != 0)).any():
                        raise NotRecordable("an argument has both tensors whose addresses change and others")
                    launch.moving[i] = index
            for i, itemsize in launch.executor.stores.items():
                nbytes = launch.executor.grid.sizes * itemsize if itemsize > 0 else -itemsize
                spans.append((launch.pointers[i], launch.pointers[i] + nbytes))
            self._write_table(launch)
        starts, ends = (np.sort(np.concatenate(part)) for part in zip(*spans, strict=True))
        self._written_starts, self._written_ends = starts, ends

    def _lay_out(self) -> None:
        numbers_end = sum(launch.size for launch in self.launches)
        tables = sum(launch.executor.grid.table_size for launch in self.launches)
        self._words = WordBuffer(numbers_end + tables, self.device)
        offset, table_offset = 0, numbers_end
        for launch in self.launches:
            launch.place(self._words, offset)
            launch.table_offset = table_offset
            offset, table_offset = offset + launch.size, table_offset + launch.executor.grid.table_size

    def launch(
        self, executor: Recordable, columns: Sequence[Sequence[Tensor]], numbers: Sequence[float]
    ) -> list[Tensor]:
        """Record a launch instead of making it; return the arenas of its outputs, which a replay fills."""
        if self._pending is None:
            # Zeros: what torch ops compute from them in this pass is discarded, but must not fail.
            arenas = [arena.zero_() for arena in executor.new_arenas()]
            hosts = [float(columns[i][0].item()) for i in executor.hosts]
            self.launches.append(Launch(executor, self.scalars.source, list(numbers), hosts, arenas=arenas))
            self.scalars.launches.append(self.launches[-1])
            self._grids.append(executor.grid)
            executor.grid.workspace(self._key)
            for parameter in executor.observed:
                self.written.extend(columns[parameter])
            return arenas
        launch = next(self._pending, None)
        if launch is None or launch.executor is not executor:
            raise AddressError("a step changed while it was recorded: its calls differ from those of the first pass")
        nowhere = [0] * executor.grid.count
        launch.pointers = np.asarray(
            [nowhere if i in executor.hosts else list(map(Tensor.data_ptr, c)) for i, c in enumerate(columns)], np.int64
        ).reshape(len(columns), executor.grid.count)
        table = self._words.on_device.data_ptr() + 8 * launch.table_offset

        def run() -> None:
            seed = torch.randint(2**62, (), device=self.device) if executor.is_seeded else executor.seed
            stream = current_stream(self.device)
            executor.grid.launch(table, launch.address, seed.data_ptr(), launch.arenas, stream, self._key)

        self._tape.add(run)
        return launch.arenas

    def _write_table(self, launch: Launch) -> None:
        self._words.write(launch.table_offset, launch.executor.grid.rows(launch.pointers).reshape(-1))

    def move(self, addresses: list[int]) -> bool:
        """Set the addresses of the moving tensors, from the next replay on.

        Args:
            addresses: one for each tensor, in the order of `record`'s argument.

        Returns:
            False, and nothing is changed, if one lies in memory that the launches write: then their order matters.
        """
        new = np.asarray(addresses, np.int64)
        before = np.searchsorted(self._written_starts, new + self._moving_bytes)
        hit = (before > 0) & (self._written_ends[np.maximum(before - 1, 0)] > new) & (self._moving_bytes > 0)
        if hit.any():
            return False
        for launch in self.launches:
            for i, index in launch.moving.items():
                launch.pointers[i] = np.where(index >= 0, new[index], 0)
            if launch.moving:
                self._write_table(launch)
        return True

    def replay(self) -> None:
        """Run the recorded launches on the current stream, with the current numbers and addresses."""
        if self._words.changed[1]:
            self._words.upload()
        self._tape.replay()

    def matches_device(self) -> bool:
        """Return whether the device's copy of numbers and tables equals the host's. Waits for the device."""
        return self._words.matches_device()


def _release(grids: list[Grid], key: int, tape: CudaTape | HostTape) -> None:
    for grid in grids:
        grid.forget(key)
    tape.reset()


# Workspaces are keyed by stream handles, which are at least 0; those of recordings by negative numbers.
_keys = itertools.count(-1, -1)

_active: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def _recording(recording: Recording) -> Iterator[None]:
    token = _active.set(recording)
    try:
        with recording.scalars.active():
            yield
    finally:
        _active.reset(token)


current_recording = _active.get  # a function of C, since every fused call calls it
"""Return the recording that fused calls are recorded into now; None when they run instead."""
