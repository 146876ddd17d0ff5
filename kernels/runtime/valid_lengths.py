"""The valid lengths of a padded tensor, as plain tensors: the number of leading valid indices of some dimensions.

The lengths stay on the device: nothing here or in the kernels reads them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LENGTHS_SCHEMA = "int[] dims, Tensor[] sizes, int[] batch_dims"
"""Valid lengths as arguments of an op: a schema has no type for them, so an op takes them as three lists."""


class ValidLength(NamedTuple):
    """Along `dim`, index `i` is valid where `i < sizes`.

    Args:
        dim: the padded dimension.
        sizes: int64 on the tensor's device: (), or (B,) for a ragged dimension, whose length varies with the row.
        batch_dim: the dimension of B rows; not used where `sizes` is ().
    """

    dim: int
    sizes: Tensor
    batch_dim: int = 0


def pack_lengths(lengths: Sequence[ValidLength]) -> tuple[list[int], list[Tensor], list[int]]:
    """Return valid lengths as the arguments of `LENGTHS_SCHEMA`."""
    return [e.dim for e in lengths], [e.sizes for e in lengths], [e.batch_dim for e in lengths]


def unpack_lengths(dims: Sequence[int], sizes: Sequence[Tensor], batch_dims: Sequence[int]) -> list[ValidLength]:
    """Return the valid lengths of an op's arguments."""
    return [ValidLength(*parts) for parts in zip(dims, sizes, batch_dims, strict=True)]


def normalize_dims(lengths: Sequence[ValidLength], ndim: int) -> tuple[ValidLength, ...]:
    """Return the lengths with dimensions counted from the front."""
    return tuple(ValidLength(e.dim % ndim, e.sizes, e.batch_dim % ndim) for e in lengths)


def valid_mask(shape: Sequence[int], lengths: Sequence[ValidLength], device: torch.device) -> Tensor:
    """Return the mask that is True where an element is valid.

    Args:
        shape: of the padded tensor.
        lengths: of its padded dimensions; an element is valid where it is along each of them.
        device: of the result.

    Returns:
        bool of a shape that broadcasts to `shape`, with size 1 where it does not vary.

    Example:
        >>> valid_mask((2, 3), [ValidLength(1, torch.tensor([3, 1]))], torch.device("cpu")).int()
        tensor([[1, 1, 1],
                [1, 0, 0]], dtype=torch.int32)
    """
    ndim = len(shape)
    mask = torch.ones([1] * ndim, dtype=torch.bool, device=device)
    for dim, sizes, batch_dim in normalize_dims(lengths, ndim):
        index = torch.arange(shape[dim], device=device).view([-1 if i == dim else 1 for i in range(ndim)])
        rows = sizes.view([-1 if i == batch_dim else 1 for i in range(ndim)]) if sizes.dim() else sizes
        mask = mask & (index < rows)
    return mask
