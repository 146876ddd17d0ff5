"""Padding and unpadding, differentiable: `pad_to` and `pad_list` are torch ops that a kernel computes.

The gradient of padding is a slice, and unpadding is written in torch's own ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.padded import padding
from subtensors.kernels.runtime.custom_ops import FLOAT_DTYPES, INTEGER_DTYPES, define_kernel
from subtensors.kernels.runtime.valid_lengths import LENGTHS_SCHEMA, ValidLength, pack_lengths, valid_mask

DTYPES = FLOAT_DTYPES + INTEGER_DTYPES


def pad_to(dense: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """Put a tensor at the start of one of this shape.

    Args:
        dense: of any strides.
        shape: as many sizes, none smaller.
        value: the value of the padding.

    Returns:
        Contiguous.

    Raises:
        ValueError: the shape cannot hold the tensor.

    Example:
        >>> pad_to(torch.ones(2, 1), (2, 3), value=-1)
        tensor([[ 1., -1., -1.],
                [ 1., -1., -1.]])
    """
    if len(shape) != dense.dim() or any(a < b for a, b in zip(shape, dense.shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(dense.shape)} cannot be padded to {tuple(shape)}")
    return torch.ops.subtensors.pad_to(dense, shape, value)  # type: ignore[no-any-return]


def unpad_to(padded: Tensor, size: Sequence[int]) -> Tensor:
    """Copy the start of a tensor to a contiguous tensor of this size.

    Args:
        padded: of any strides.
        size: as many sizes, none larger.

    Raises:
        ValueError: the tensor does not hold so much.

    Example:
        >>> unpad_to(torch.arange(6).view(2, 3), (2, 1))
        tensor([[0],
                [3]])
    """
    if len(size) != padded.dim() or any(a > b for a, b in zip(size, padded.shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(padded.shape)} has no part of size {tuple(size)}")
    return padding.start_of(padded, size).clone(memory_format=torch.contiguous_format)


def pad_values(values: Tensor, shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0) -> Tensor:
    """Pad a ragged batch, given its values row after row.

    Args:
        values: (total,) the elements of every row, each row contiguous; `torch.nested` keeps them so. More at the end
            have no effect.
        shape: of the result, (B, ...).
        lengths: its ragged dimensions, sizes (B,) each.
        value: the value of the padding.

    Returns:
        Contiguous.

    Example:
        >>> pad_values(torch.arange(1, 4), (2, 2), [ValidLength(1, torch.tensor([1, 2]))])
        tensor([[1, 0],
                [2, 3]])
    """
    count = math.prod(shape)
    # Values beyond the valid ones, whose index is -1, go to one more element at the end.
    index = _valid_indices(shape, lengths, len(values), values.device) % (count + 1)
    return values.new_full((count + 1,), value).index_copy(0, index, values)[:-1].view(*shape)


def unpad_values(padded: Tensor, lengths: Sequence[ValidLength], total: int) -> Tensor:
    """Concatenate the values of a ragged batch, row after row.

    Args:
        padded: (B, ...).
        lengths: its ragged dimensions, sizes (B,) each.
        total: the number of valid elements: the result's size, which the host has to know.

    Returns:
        (total,)

    Example:
        >>> unpad_values(torch.tensor([[1, 0], [2, 3]]), [ValidLength(1, torch.tensor([1, 2]))], total=3)
        tensor([1, 2, 3])
    """
    return padded.reshape(-1).index_select(0, _valid_indices(padded.shape, lengths, total, padded.device))


def _valid_indices(shape: Sequence[int], lengths: Sequence[ValidLength], total: int, device: torch.device) -> Tensor:
    """Return the flat indices of `total` valid elements, in order, then -1, without waiting for the device."""
    valid = valid_mask(shape, lengths, device).expand(*shape)
    return torch.nonzero_static(valid.reshape(-1), size=total).squeeze(1)


def pad_list(
    rows: Sequence[Tensor], shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0
) -> Tensor:
    """Pad a ragged batch, given one tensor for each row.

    Args:
        rows: B tensors of the true sizes, on one device and of one dtype.
        shape: of the result, (B, ...).
        lengths: its ragged dimensions, sizes (B,) each, which are those of the rows.
        value: the value of the padding.

    Returns:
        Contiguous.

    Example:
        >>> pad_list([torch.ones(1), torch.ones(2)], (2, 2), [ValidLength(1, torch.tensor([1, 2]))])
        tensor([[1., 0.],
                [1., 1.]])
    """
    return torch.ops.subtensors.pad_list(rows, shape, *pack_lengths(lengths), value)  # type: ignore[no-any-return]


define_kernel(
    "pad_to", "Tensor dense, SymInt[] shape, Scalar value", "Tensor", padding.pad_dense, padding.pad_reference,
    lambda dense, shape, *_: dense.new_empty(shape), DTYPES,
)  # fmt: skip
define_kernel(
    "pad_list", f"Tensor[] rows, SymInt[] shape, {LENGTHS_SCHEMA}, Scalar value", "Tensor", padding.pad_rows,
    padding.pad_rows_reference, lambda rows, shape, *_: rows[0].new_empty(shape), DTYPES,
)  # fmt: skip


def _pad_to_context(ctx: Any, inputs: tuple[Tensor, *tuple[object, ...]], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _pad_to_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    return padding.start_of(gradient, ctx.shape), None, None


def _pad_list_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, _, sizes, *_ = inputs
    ctx.shapes, ctx.ragged_dims = [row.shape for row in rows], len(sizes)


def _pad_list_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    rows = [padding.start_of(g, shape) for g, shape in zip(gradient.unbind(), ctx.shapes, strict=True)]
    return rows, None, None, [None] * ctx.ragged_dims, None, None


torch.library.register_autograd("subtensors::pad_to", _pad_to_gradient, setup_context=_pad_to_context)
torch.library.register_autograd("subtensors::pad_list", _pad_list_gradient, setup_context=_pad_list_context)
