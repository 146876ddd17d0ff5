"""Copies of an arena's contents to the host, and back to the same addresses."""

from __future__ import annotations

import torch

from subtensors.kernels.memory.from_address import tensor_from_address
from subtensors.static.allocation import Carver
from subtensors.static.pinned_staging import HostPages


class Contents:
    """Copies of the parts of a range that are in use.

    Args:
        carver: whose parts.
        device: where the range is.
    """

    def __init__(self, carver: Carver, device: torch.device) -> None:
        self._carver = carver
        self._device = device
        self._pages = HostPages(device)
        self._kept: dict[int, list[tuple[int, int, int]]] = {}
        """For each chunk its runs: (start, size, place on the host)."""

    def save(self) -> None:
        """Copy the parts in use to the host; raise MemoryError if the host is full."""
        kept: dict[int, list[tuple[int, int, int]]] = {}
        place = 0
        for chunk, start, size in self._carver.runs():
            kept.setdefault(chunk, []).append((start, size, place))
            place += size
        try:
            self._pages.grow(place)
            for runs in kept.values():
                for run in runs:
                    self._copy(*run, to_host=True)
        except BaseException:
            self.wait()
            self._pages.settle()
            self.trim()  # what could not be made is asked for anew the next time
            raise
        self.wait()
        self._kept = kept

    def load(self) -> None:
        """Map the chunks in use, and copy back what was saved: a chunk is copied while the next one is mapped.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory, MemoryError on a CPU; what was saved stays saved,
                and nothing is mapped.
        """
        try:
            for chunk in self._carver.needed_chunks():
                self._carver.map_chunk(chunk)
                for run in self._kept.get(chunk, ()):
                    self._copy(*run, to_host=False)
            self.wait()
        except BaseException:
            self.wait()
            self._carver.unmap_all()
            raise

    def forget(self) -> None:
        """Discard what was saved; its host memory is kept for the next time."""
        self._kept = {}

    def trim(self) -> None:
        """Free the host memory, unless something is saved in it."""
        if not self._kept:
            self._pages = HostPages(self._device)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return self._pages.size

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give the range back; nothing may use it."""
        self.wait()
        self._carver.close()

    def _copy(self, start: int, size: int, place: int, to_host: bool) -> None:
        for part in self._pages.parts(place, size):
            ours = tensor_from_address(self._carver.memory.address + start, part.numel(), self._device, self._carver)
            (part if to_host else ours).copy_(ours if to_host else part, non_blocking=True)
            start += part.numel()
