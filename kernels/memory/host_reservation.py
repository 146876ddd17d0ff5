"""A reserved range of addresses of the host: pages are mapped under parts of it, and unmapped again."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

_PROTECT_NONE, _PROTECT_ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED, _NO_RESERVE, _HUGE_PAGES = 0x10, 0x4000, 14  # Linux


class HostRange:
    """Reserved addresses of the host; an access to a part without memory ends the process.

    Args:
        size: bytes, a multiple of `granularity`; reserving takes no memory.

    Raises:
        MemoryError: no range of that size is left.

    >>> pages = HostRange(1 << 30)
    >>> pages.map(0, pages.granularity)
    >>> ctypes.c_uint8.from_address(pages.address).value
    0
    >>> pages.unmap(0, pages.granularity)
    >>> pages.close()
    """

    granularity = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _map_pages(None, size, _PROTECT_NONE, _PRIVATE | _NO_RESERVE)

    def map(self, start: int, size: int) -> None:
        """Map zeroed memory under a part of the range; raise MemoryError and map nothing if the host has not enough."""
        if _libc().mprotect(self.address + start, size, _PROTECT_ALL):
            raise MemoryError(f"no memory for {size} bytes of the host: {os.strerror(ctypes.get_errno())}")

    def unmap(self, start: int, size: int) -> None:
        """Free the memory of a part; its addresses stay reserved."""
        _map_pages(self.address + start, size, _PROTECT_NONE, _PRIVATE | _NO_RESERVE | _FIXED)

    def close(self) -> None:
        """Free the addresses, and the memory still mapped under them."""
        _libc().munmap(self.address, self.size)

    def prefer_huge_pages(self) -> None:
        """Ask for pages of 2 MiB, which are faster to fault in and to lock."""
        _libc().madvise(self.address, self.size, _HUGE_PAGES)


def _map_pages(address: int | None, size: int, protection: int, flags: int) -> int:
    mapped = _libc().mmap(address, size, protection, flags, -1, 0)
    if mapped in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no {size} bytes of addresses on the host: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mprotect.argtypes = libc.madvise.argtypes = [pointer, size, number]
    libc.munmap.argtypes = [pointer, size]
    return libc
