"""The valid lengths of a padded tensor, as plain tensors: the number of leading valid indices of some dimensions.

The sizes stay on the device: nothing here or in the kernels reads them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ValidLength(NamedTuple):
    """Along `dim`, index `i` is real where `i < sizes`.

    Args:
        dim: the padded dimension.
        sizes: int64 on the tensor's device: (), or (B,) for a ragged dimension, whose size is another in each row.
        batch_dim: the dimension of B rows; of no meaning where `sizes` is ().
    """

    dim: int
    sizes: Tensor
    batch_dim: int = 0


def normalized(extents: Sequence[ValidLength], ndim: int) -> tuple[ValidLength, ...]:
    """The extents with dimensions counted from the front."""
    return tuple(ValidLength(e.dim % ndim, e.sizes, e.batch_dim % ndim) for e in extents)


def real_mask(shape: Sequence[int], extents: Sequence[ValidLength], device: torch.device) -> Tensor:
    """True where an element is real.

    Args:
        shape: of the padded tensor.
        extents: its padded dimensions; an element is real where each of them says so.
        device: of the result.

    Returns:
        bool of a shape that broadcasts to `shape`, with size 1 where it does not vary.

    Example:
        >>> real_mask((2, 3), [ValidLength(1, torch.tensor([3, 1]))], torch.device("cpu")).int()
        tensor([[1, 1, 1],
                [1, 0, 0]], dtype=torch.int32)
    """
    ndim = len(shape)
    mask = torch.ones([1] * ndim, dtype=torch.bool, device=device)
    for dim, sizes, batch_dim in normalized(extents, ndim):
        index = torch.arange(shape[dim], device=device).view([-1 if i == dim else 1 for i in range(ndim)])
        rows = sizes.view([-1 if i == batch_dim else 1 for i in range(ndim)]) if sizes.dim() else sizes
        mask = mask & (index < rows)
    return mask
