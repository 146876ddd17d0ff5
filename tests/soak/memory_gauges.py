"""How much memory a process holds, by several gauges, and whether one of them grows from round to round."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MIB = 1 << 20


@dataclass(frozen=True)
class Gauge:
    """A number that stays flat in a process that leaks nothing.

    Args:
        name: what it measures.
        read: measures it.
        bound: how much it may grow a round, in bytes or objects.
        noise: how much it may grow in all without saying anything: an allocator takes memory in blocks.
    """

    name: str
    read: Callable[[], int]
    bound: float
    noise: float

    def growth(self, rounds: Sequence[int], values: Sequence[int]) -> float:
        """Return by how much it grows a round: from its least in the first third of some samples to that in the last.

        Args:
            rounds: the number of rounds at each sample.
            values: what was measured. The first quarter is left out: caches may still be filled then.
        """
        warm = len(values) // 4
        rounds, values = rounds[warm:], values[warm:]
        third = max(len(values) // 3, 1)
        first = min(range(third), key=values.__getitem__)
        last = min(range(len(values) - third, len(values)), key=values.__getitem__)
        return (values[last] - values[first]) / max(rounds[last] - rounds[first], 1)

    def complaint(self, rounds: Sequence[int], values: Sequence[int]) -> str:
        """Return by how much more it grows than it may; "" if it doesn't."""
        growth = self.growth(rounds, values)
        if growth <= self.bound or growth * (rounds[-1] - rounds[0]) <= self.noise:
            return ""
        return f"{self.name} grows by {growth:.3g} a round, and {self.bound:g} is allowed: {values[0]} -> {values[-1]}"


def gauges(device: str, pool_bytes: Callable[[], int]) -> list[Gauge]:
    """Return the gauges of the host, and on a GPU those of the device, too.

    Args:
        device: "cpu" or "cuda".
        pool_bytes: the memory of the graphs' pools.
    """
    host = [
        Gauge("host bytes", _resident_bytes, 2048, 16 * MIB),
        Gauge("Python objects", lambda: len(gc.get_objects()), 0.25, 300),
        Gauge("tensors", _tensors, 0.02, 20),
    ]
    if device == "cpu":
        return host
    return [
        *host,
        Gauge("allocated bytes", torch.cuda.memory_allocated, 64, MIB),
        Gauge("reserved bytes", torch.cuda.memory_reserved, 1024, 64 * MIB),
        Gauge("device bytes", _device_bytes, 1024, 64 * MIB),
        Gauge("pool bytes", pool_bytes, 64, 4 * MIB),
    ]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _tensors() -> int:
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


def _device_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
