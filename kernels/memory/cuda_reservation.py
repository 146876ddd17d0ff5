"""A range of addresses of a CUDA device: physical memory is put under parts of it, and taken away again.

CUDA driver API, "Virtual Memory Management": cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap.
"""

from __future__ import annotations

from typing import Any

import torch


class CudaRange:
    """Addresses of a device, reserved but without memory; a kernel that touches an unmapped part faults.

    Args:
        size: bytes, a multiple of `granule`; may be larger than the device.
        device: which, with its index.

    Raises:
        ImportError: the package cuda-bindings is not installed.
        torch.OutOfMemoryError: no such range is left.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        driver = _driver()
        torch.cuda.current_stream(device).query()  # makes the device's context
        self.device = device
        self.size = size
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(_done(driver.cuMemGetAllocationGranularity(self._kind, flag)))
        self.address = int(_done(driver.cuMemAddressReserve(size, 0, 0, 0)))

    def map(self, start: int, size: int) -> None:
        """Put memory under a part of the range; OutOfMemoryError where there is none, and nothing is mapped then."""
        driver = _driver()
        with torch.cuda.device(self.device):  # a thread's first call needs the context
            handle = _done(driver.cuMemCreate(size, self._kind, 0))
            try:
                _done(driver.cuMemMap(self.address + start, size, 0, handle, 0))
                try:
                    _done(driver.cuMemSetAccess(self.address + start, size, [self._access], 1))
                except RuntimeError:
                    driver.cuMemUnmap(self.address + start, size)
                    raise
            finally:
                # What is mapped lives until it is unmapped.
                driver.cuMemRelease(handle)

    def unmap(self, start: int, size: int) -> None:
        """Give the memory of a part back, a part that one `map` mapped; its addresses stay reserved."""
        with torch.cuda.device(self.device):
            _done(_driver().cuMemUnmap(self.address + start, size))

    def close(self) -> None:
        """Give the addresses back; everything must be unmapped."""
        _done(_driver().cuMemAddressFree(self.address, self.size))


def has_driver() -> bool:
    """Return whether the package cuda-bindings is installed."""
    try:
        _driver()
    except ImportError:
        return False
    return True


def is_captured(streams: list[int]) -> bool:
    """Return whether any of these CUDA streams, given by their handles, is being captured."""
    driver = _driver()
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return any(_done(driver.cuStreamIsCapturing(driver.CUstream(stream))) != none for stream in streams)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise ImportError(
            "an Arena on a CUDA device needs the package cuda-bindings: pip install cuda-bindings"
        ) from missing
    return driver


def _done(result: tuple[Any, ...]) -> Any:
    """Return a driver call's result after its status; raise OutOfMemoryError or RuntimeError if the call failed."""
    status, *values = result
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError("the CUDA device is out of memory")
    if status.value:
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None
