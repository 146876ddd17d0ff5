"""Host memory for the contents of a released arena."""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.kernels.memory.host_reservation import HostRange

_PIECE = 64 << 20
_THREADS = min(16, os.cpu_count() or 1)


class HostPages:
    """Host memory that grows, in pieces; for a CUDA device page-locked, which copies at the speed of the bus.

    One thread locks 20 GB in a dozen seconds, most of which goes into the first touch of each page. So threads touch
    pages of 2 MiB, which takes about as long as the copy, and the first pieces are copied at the same time.
    Locked memory is kept for the next time.

    Args:
        device: whose bytes will be kept.

    >>> pages = HostPages(torch.device("cpu"))
    >>> pages.grow(1000)
    >>> [part.shape for part in pages.parts(10, 100)]
    [torch.Size([100])]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Future[Tensor]] = []

    def grow(self, size: int) -> None:
        """Begin to make room for `size` bytes."""
        missing = -(-size // _PIECE) - len(self._pieces)
        if missing > 0:
            threads = ThreadPoolExecutor(min(_THREADS, missing))
            self._pieces += [threads.submit(_new_piece, self._device) for _ in range(missing)]
            threads.shutdown(wait=False)

    def parts(self, start: int, size: int) -> list[Tensor]:
        """A range of bytes as uint8 tensors, one for each piece that it lies in; waits until the pieces are there."""
        parts = []
        while size:
            piece, offset = divmod(start, _PIECE)
            count = min(size, _PIECE - offset)
            parts.append(self._pieces[piece].result()[offset : offset + count])
            start, size = start + count, size - count
        return parts

    def settle(self) -> None:
        """Wait until all threads that make pages are done, with or without an error."""
        wait(self._pieces)

    @property
    def size(self) -> int:
        """Bytes of host memory that are held."""
        return len(self._pieces) * _PIECE


class _Pages:
    """Mapped host pages, which are freed with this object."""

    is_locked = False

    def __init__(self, device: torch.device) -> None:
        self.memory = HostRange(_PIECE)
        self.memory.prefer_huge_pages()
        self.memory.map(0, _PIECE)
        if device.type == "cuda":
            ctypes.memset(self.memory.address, 0, _PIECE)
            with torch.cuda.device(device):  # the current one need not have a context
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.memory.address, _PIECE, 0))
            self.is_locked = True

    def __del__(self) -> None:
        if hasattr(self, "memory") and not sys.is_finalizing():
            deferred_finalizers.run_or_defer(partial(_close, self.memory, self.is_locked))


def _close(memory: HostRange, is_locked: bool) -> None:
    if is_locked:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.address))
    memory.close()


def _new_piece(device: torch.device) -> Tensor:
    pages = _Pages(device)
    return tensor_from_address(pages.memory.address, _PIECE, torch.device("cpu"), pages)
