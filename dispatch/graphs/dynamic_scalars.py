"""Dynamic scalars: numbers of fused calls that a captured graph reads from memory beside it.

A launch that is captured with its scalars would repeat them at every replay. In the context `DynamicScalars.active` it
reads them from a `WordBuffer` outside of the graph instead. New values are written to the buffer's copy on the host,
and what changed of it is uploaded before a replay, on its stream. Graphs that this package records alone
(`fused_graph.Recording`) and those that others capture, such as a whole training step, use the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subtensors.kernels.fused.launch import Grid, bits

Words: TypeAlias = npt.NDArray[np.int64]

_BLOCK_WORDS = 512
"""The words of a buffer that launches share whose number is not known before."""


class NotRecordable(Exception):
    """Fused calls can't be replayed with dynamic scalars and addresses; the message says why."""


class Recordable:
    """A launch that a graph can hold with dynamic scalars and addresses: what graphs know of `TritonExecutor`."""

    grid: Grid
    seed: Tensor
    """The seed to pass to a launch that does not round stochastically."""
    scalars: Sequence[Callable[[Sequence[float]], float]]
    """The functions that compute the dynamic scalars from the numbers of the call."""
    kinds: Sequence[type[float] | type[int]]
    """The Python types of the dynamic scalars, then of the tensors on the host."""
    hosts: Sequence[int]
    """The indices of the parameters that are on the host."""
    observed: Collection[int]
    """The parameters whose versions autograd checks."""
    stores: Mapping[int, int]
    """For each parameter that is written, the bytes of an element; negative for one with a number per tensor."""
    is_seeded: bool
    """True if the launch rounds stochastically."""

    def new_arenas(self) -> list[Tensor]:
        """Allocate memory for the outputs of a launch."""
        raise NotImplementedError


class WordBuffer:
    """Words of 8 bytes on a device, with a copy on the host that is written first.

    Args:
        count: the number of words.
        device: with its index.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.host: Words = np.zeros(count, np.int64)
        self.on_device = torch.empty(count, dtype=torch.int64, device=device)
        self.used = 0
        """The number of words that launches have taken of it."""
        self.changed = 0, count
        """The range of words that the next upload copies; empty if it ends at 0."""

    def write(self, offset: int, words: Words | Sequence[int]) -> None:
        """Set some words, from the next upload on."""
        end = offset + len(words)
        self.host[offset:end] = words
        start, stop = self.changed
        self.changed = (min(start, offset), max(stop, end)) if stop else (offset, end)

    def upload(self) -> None:
        """Copy the words that changed to the device, on the current stream.

        Each copy has new pinned memory, since the previous copy may still be reading its own: torch's allocator reuses
        that memory once the copy is done.
        """
        start, stop = self.changed
        self.changed = 0, 0
        is_cuda = self.on_device.is_cuda
        words = torch.empty(stop - start, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        words.numpy()[:] = self.host[start:stop]
        self.on_device[start:stop].copy_(words, non_blocking=is_cuda)

    def matches_device(self) -> bool:
        """Return whether the device's copy equals the host's. Waits for the device."""
        return bool((self.on_device.cpu().numpy() == self.host).all())


@dataclass
class LaunchScalars:
    """The dynamic scalars of one launch."""

    executor: Recordable
    source: object
    """The source of its numbers: the value of `DynamicScalars.source` when it was captured."""
    numbers: list[float]
    hosts: list[float]
    buffer: WordBuffer | None = None
    offset: int = 0
    """The offset of its words in the buffer."""
    indices: list[int] | None = None
    """For each number its index among those of the source, -1 for a constant; None if they are the same."""
    words: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of its words in a buffer: at least one, which the kernel may read."""
        return len(self.executor.kinds) + 1

    def place(self, buffer: WordBuffer, offset: int) -> None:
        """Give the scalars their place in a buffer, and write them there."""
        self.buffer, self.offset, self.words = buffer, offset, []
        self._write()

    def set(self, numbers: Sequence[float], hosts: Sequence[float]) -> None:
        """Set the numbers of the source and the values of its tensors on the host, from the next upload on."""
        if self.indices is not None:
            numbers = [numbers[i] if i >= 0 else n for i, n in zip(self.indices, self.numbers, strict=True)]
        if not self.hosts:  # the launch reads none
            hosts = []
        if self.numbers != numbers or self.hosts != hosts or 0.0 in numbers:  # which equals -0.0
            self.numbers, self.hosts = list(numbers), list(hosts)
            self._write()

    def _write(self) -> None:
        values = [evaluate(self.numbers) for evaluate in self.executor.scalars]
        words = bits([*values, *self.hosts], self.executor.kinds)
        if words != self.words and self.buffer is not None:
            self.words = words
            self.buffer.write(self.offset, words)

    @property
    def address(self) -> int:
        """The address on the device."""
        assert self.buffer is not None
        return self.buffer.on_device.data_ptr() + 8 * self.offset


class DynamicScalars:
    """The dynamic scalars of one graph's launches."""

    def __init__(self) -> None:
        self.source: object = None
        """Set by the caller before each call: identifies the call's numbers in `set`."""
        self.launches: list[LaunchScalars] = []
        self._buffers: list[WordBuffer] = []
        self._unwaited: list[torch.cuda.Stream] = []
        """The streams that new buffers were allocated on."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which captured launches read their scalars from this object's memory."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def allocate(
        self, executor: Recordable, numbers: Sequence[float], hosts: Sequence[float], device: torch.device
    ) -> Tensor:
        """Return memory for a launch to read its scalars from.

        Args:
            executor: makes the launch.
            numbers: of the call.
            hosts: the values of its tensors on the host.
            device: of the memory, with its index.
        """
        launch = LaunchScalars(executor, self.source, list(numbers), list(hosts))
        buffer = self._buffers[-1] if self._buffers else None
        if buffer is None or buffer.on_device.device != device or buffer.used + launch.size > len(buffer.host):
            # Outside of the graph's pool: the allocator uses that for the captured stream, and not for other streams.
            stream = torch.cuda.default_stream(device) if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                buffer = WordBuffer(max(launch.size, _BLOCK_WORDS), device)
            if stream is not None:
                self._unwaited.append(stream)
            self._buffers.append(buffer)
        launch.place(buffer, buffer.used)
        buffer.used += launch.size
        self.launches.append(launch)
        return buffer.on_device[launch.offset :]

    def set(self, source: object, numbers: Sequence[float], hosts: Sequence[float]) -> None:
        """Set the numbers of one source's launches, from the next replay on.

        Args:
            source: the value of `source` when they were captured.
            numbers: the dynamic scalars of the source.
            hosts: the values of its 0-d tensors on the CPU.
        """
        for launch in self.launches:
            if launch.source == source:
                launch.set(numbers, hosts)

    def upload(self) -> None:
        """Copy the scalars that changed to the device, on the current stream."""
        for stream in self._unwaited:  # on which what had the memory before may still be written
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._unwaited.clear()
        for buffer in self._buffers:
            if buffer.changed[1]:
                buffer.upload()


_active: ContextVar[DynamicScalars | None] = ContextVar("dynamic_scalars", default=None)


current_scalars = _active.get  # a function of C, since every step calls it
"""Return the `DynamicScalars` of the launches that are captured; None outside of `DynamicScalars.active`."""
