"""Carving: parts of an address range, with memory mapped under them in chunks as they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from subtensors.dispatch.ops.errors import AddressError
from subtensors.static.free_list import FreeList


class AddressRange(Protocol):
    """Reserved addresses under which memory can be mapped."""

    address: int
    size: int

    def map(self, start: int, size: int) -> None:
        """Map memory under a part, or raise and change nothing."""

    def unmap(self, start: int, size: int) -> None:
        """Unmap the memory of a part that one call mapped."""

    def close(self) -> None:
        """Give the addresses back."""


class Carving:
    """A part of a range, freed when nothing refers to this object any more.

    Args:
        carver: whose range it is.
        start: of the part, from the start of the range.
        size: of the part.
    """

    def __init__(self, carver: Carver, start: int, size: int) -> None:
        self.carver = carver
        self.start = start
        self.size = size

    def __del__(self) -> None:
        # It may be collected in any thread at any time, within the carver's own code too: it only leaves a note.
        self.carver.dropped.append((self.start, self.size))


class Carver:
    """Takes aligned parts of a range and keeps memory under them.

    Args:
        memory: the range.
        chunk: bytes mapped at once; the range is a multiple of it.
        alignment: of each part, in bytes.

    >>> from subtensors.kernels.memory.host_reservation import HostRange
    >>> carver = Carver(HostRange(8 << 20), chunk=1 << 20, alignment=512)
    >>> part = carver.take(1000)
    >>> part.start, part.size, carver.mapped_bytes, carver.used_bytes
    (0, 1024, 1048576, 1024)
    >>> del part
    >>> carver.collect()
    >>> carver.mapped_bytes, carver.used_bytes
    (1048576, 0)
    """

    def __init__(self, memory: AddressRange, chunk: int, alignment: int) -> None:
        self.memory = memory
        self.dropped: deque[tuple[int, int]] = deque()
        self.chunk = chunk
        self._alignment = alignment
        self._free = FreeList(memory.size)
        self._used: dict[int, int] = {}
        self._mapped: set[int] = set()

    def take(self, size: int, alignment: int = 1) -> Carving:
        """Take a part of at least `size` bytes with memory under it; an error leaves everything unchanged.

        Args:
            size: bytes.
            alignment: of this part, if it is more than that of all parts.

        Raises:
            AddressError: the range is used up.
            torch.OutOfMemoryError: the device has no memory left; MemoryError on a CPU.
        """
        self.collect()
        size = -(-size // self._alignment) * self._alignment
        start = self._free.take(size, max(alignment, self._alignment))
        if start is None:
            raise AddressError(
                f"no {size} bytes in one piece are left of the Arena's {self.memory.size}, of which {self.used_bytes} "
                f"are in use: make it with a larger reserve, which costs nothing, or delete tensors"
            )
        try:
            self._map(self._chunks_under(start, size))
        except BaseException:
            self._free.give(start, size)
            raise
        self._used[start] = size
        return Carving(self, start, size)

    def collect(self) -> None:
        """Free the dropped parts, in the order in which they were dropped."""
        while self.dropped:
            start, size = self.dropped.popleft()
            del self._used[start]
            self._free.give(start, size)

    def needed_chunks(self) -> list[int]:
        """The chunks under parts in use, in order."""
        self.collect()
        return sorted({chunk for start, size in self._used.items() for chunk in self._chunks_under(start, size)})

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The parts in use, joined where they touch and cut at chunks: (chunk, start, size), in order."""
        self.collect()
        joined: list[list[int]] = []
        for start, size in sorted(self._used.items()):
            if joined and joined[-1][1] == start:
                joined[-1][1] = start + size
            else:
                joined.append([start, start + size])
        for start, end in joined:
            for chunk in self._chunks_under(start, end - start):
                low, high = max(start, chunk * self.chunk), min(end, (chunk + 1) * self.chunk)
                yield chunk, low, high - low

    def starts(self) -> list[int]:
        """The start offsets of the parts in use."""
        self.collect()
        return list(self._used)

    def map_chunk(self, chunk: int) -> None:
        """Map memory under a chunk that has none."""
        self.memory.map(chunk * self.chunk, self.chunk)
        self._mapped.add(chunk)

    def unmap_all(self) -> None:
        """Unmap all memory; the parts in use keep their addresses."""
        for chunk in sorted(self._mapped):
            self.memory.unmap(chunk * self.chunk, self.chunk)
            self._mapped.discard(chunk)

    def close(self) -> None:
        """Give memory and addresses back; nothing may use them."""
        self.unmap_all()
        self.memory.close()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory mapped under the range."""
        return len(self._mapped) * self.chunk

    @property
    def used_bytes(self) -> int:
        """The sizes of all parts, alignment included."""
        self.collect()
        return sum(self._used.values())

    def _chunks_under(self, start: int, size: int) -> range:
        return range(start // self.chunk, -(-(start + size) // self.chunk))

    def _map(self, chunks: range) -> None:
        new = [chunk for chunk in chunks if chunk not in self._mapped]
        for count, chunk in enumerate(new):
            try:
                self.map_chunk(chunk)
            except BaseException:
                for done in new[:count]:
                    self.memory.unmap(done * self.chunk, self.chunk)
                    self._mapped.discard(done)
                raise
