"""Tensors over existing memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _CudaBytes:
    """Arguments of `tensor_from_address` for a CUDA device, in a form that `torch.as_tensor` takes."""

    address: int
    size: int
    owner: object

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}


def tensor_from_address(address: int, size: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return the bytes at an address as a tensor with a storage of its own, which torch cannot resize.

    Args:
        address: of the first byte; all must be readable and writable.
        size: the number of bytes.
        device: CPU or CUDA, with its index.
        owner: kept alive until the last tensor of that storage is deleted.

    Returns:
        (size,) uint8 at `address`; for no bytes an ordinary empty tensor.

    >>> backing = torch.zeros(4, dtype=torch.uint8)
    >>> alias = tensor_from_address(backing.data_ptr(), 4, backing.device, backing)
    >>> alias[1] = 7
    >>> backing.tolist(), alias.untyped_storage().resizable()
    ([0, 7, 0, 0], False)
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaBytes(address, size, owner), device=device)
    buffer = (ctypes.c_uint8 * size).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
