"""Recording fused calls once and replaying them with live numbers and live addresses.

    pass 1, survey    the calls are made, and only looked at: plans and kernels exist, each launch has its place
    pass 2, record    the calls are made again under stream capture; their launches become a CUDA graph
    replay            what changed of numbers and addresses goes to the device in one copy, then the graph runs

Every launch reads its numbers and its pointer table from one buffer that the recording owns, laid out as

    numbers of launch 0, 1, ... | table of launch 0, 1, ...

so that a new learning rate is a copy of a few bytes, and gradients that moved are one of some bytes a tensor. Both come
from pinned memory and are enqueued on the stream of the replay: they are in order, and the host waits for nothing.

Where Triton interprets kernels on the CPU there is no graph: the launches themselves are kept, and made again.
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

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.graphs.protocols import NotRecordable, Recordable, Swept, Words
from subtensors.dispatch.graphs.replay import CudaTape, HostTape
from subtensors.dispatch.ops.errors import AddressError
from subtensors.kernels.fused.launch import Prelude, bits
from subtensors.kernels.runtime.current_device import current_stream


@dataclass
class Launch:
    """One launch of a recording."""

    group: Recordable
    source: object
    """Where its numbers come from: what `Recording.source` was when it was recorded."""
    numbers: list[float]
    hosts: list[float]
    arenas: list[Tensor]
    taken: list[int] = field(default_factory=list)
    """For each of its numbers which one of its source it is, -1 for one of its own; set by who calls `set_numbers`."""
    number_at: int = 0
    """Where its numbers are in the recording's buffer, and its table."""
    table_at: int = 0
    pointers: Words = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    moving: dict[int, Words] = field(default_factory=dict)
    """For each parameter of the program whose addresses move: which of the moving addresses it takes, -1 for none."""

    def words(self) -> list[int]:
        """The bits of its numbers, as the kernels read them."""
        values = [evaluate(self.numbers) for evaluate in self.group.scalars]
        return bits([*values, *self.hosts], self.group.kinds)


class Recording:
    """Some fused calls as one replay.

    Args:
        device: that all of them run on.
        has_ops: whether the calls run torch ops beside the launches.

    Example:
        >>> import torch
        >>> from subtensors.dispatch.fused.fused_function import FusedFunction
        >>> from subtensors.dispatch.fused.tensor_columns import TensorColumn
        >>> add = FusedFunction(lambda p, n: p.add_(n))
        >>> Recording(torch.device("cpu")).record(lambda: add(TensorColumn([torch.ones(2)]), 1.0), [])
        Traceback (most recent call last):
        ...
        subtensors.dispatch.graphs.protocols.NotRecordable: 1 torch ops an element
    """

    def __init__(self, device: torch.device, has_ops: bool = False) -> None:
        self.device = device
        self.source: object = None
        """Set by the calls' maker before each: what to name in `set_numbers`."""
        self.launches: list[Launch] = []
        self.written: list[Tensor] = []
        """What autograd must be told of: see `TritonExecutor.observed`."""
        self._key = next(_keys)
        self._grids: list[Swept] = []
        self._pending: Iterator[Launch] | None = None
        self._prelude: Prelude | None = None
        """A launch that was recorded and is to be made with the next."""
        self._tape = CudaTape(device, has_ops) if device.type == "cuda" else HostTape()
        self._is_number_new = self._is_table_new = False
        deferred_finalizers.watch(device)
        weakref.finalize(
            self, deferred_finalizers.run_or_defer, partial(_release, self._grids, self._key, self._tape)
        ).atexit = False

    def record(self, calls: Callable[[], object], moving: Sequence[Tensor]) -> None:
        """Make the calls twice, without running them, and keep what they launch.

        Args:
            calls: makes the same fused calls both times.
            moving: tensors that each replay may find elsewhere; `move` takes their addresses.

        Raises:
            NotRecordable: a call does not run as one launch of kernels.
            AddressError: the calls of the second pass are not those of the first.
        """
        with _recording(self):
            calls()
        self._lay_out()
        places = {address: i for i, t in enumerate(moving) if (address := t.data_ptr())}
        self._moving_bytes = np.asarray([t.nbytes for t in moving], np.int64)
        self._pending = iter(self.launches)
        with _recording(self):
            self._tape.record(calls)
        if next(self._pending, None) is not None:
            raise AddressError("a step changed while it was recorded: it made fewer calls the second time")
        spans = []
        for launch in self.launches:
            for i, row in enumerate(launch.pointers):
                index = np.asarray([places.get(address, -1) for address in row.tolist()], np.int64)
                if i not in launch.group.hosts and index.max(initial=-1) >= 0:
                    if ((index < 0) & (row != 0)).any():
                        raise NotRecordable("an argument holds tensors that move and others that do not")
                    launch.moving[i] = index
            for i, itemsize in launch.group.stores.items():
                nbytes = launch.group.grid.sizes * itemsize if itemsize > 0 else -itemsize
                spans.append((launch.pointers[i], launch.pointers[i] + nbytes))
            self._write_table(launch)
            self._write_numbers(launch)
        starts, ends = (np.sort(np.concatenate(part)) for part in zip(*spans, strict=True))
        self._written_starts, self._written_ends = starts, ends
        self._is_number_new = self._is_table_new = True

    def _lay_out(self) -> None:
        end = 0
        for launch in self.launches:
            launch.number_at = end
            end += len(launch.group.kinds) + 1
        self._numbers_end = end
        for launch in self.launches:
            launch.table_at = end
            end += launch.group.grid.table_size
        self._host = np.zeros(end, np.int64)
        self._words = torch.zeros(end, dtype=torch.int64, device=self.device)

    def launch(self, group: Recordable, columns: Sequence[Sequence[Tensor]], numbers: Sequence[float]) -> list[Tensor]:
        """Take a launch instead of making it.

        Args:
            group: whose launch it is.
            columns: its tensors.
            numbers: its live numbers.

        Returns:
            The arenas of the program's outputs; they hold nothing before a replay.
        """
        if self._pending is None:
            # Zeros: what torch makes of them in this pass is thrown away, but must not fail.
            arenas = [arena.zero_() for arena in group.new_arenas()]
            hosts = [float(columns[i][0].item()) for i in group.hosts]
            self.launches.append(Launch(group, self.source, list(numbers), hosts, arenas))
            self._grids.append(group.grid)
            group.grid.workspace(self._key)
            for parameter in group.observed:
                self.written.extend(columns[parameter])
            return arenas
        launch = next(self._pending, None)
        if launch is None or launch.group is not group:
            raise AddressError("a step changed while it was recorded: its calls differ from those of the first look")
        nowhere = [0] * group.grid.count
        launch.pointers = np.asarray(
            [nowhere if i in group.hosts else list(map(Tensor.data_ptr, c)) for i, c in enumerate(columns)], np.int64
        ).reshape(len(columns), group.grid.count)
        base = self._words.data_ptr()
        table, scalars = base + 8 * launch.table_at, base + 8 * launch.number_at
        prelude, self._prelude = self._prelude, group.as_prelude(table, self._key)
        if self._prelude is not None:
            assert prelude is None
            return launch.arenas

        def run() -> None:
            seed = torch.randint(2**62, (), device=self.device) if group.is_seeded else group.seed
            stream = current_stream(self.device)
            group.grid.launch(table, scalars, seed.data_ptr(), launch.arenas, stream, self._key, prelude)

        self._tape.take(run)
        return launch.arenas

    def _write_numbers(self, launch: Launch) -> None:
        words = launch.words()
        self._host[launch.number_at : launch.number_at + len(words)] = words

    def _write_table(self, launch: Launch) -> None:
        rows = launch.group.grid.rows(launch.pointers)
        self._host[launch.table_at : launch.table_at + rows.size] = rows.reshape(-1)

    def set_numbers(self, source: object, numbers: list[float], hosts: list[float]) -> None:
        """Give the launches of one source other numbers, from the next replay on.

        Args:
            source: as it was when they were recorded.
            numbers: the live numbers of the source.
            hosts: the values of its 0-d tensors on the CPU.
        """
        for launch in self.launches:
            if launch.source != source:
                continue
            own = [numbers[i] if i >= 0 else n for i, n in zip(launch.taken, launch.numbers, strict=True)]
            if launch.numbers != own or launch.hosts != hosts or 0.0 in own:
                launch.numbers, launch.hosts = own, hosts
                self._write_numbers(launch)
                self._is_number_new = True

    def move(self, addresses: list[int]) -> bool:
        """Say where the moving tensors are, from the next replay on.

        Args:
            addresses: one for each, in the order that `record` was given them.

        Returns:
            False, and nothing is changed, where one lies in memory that the launches write: then their order matters.
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
        self._is_table_new = True
        return True

    def replay(self) -> None:
        """Run what was recorded, on the current stream, with the numbers and addresses of now."""
        if self._is_table_new:
            self._upload(len(self._host))
        elif self._is_number_new:
            self._upload(self._numbers_end)
        self._is_number_new = self._is_table_new = False
        self._tape.replay()

    def _upload(self, count: int) -> None:
        """Send the first words of the buffer.

        The pinned memory is new each time, for the copy before may still be reading: torch's allocator hands it out
        again when the copy from it is done.
        """
        if self.device.type != "cuda":
            self._words[:count].copy_(torch.from_numpy(self._host[:count]))
            return
        pinned = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.numpy()[:] = self._host[:count]
        self._words[:count].copy_(pinned, non_blocking=True)

    def is_what_the_device_has(self) -> bool:
        """Return whether the device's copy of numbers and tables equals the host's. Waits for the device."""
        return bool((self._words.cpu().numpy() == self._host).all())


def _release(grids: list[Swept], key: int, tape: CudaTape | HostTape) -> None:
    for grid in grids:
        grid.forget(key)
    tape.reset()


# Streams have numbers from 0 on; the workspaces of recordings are known by others.
_keys = itertools.count(-1, -1)

_active: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def _recording(recording: Recording) -> Iterator[None]:
    token = _active.set(recording)
    try:
        yield
    finally:
        _active.reset(token)


def recording_now() -> Recording | None:
    """The recording that fused calls are recorded into now; None when they run instead."""
    return _active.get()
