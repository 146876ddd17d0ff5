"""A range of addresses of the host: pages are put under parts of it, and taken away again."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

_PROTECT_NONE, _PROTECT_ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED, _NO_RESERVE, _HUGE_PAGES = 0x10, 0x4000, 14  # Linux


class HostRange:
    """Addresses of the host, reserved but without memory; a touch of an unmapped part ends the process.

    Args:
        size: bytes, a multiple of `granule`; costs no memory.

    Raises:
        MemoryError: the process has no such range left.

    >>> pages = HostRange(1 << 30)
    >>> pages.map(0, pages.granule)
    >>> ctypes.c_uint8.from_address(pages.address).value
    0
    >>> pages.unmap(0, pages.granule)
    >>> pages.close()
    """

    granule = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _map_pages(None, size, _PROTECT_NONE, _PRIVATE | _NO_RESERVE)

    def map(self, start: int, size: int) -> None:
        """Put zeroed memory under a part of the range; MemoryError where there is none, and nothing is mapped then."""
        if _libc().mprotect(self.address + start, size, _PROTECT_ALL):
            raise MemoryError(f"no memory for {size} bytes of the host: {_reason()}")

    def unmap(self, start: int, size: int) -> None:
        """Give the memory of a part back; its addresses stay reserved."""
        _map_pages(self.address + start, size, _PROTECT_NONE, _PRIVATE | _NO_RESERVE | _FIXED)

    def close(self) -> None:
        """Give the addresses back, and what is still mapped."""
        _libc().munmap(self.address, self.size)

    def prefer_huge_pages(self) -> None:
        """Ask for pages of 2 MiB, which are faster to touch first and to lock."""
        _libc().madvise(self.address, self.size, _HUGE_PAGES)


def _map_pages(address: int | None, size: int, protection: int, flags: int) -> int:
    found = _libc().mmap(address, size, protection, flags, -1, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no {size} bytes of addresses on the host: {_reason()}")
    return int(found)


def _reason() -> str:
    import os

    return os.strerror(ctypes.get_errno())


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mprotect.argtypes = libc.madvise.argtypes = [pointer, size, number]
    libc.munmap.argtypes = [pointer, size]
    return libc
