"""Live numbers of fused calls that are a part of somebody else's CUDA graph.

A launch that is captured with its numbers would repeat them at every replay. Within `GraphNumbers.kept` it reads them
from memory beside the graph instead: new ones are written there before a replay, on its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs.protocols import Numbered
from subtensors.kernels.fused.launch import bits
from subtensors.kernels.runtime.transfer import to_device


@dataclass
class _Launch:
    group: Numbered
    source: Any
    words: list[int]
    memory: Tensor
    is_new: bool = True


class GraphNumbers:
    """The live numbers of one graph's launches."""

    def __init__(self) -> None:
        self.source: Any = None
        """Set by the calls' maker before each: what to name in `set`."""
        self._launches: list[_Launch] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which captured launches take their numbers from here."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def take(self, group: Numbered, numbers: Sequence[float], hosts: Sequence[float], device: torch.device) -> Tensor:
        """The memory that a launch is to read its numbers from.

        Args:
            group: that makes it.
            numbers: those of the call.
            hosts: the values of its tensors on the host.
            device: of the memory, with its index.
        """
        words = _words(group, numbers, hosts)
        # Beside the graph's pool: the allocator gives captured streams memory of that, and other streams of its own.
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            memory = torch.empty(len(words) + 1, dtype=torch.int64, device=device)
        self._launches.append(_Launch(group, self.source, words, memory))
        return memory

    def set(self, source: Any, numbers: Sequence[float], hosts: Sequence[float]) -> None:
        """Give the launches of one source other numbers, from the next replay on."""
        for launch in self._launches:
            if launch.source == source:
                words = _words(launch.group, numbers, hosts)
                launch.is_new = launch.is_new or words != launch.words
                launch.words = words

    def upload(self) -> None:
        """Send what is new to the device, on the current stream."""
        for launch in self._launches:
            if launch.is_new:
                launch.memory.copy_(to_device(np.asarray([*launch.words, 0], np.int64), launch.memory.device))
                launch.is_new = False


def _words(group: Numbered, numbers: Sequence[float], hosts: Sequence[float]) -> list[int]:
    return bits([*[evaluate(numbers) for evaluate in group.scalars], *hosts], group.kinds)


_active: ContextVar[GraphNumbers | None] = ContextVar("graph_numbers", default=None)


def graph_numbers() -> GraphNumbers | None:
    """The `GraphNumbers` of the launches that are captured now; None outside of `GraphNumbers.kept`."""
    return _active.get()
