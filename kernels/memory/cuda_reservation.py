"""A reserved range of addresses of a CUDA device: physical memory is mapped under parts of it, and unmapped again.

CUDA driver API, "Virtual Memory Management": cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch


class CudaRange:
    """Reserved addresses of a device; a kernel that accesses a part without memory faults.

    Args:
        size: bytes, a multiple of 2 MiB, the smallest amount that devices map; may be larger than the device's memory.
        device: a CUDA device with its index.

    Raises:
        ImportError: the package cuda-bindings is not installed.
        torch.OutOfMemoryError: no range of that size is left.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        driver = _driver()
        torch.cuda.current_stream(device).query()  # creates the device's context
        self.device = device
        self.size = size
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.address = int(_checked(driver.cuMemAddressReserve(size, 0, 0, 0)))

    def map(self, start: int, size: int) -> None:
        """Map memory under a part of the range; raise OutOfMemoryError and map nothing if the device has not enough."""
        driver = _driver()
        with torch.cuda.device(self.device):  # a thread's first call of the driver needs it
            handle = _checked(driver.cuMemCreate(size, self._properties, 0))
            try:
                _checked(driver.cuMemMap(self.address + start, size, 0, handle, 0))
                try:
                    _checked(driver.cuMemSetAccess(self.address + start, size, [self._access], 1))
                except RuntimeError:
                    driver.cuMemUnmap(self.address + start, size)
                    raise
            finally:
                # Mapped memory lives until it is unmapped.
                driver.cuMemRelease(handle)

    def unmap(self, start: int, size: int) -> None:
        """Free the memory of a part that one call of `map` mapped; its addresses stay reserved."""
        with torch.cuda.device(self.device):
            _checked(_driver().cuMemUnmap(self.address + start, size))

    def close(self) -> None:
        """Free the addresses; everything must be unmapped."""
        _checked(_driver().cuMemAddressFree(self.address, self.size))


def has_driver() -> bool:
    """Return whether the package cuda-bindings is installed."""
    try:
        _driver()
    except ImportError:
        return False
    return True


def any_capturing(streams: list[int]) -> bool:
    """Return whether any of these CUDA streams, given by their handles, is being captured."""
    driver = _driver()
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return any(_checked(driver.cuStreamIsCapturing(driver.CUstream(stream))) != none for stream in streams)


def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise ImportError(
            "an Arena on a CUDA device needs the package cuda-bindings: pip install cuda-bindings"
        ) from missing
    module: ModuleType = driver
    return module


class _Status(Protocol):
    name: str
    value: int


def _checked(result: tuple[_Status, *tuple[object, ...]]) -> Any:
    """Return a driver call's result after its status; raise OutOfMemoryError or RuntimeError if the call failed."""
    status, *values = result
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError("the CUDA device is out of memory")
    if status.value:
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None
