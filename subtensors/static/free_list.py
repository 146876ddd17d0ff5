"""The free parts of a range: first fit from the low end; freed parts merge with their neighbours."""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """The free parts of `range(size)`.

    Args:
        size: of the whole range, all of it free.

    >>> free = FreeList(100)
    >>> free.take(10, 8), free.take(10, 8), free.take(4, 1)
    (0, 16, 10)
    >>> free.give(0, 10)
    >>> free.take(8, 8)
    0
    >>> free.take(1000, 1) is None
    True
    """

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._ends = [size]

    def take(self, size: int, alignment: int) -> int | None:
        """Take `size` free places at the lowest aligned start, and return that start; None if there are none."""
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            at = -(-start // alignment) * alignment
            if at + size <= end:
                parts = [(s, e) for s, e in ((start, at), (at + size, end)) if s < e]
                self._starts[i : i + 1] = [s for s, _ in parts]
                self._ends[i : i + 1] = [e for _, e in parts]
                return at
        return None

    def give(self, start: int, size: int) -> None:
        """Free a part that was taken."""
        i = bisect_left(self._starts, start)
        first, last = i, i
        end = start + size
        if i > 0 and self._ends[i - 1] == start:
            first, start = i - 1, self._starts[i - 1]
        if i < len(self._starts) and self._starts[i] == end:
            last, end = i + 1, self._ends[i]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
