"""Copies of an arena's contents to the host, and back to the same addresses."""

from __future__ import annotations

import torch

from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.static.allocation import RangeAllocator
from subtensors.static.pinned_staging import HostPages


class HostCopy:
    """A copy on the host of the parts of a range that are in use, on a device."""

    def __init__(self, allocator: RangeAllocator, device: torch.device) -> None:
        self._allocator = allocator
        self._device = device
        self._pages = HostPages(device)
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
            self._pages.grow(host_offset)
            for runs in saved.values():
                for run in runs:
                    self._copy(*run, to_host=True)
        except BaseException:
            self.wait()
            self._pages.wait()
            self.trim()  # pages that failed are allocated again the next time
            raise
        self.wait()
        self._saved = saved

    def load(self) -> None:
        """Map the chunks in use, and copy the saved contents back: a chunk is copied while the next one is mapped.

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

    def forget(self) -> None:
        """Discard the saved contents; their host memory is kept for the next time."""
        self._saved = {}

    def trim(self) -> None:
        """Free the host memory, unless contents are saved in it."""
        if not self._saved:
            self._pages = HostPages(self._device)

    @property
    def host_bytes(self) -> int:
        """Bytes of allocated host memory."""
        return self._pages.size

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the range; nothing may use it."""
        self.wait()
        self._allocator.close()

    def _copy(self, start: int, size: int, host_offset: int, to_host: bool) -> None:
        for part in self._pages.parts(host_offset, size):
            resident = tensor_from_address(
                self._allocator.memory.address + start, part.numel(), self._device, self._allocator
            )
            (part if to_host else resident).copy_(resident if to_host else part, non_blocking=True)
            start += part.numel()
