"""Dynamic scalars of fused calls inside a CUDA graph that other code captures.

A launch that is captured with its scalars would repeat them at every replay. In the context `DynamicScalars.active` it
reads them from memory outside of the graph instead: new values are written there before a replay, on its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs.protocols import HasScalars
from subtensors.kernels.fused.launch import bits
from subtensors.kernels.runtime.graph_lifetime import to_device


@dataclass
class _LaunchScalars:
    executor: HasScalars
    source: object
    words: list[int]
    memory: Tensor
    has_changed: bool = True


class DynamicScalars:
    """The dynamic scalars of one graph's launches."""

    def __init__(self) -> None:
        self.source: object = None
        """Set by the caller before each call: identifies the call's numbers in `set`."""
        self._launches: list[_LaunchScalars] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which captured launches read their scalars from this object's memory."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def allocate(
        self, executor: HasScalars, numbers: Sequence[float], hosts: Sequence[float], device: torch.device
    ) -> Tensor:
        """Return the memory that a launch reads its scalars from.

        Args:
            executor: makes the launch.
            numbers: of the call.
            hosts: the values of its tensors on the host.
            device: of the memory, with its index.
        """
        words = _words(executor, numbers, hosts)
        # Outside of the graph's pool: the allocator uses that for the captured stream, and not for other streams.
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            memory = torch.empty(len(words) + 1, dtype=torch.int64, device=device)
        self._launches.append(_LaunchScalars(executor, self.source, words, memory))
        return memory

    def set(self, source: object, numbers: Sequence[float], hosts: Sequence[float]) -> None:
        """Set the numbers of one source's launches, from the next replay on."""
        for launch in self._launches:
            if launch.source == source:
                words = _words(launch.executor, numbers, hosts)
                launch.has_changed = launch.has_changed or words != launch.words
                launch.words = words

    def upload(self) -> None:
        """Copy the scalars that changed to the device, on the current stream."""
        for launch in self._launches:
            if launch.has_changed:
                launch.memory.copy_(to_device(np.asarray([*launch.words, 0], np.int64), launch.memory.device))
                launch.has_changed = False


def _words(executor: HasScalars, numbers: Sequence[float], hosts: Sequence[float]) -> list[int]:
    return bits([*[evaluate(numbers) for evaluate in executor.scalars], *hosts], executor.kinds)


_active: ContextVar[DynamicScalars | None] = ContextVar("dynamic_scalars", default=None)


current_scalars = _active.get  # a function of C, since every step calls it
"""Return the `DynamicScalars` of the launches that are captured; None outside of `DynamicScalars.active`."""
