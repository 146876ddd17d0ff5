"""Multiplying a tensor in place by a number that is on the device, for nothing where the number is one."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.kernels.runtime.current_device import launching_on

BLOCK, PROGRAMS = 4096, 1024


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """tensor *= factor, in float32, without reading either on the host.

    Args:
        tensor: contiguous, floating point.
        factor: 0-d, on the same device.

    Returns:
        The tensor.

    Example:
        >>> scale_(torch.ones(2), torch.tensor(3.0))
        tensor([3., 3.])
    """
    if tensor.is_cuda and tensor.dtype != torch.float64:
        scale_by_kernel(tensor, factor)
        return tensor
    return tensor.mul_(factor)


def scale_by_kernel(tensor: Tensor, factor: Tensor) -> None:
    """The same by the Triton kernel."""
    from subtensors.kernels.cross_entropy.scale_add_kernel import scale_kernel

    if tensor.numel():
        with launching_on(tensor.device):
            scale_kernel[(PROGRAMS,)](tensor, factor, tensor.numel(), PROGRAMS=PROGRAMS, BLOCK=BLOCK)
