"""Copies of an arena's contents to memory of the host, and back to the same addresses."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.memory.host_reservation import HostRange
from subtensors.static.allocation import RangeAllocator

_PIECE_BYTES = 64 << 20
_MAX_THREADS = min(16, os.cpu_count() or 1)


class HostPages:
    """Host memory that grows, in pieces; page-locked for a CUDA device, so that copies run at the speed of the bus.

    One thread locks 20 GB in a dozen seconds, most of which is the first access to each page. So several threads touch
    pages of 2 MiB, which takes about as long as the copy, and the first pieces are copied at the same time. Locked
    memory is kept for the next release.

    >>> pages = HostPages(torch.device("cpu"))
    >>> pages.grow(1000)
    >>> [part.shape for part in pages.parts(10, 100)]
    [torch.Size([100])]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Future[Tensor]] = []

    def grow(self, size: int) -> None:
        """Start allocating memory for `size` bytes in total."""
        missing = -(-size // _PIECE_BYTES) - len(self._pieces)
        if missing > 0:
            threads = ThreadPoolExecutor(min(_MAX_THREADS, missing))
            self._pieces += [threads.submit(_allocate_piece, self._device) for _ in range(missing)]
            threads.shutdown(wait=False)

    def parts(self, start: int, size: int) -> list[Tensor]:
        """Return a range of bytes as uint8 tensors, one for each piece of it; wait until these are allocated."""
        parts = []
        while size:
            piece, offset = divmod(start, _PIECE_BYTES)
            count = min(size, _PIECE_BYTES - offset)
            parts.append(self._pieces[piece].result()[offset : offset + count])
            start, size = start + count, size - count
        return parts

    def wait(self) -> None:
        """Wait until all allocating threads are done, with or without an error."""
        wait(self._pieces)

    @property
    def size(self) -> int:
        """Bytes of allocated host memory."""
        return len(self._pieces) * _PIECE_BYTES


class _Pages:
    """Mapped host pages, which are freed when this object is deleted."""

    is_locked = False

    def __init__(self, device: torch.device) -> None:
        self.memory = HostRange(_PIECE_BYTES)
        self.memory.prefer_huge_pages()
        self.memory.map(0, _PIECE_BYTES)
        if device.type == "cuda":
            ctypes.memset(self.memory.address, 0, _PIECE_BYTES)
            with torch.cuda.device(device):  # the current one may have no context
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.memory.address, _PIECE_BYTES, 0))
            self.is_locked = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The name `sys` may be gone by then.
        if hasattr(self, "memory") and not is_finalizing():
            deferred_finalizers.run_or_defer(partial(_close, self.memory, self.is_locked))


def _close(memory: HostRange, is_locked: bool) -> None:
    if is_locked:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.address))
    memory.close()


def _allocate_piece(device: torch.device) -> Tensor:
    pages = _Pages(device)
    return tensor_from_address(pages.memory.address, _PIECE_BYTES, torch.device("cpu"), pages)


class HostCopy:
    """A copy on the host of the parts of a range that are in use, on a device."""

    def __init__(self, allocator: RangeAllocator, device: torch.device) -> None:
        self._allocator = allocator
        self._device = device
        self.pages = HostPages(device)
        self._saved: dict[int, list[tuple[int, int, int]]] = {}
        """For each chunk its runs: (start, size, offset on the host)."""

    def save(self) -> None:
        """Copy the parts in use to the host; raise MemoryError if the host is full."""
        saved: dict[int, list[tuple[int, int, int]]] = {}
        host_offset = 0
        for chunk, start, size in self._allocator.runs_in_use():
            saved.setdefault(chunk, []).append((start, size, host_offset))
            host_offset += size
        try:
            self.pages.grow(host_offset)
            for runs in saved.values():
                for run in runs:
                    self._copy(*run, to_host=True)
        except BaseException:
            self.wait()
            self.pages.wait()
            self.trim()  # pages that failed are allocated again the next time
            raise
        self.wait()
        self._saved = saved

    def load(self) -> None:
        """Map the chunks in use, and move the saved contents back: a chunk is copied while the next one is mapped.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory; MemoryError on a CPU. The contents stay saved, and
                nothing is mapped then.
        """
        try:
            for chunk in self._allocator.chunks_in_use():
                self._allocator.map_chunk(chunk)
                for run in self._saved.get(chunk, ()):
                    self._copy(*run, to_host=False)
            self.wait()
        except BaseException:
            self.wait()
            self._allocator.unmap_all()
            raise
        self._saved = {}  # whose host memory is kept for the next time

    def trim(self) -> None:
        """Free the host memory, unless contents are saved in it."""
        if not self._saved:
            self.pages = HostPages(self._device)

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the range; nothing may use it."""
        self.wait()
        self._allocator.close()

    def _copy(self, start: int, size: int, host_offset: int, to_host: bool) -> None:
        for part in self.pages.parts(host_offset, size):
            resident = tensor_from_address(
                self._allocator.memory.address + start, part.numel(), self._device, self._allocator
            )
            (part if to_host else resident).copy_(resident if to_host else part, non_blocking=True)
            start += part.numel()
