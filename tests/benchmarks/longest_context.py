"""The longest context that fits in a GPU's memory: the search for it, and its rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded


@dataclass(frozen=True)
class ContextRow:
    """The longest context that one way trains on.

    Args:
        model: its type.
        loss: "sft" or "grpo".
        variant: which way.
        length: tokens of the one sequence of a step, a multiple of `MULTIPLE`; 0 if even the shortest did not fit.
        allocated_mb: the most device memory in such a step; None if it did not fit.
        transformers: version.
        setting: where it was measured.
    """

    model: str
    loss: str
    variant: str
    length: int
    allocated_mb: float | None
    transformers: str | None
    setting: Setting = field(repr=False)


MULTIPLE = 1024
"""The number that the lengths of longest contexts are multiples of."""


def longest_that_fits(peak: Callable[[int], float | None], limit: float, start: int) -> int:
    """Return a sequence that fits, where one that is 3% longer does not, in a few runs: memory grows with the length.

    Args:
        peak: the memory that a step at a length takes; None if it does not fit.
        limit: the device's memory, in the same unit.
        start: a length of which twice as much is likely to fit.

    Returns:
        a multiple of `MULTIPLE`, or `start`; 0 if that does not fit.

    >>> longest_that_fits(lambda n: 20 + n / 1024 if n <= 80000 else None, 100.0, 8192)
    79872
    """
    first, second = peak(start), peak(2 * start)
    if first is None or second is None:
        return start if first is not None else 0

    def rounded(length: float) -> int:
        return int(length) // MULTIPLE * MULTIPLE

    length = rounded(start + (limit - first) * start / (second - first))
    if peak(length) is not None:
        while peak(longer := max(rounded(1.03 * length), length + MULTIPLE)) is not None:
            length = longer
        return length
    while length > 2 * start:
        length = min(rounded(0.985 * length), length - MULTIPLE)
        if peak(length) is not None:
            return length
    return 2 * start


def longest_context(peaks: Callable[[int], list[float]], start: int, device: str) -> tuple[int, float | None]:
    """Find the longest sequence that a GPU's memory has room for.

    Args:
        peaks: the allocated and reserved MiB of a step at a length; may run out of memory.
        start: a length of which twice as much is likely to fit.
        device: the GPU.

    Returns:
        the length as `longest_that_fits` says, and the allocated MiB of a step; None if even the shortest did not fit.
    """
    allocated: dict[int, float] = {}

    def peak(length: int) -> float | None:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            allocated[length], reserved = peaks(length)
        except torch.cuda.OutOfMemoryError:
            return None
        return reserved

    limit = torch.cuda.get_device_properties(device).total_memory / 2**20
    length = longest_that_fits(peak, limit, start)
    return length, allocated.get(length)


def report_contexts(found: Iterable[ContextRow], path: Path) -> None:
    """Save rows as they are found, and print their table."""
    rows = list[ContextRow]()
    for row in found:
        rows.append(row)
        save(rows, path)  # a run that is cut short leaves what it found
    lines = [[row.variant, str(row.length), figure(row.allocated_mb, 6)] for row in rows]
    Console().print(folded(describe(rows), ["variant", "tokens", "allocated MiB"], lines))
