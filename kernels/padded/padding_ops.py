"""Padding and unpadding as torch ops, each the other's gradient, with the reference where no kernel runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.padded import padding
from subtensors.kernels.runtime.custom_ops import FLOAT_DTYPES, INTEGER_DTYPES, define_kernel
from subtensors.kernels.runtime.valid_lengths import LENGTHS_SCHEMA, ValidLength, pack_lengths

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
    return torch.ops.subtensors.unpad_to(padded, size)  # type: ignore[no-any-return]


def pad_values(values: Tensor, shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0) -> Tensor:
    """Pad a ragged batch, given its values row after row.

    Args:
        values: (total,) the elements of every row, each row contiguous; `torch.nested` keeps them so.
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
    return torch.ops.subtensors.pad_values(values, shape, *pack_lengths(lengths), value)  # type: ignore[no-any-return]


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
    return torch.ops.subtensors.unpad_values(padded, *pack_lengths(lengths), total)  # type: ignore[no-any-return]


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


def _of_shape(tensor: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    return tensor.new_empty(shape)


define_kernel(
    "pad_to", "Tensor dense, SymInt[] shape, Scalar value", "Tensor", padding.pad_dense, padding.pad_reference,
    _of_shape, DTYPES,
)  # fmt: skip
define_kernel(
    "unpad_to", "Tensor padded, SymInt[] size", "Tensor", padding.unpad_dense, padding.unpad_reference,
    _of_shape, DTYPES,
)  # fmt: skip


def _shape_context(ctx: Any, inputs: tuple[Tensor, *tuple[object, ...]], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _pad_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    return torch.ops.subtensors.unpad_to(gradient, ctx.shape), None, None


def _unpad_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    return torch.ops.subtensors.pad_to(gradient, ctx.shape, 0), None


torch.library.register_autograd("subtensors::pad_to", _pad_gradient, setup_context=_shape_context)
torch.library.register_autograd("subtensors::unpad_to", _unpad_gradient, setup_context=_shape_context)


define_kernel(
    "pad_values", f"Tensor values, SymInt[] shape, {LENGTHS_SCHEMA}, Scalar value", "Tensor", padding.pad_ragged,
    padding.pad_ragged_reference, _of_shape, DTYPES,
)  # fmt: skip
define_kernel(
    "unpad_values", f"Tensor padded, {LENGTHS_SCHEMA}, SymInt total", "Tensor", padding.unpad_ragged,
    padding.unpad_ragged_reference, lambda padded, d, s, b, total: padded.new_empty(total), DTYPES,
)  # fmt: skip
define_kernel(
    "pad_list", f"Tensor[] rows, SymInt[] shape, {LENGTHS_SCHEMA}, Scalar value", "Tensor", padding.pad_rows,
    padding.pad_rows_reference, lambda rows, shape, *_: rows[0].new_empty(shape), DTYPES,
)  # fmt: skip


def _values_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, _, ctx.dims, sizes, ctx.batch_dims, _ = inputs
    ctx.shapes = [row.shape for row in values] if isinstance(values, (list, tuple)) else [values.shape]
    ctx.save_for_backward(*sizes)


def _values_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, *tuple[object, ...]]:
    sizes = list(ctx.saved_tensors)
    total = sum(shape.numel() for shape in ctx.shapes)
    values = torch.ops.subtensors.unpad_values(gradient, ctx.dims, sizes, ctx.batch_dims, total)
    return values, None, None, [None] * len(sizes), None, None


def _list_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    values, *rest = _values_gradient(ctx, gradient)
    ends = [0, *itertools.accumulate(shape.numel() for shape in ctx.shapes)]
    rows = [values[a:b].view(shape) for (a, b), shape in zip(itertools.pairwise(ends), ctx.shapes, strict=True)]
    return rows, *rest


def _unpad_values_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    padded, ctx.dims, sizes, ctx.batch_dims, _ = inputs
    ctx.shape = padded.shape
    ctx.save_for_backward(*sizes)


def _unpad_values_gradient(ctx: Any, gradient: Tensor) -> tuple[object, ...]:
    sizes = list(ctx.saved_tensors)
    padded = torch.ops.subtensors.pad_values(gradient, ctx.shape, ctx.dims, sizes, ctx.batch_dims, 0)
    return padded, None, [None] * len(sizes), None, None


torch.library.register_autograd("subtensors::pad_values", _values_gradient, setup_context=_values_context)
torch.library.register_autograd("subtensors::pad_list", _list_gradient, setup_context=_values_context)
torch.library.register_autograd("subtensors::unpad_values", _unpad_values_gradient, setup_context=_unpad_values_context)
