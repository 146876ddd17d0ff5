"""Allocation of parts of an address range, with memory mapped under them in chunks when they are needed."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

from subtensors.dispatch.ops.errors import AddressError
from subtensors.kernels.memory.cuda_reservation import CudaRange
from subtensors.kernels.memory.host_reservation import HostRange


class FreeList:
    """The free parts of `range(size)`: allocation takes the first that fits, and freed parts merge with neighbours.

    >>> free = FreeList(100)
    >>> free.allocate(10, 8), free.allocate(10, 8), free.allocate(4, 1)
    (0, 16, 10)
    >>> free.free(0, 10)
    >>> free.allocate(8, 8)
    0
    >>> free.allocate(1000, 1) is None
    True
    """

    def __init__(self, size: int) -> None:
        self._parts = [(0, size)]
        """The start and end of each, in order."""

    def allocate(self, size: int, alignment: int) -> int | None:
        """Take a free part at the lowest aligned start where one fits, and return that start; None if none fits."""
        for i, (start, end) in enumerate(self._parts):
            aligned = -(-start // alignment) * alignment
            if aligned + size <= end:
                self._parts[i : i + 1] = [(s, e) for s, e in ((start, aligned), (aligned + size, end)) if s < e]
                return aligned
        return None

    def free(self, start: int, size: int) -> None:
        """Free an allocated part."""
        first = last = bisect_left(self._parts, (start, start))
        end = start + size
        if first > 0 and self._parts[first - 1][1] == start:
            first, start = first - 1, self._parts[first - 1][0]
        if last < len(self._parts) and self._parts[last][0] == end:
            last, end = last + 1, self._parts[last][1]
        self._parts[first:last] = [(start, end)]


class Allocation:
    """A part of a range, from an offset in it and of some bytes, which is freed when this object is deleted."""

    def __init__(self, allocator: RangeAllocator, start: int, size: int) -> None:
        self.allocator = allocator
        self.start = start
        self.size = size

    def __del__(self) -> None:
        # Any thread may run this at any time, the allocator's own code too: so it only appends to a queue.
        self.allocator.dropped.append((self.start, self.size))


class RangeAllocator:
    """Allocates aligned parts of a range, and maps memory under them.

    Args:
        memory: the range.
        chunk: the bytes that are mapped at once; the size of the range is a multiple of it.
        alignment: of each part, in bytes.

    >>> allocator = RangeAllocator(HostRange(8 << 20), chunk=1 << 20, alignment=512)
    >>> part = allocator.allocate(1000)
    >>> part.start, part.size, allocator.mapped_bytes, allocator.used_bytes
    (0, 1024, 1048576, 1024)
    >>> del part
    >>> allocator.free_dropped()
    >>> allocator.mapped_bytes, allocator.used_bytes
    (1048576, 0)
    """

    def __init__(self, memory: CudaRange | HostRange, chunk: int, alignment: int) -> None:
        self.memory = memory
        self.dropped: deque[tuple[int, int]] = deque()
        self.chunk = chunk
        self._alignment = alignment
        self._free = FreeList(memory.size)
        self._used: dict[int, int] = {}
        self._mapped: set[int] = set()

    def allocate(self, size: int, alignment: int = 1) -> Allocation:
        """Allocate a part of at least `size` bytes with memory under it; an error leaves everything unchanged.

        Args:
            size: bytes.
            alignment: of this part, if it is larger than that of all parts.

        Raises:
            AddressError: the range is used up.
            torch.OutOfMemoryError: the device has no memory left; MemoryError on a CPU.
        """
        self.free_dropped()
        size = -(-size // self._alignment) * self._alignment
        start = self._free.allocate(size, max(alignment, self._alignment))
        if start is None:
            raise AddressError(
                f"no {size} bytes in one piece are left of the Arena's {self.memory.size}, of which {self.used_bytes} "
                f"are in use: make it with a larger reserve, which costs nothing, or delete tensors"
            )
        try:
            self._map(self._chunks_under(start, size))
        except BaseException:
            self._free.free(start, size)
            raise
        self._used[start] = size
        return Allocation(self, start, size)

    def free_dropped(self) -> None:
        """Free the dropped parts, in the order in which they were dropped."""
        while self.dropped:
            start, size = self.dropped.popleft()
            del self._used[start]
            self._free.free(start, size)

    def parts(self) -> dict[int, int]:
        """Return the sizes of the parts in use, by their offsets."""
        self.free_dropped()
        return self._used

    def chunks_in_use(self) -> list[int]:
        """Return the chunks under parts in use, in order."""
        return sorted({chunk for start, size in self.parts().items() for chunk in self._chunks_under(start, size)})

    def runs_in_use(self) -> Iterator[tuple[int, int, int]]:
        """Yield (chunk, start, size) of the parts in use, merged where they touch and split at chunks, in order."""
        merged: list[list[int]] = []
        for start, size in sorted(self.parts().items()):
            if merged and merged[-1][1] == start:
                merged[-1][1] = start + size
            else:
                merged.append([start, start + size])
        for start, end in merged:
            for chunk in self._chunks_under(start, end - start):
                low, high = max(start, chunk * self.chunk), min(end, (chunk + 1) * self.chunk)
                yield chunk, low, high - low

    def map_chunk(self, chunk: int) -> None:
        """Map memory under a chunk that has none."""
        self.memory.map(chunk * self.chunk, self.chunk)
        self._mapped.add(chunk)

    def unmap_all(self) -> None:
        """Unmap all memory; the parts in use keep their addresses."""
        self._unmap(sorted(self._mapped))

    def _unmap(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.memory.unmap(chunk * self.chunk, self.chunk)
            self._mapped.discard(chunk)

    def close(self) -> None:
        """Free memory and addresses; nothing may use them."""
        self.unmap_all()
        self.memory.close()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory mapped under the range."""
        return len(self._mapped) * self.chunk

    @property
    def used_bytes(self) -> int:
        """The sizes of all parts, alignment included."""
        return sum(self.parts().values())

    def _chunks_under(self, start: int, size: int) -> range:
        return range(start // self.chunk, -(-(start + size) // self.chunk))

    def _map(self, chunks: range) -> None:
        new = [chunk for chunk in chunks if chunk not in self._mapped]
        try:
            for chunk in new:
                self.map_chunk(chunk)
        except BaseException:
            self._unmap(self._mapped.intersection(new))
            raise
