"""Padding and unpadding: between dense values and the padded storage, one kernel each way.

Each is the other's gradient. Padding is written by `pad` and read by nobody: `unpad` of a gradient drops what stands
there. A ragged batch is a list of tensors, or as `torch.nested` has it one tensor of the rows' values one after the
other. Where a row starts there is a sum over the rows before it, which every program of the kernel adds up for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import TILE_ELEMENTS
from subtensors.kernels.runtime.current_device import launching_on
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.valid_lengths import ValidLength, normalize_dims, valid_mask

Dim3 = tuple[int, "int | Tensor", int]
"""A dimension as the kernel takes it: padded size, true size, stride in the dense tensor."""


@cache
def _kernels() -> ModuleType:
    """Import the kernels, and Triton with them, at the first launch."""
    from subtensors.kernels.padded import padding_kernel

    return padding_kernel


def pad_reference(dense: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """Compute `pad` in torch ops."""
    padded = dense.new_full(shape, value)
    padded[tuple(map(slice, dense.shape))] = dense
    return padded


def unpad_reference(padded: Tensor, size: Sequence[int]) -> Tensor:
    """Compute `unpad` in torch ops."""
    return padded[tuple(map(slice, size))].contiguous()


def pad_ragged_reference(
    values: Tensor, shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0
) -> Tensor:
    """Compute `pad_ragged` in torch ops."""
    valid = real_mask(shape, lengths, values.device).expand(tuple(shape))
    return values.new_full(shape, value).masked_scatter(valid, values)


def unpad_ragged_reference(padded: Tensor, lengths: Sequence[ValidLength], total: int) -> Tensor:
    """Compute `unpad_ragged` in torch ops."""
    values = padded[real_mask(padded.shape, lengths, padded.device).expand(padded.shape)]
    assert len(values) == total, f"{total} elements were said to be real, {len(values)} are"
    return values


def pad_dense(dense: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """`dense` at the start of a tensor of this shape, `value` elsewhere.

    Args:
        dense: of any strides.
        shape: as many sizes, none smaller.
        value: in the padding.

    Returns:
        Contiguous, of the dtype of `dense`.
    """
    padded = dense.new_empty(shape)
    dims = _merged_dims(
        [(bucket, true, stride) for bucket, true, stride in zip(shape, dense.shape, dense.stride(), strict=True)]
    )
    _launch(dense, None, padded, dims, value, batch=None, unpad=False)
    return padded


def unpad_dense(padded: Tensor, size: Sequence[int]) -> Tensor:
    """The start of a padded tensor: contiguous, of this size."""
    dense = padded.new_empty(size)
    dims = _merged_dims(
        [(bucket, true, stride) for bucket, true, stride in zip(padded.shape, size, dense.stride(), strict=True)]
    )
    _launch(dense, None, padded.contiguous(), dims, 0.0, batch=None, unpad=True)
    return dense


def pad_ragged(values: Tensor, shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0) -> Tensor:
    """A ragged batch whose rows lie one after the other, padded.

    Args:
        values: (total,) the elements of every row, each row contiguous.
        shape: of the result, (B, ...).
        lengths: its ragged dimensions, sizes (B,) each.
        value: in the padding.
    """
    padded = values.new_empty(shape)
    _launch(values, None, padded, _ragged_dims(shape, lengths), value, batch=shape[0], unpad=False)
    return padded


def pad_rows(
    rows: Sequence[Tensor], shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0
) -> Tensor:
    """A ragged batch of tensors, padded; arguments as of `pad_ragged`.

    Rows are read where they are, by a table of their addresses. While a CUDA graph is being captured that table becomes
    part of it: a replay reads the same memory.
    """
    contiguous = [row.contiguous() for row in rows]
    padded = rows[0].new_empty(shape)
    addresses = to_device(_addresses(contiguous), padded.device)
    _launch(contiguous[0], addresses, padded, _ragged_dims(shape, lengths), value, batch=shape[0], unpad=False)
    return padded


def unpad_ragged(padded: Tensor, lengths: Sequence[ValidLength], total: int) -> Tensor:
    """The valid elements of a ragged batch, row after row: (total,).

    Args:
        padded: (B, ...).
        lengths: the ragged dimensions, sizes (B,) each.
        total: how many elements are real; the result is allocated by it, so the host has to know it.
    """
    values = padded.new_empty(total)
    dims = _ragged_dims(padded.shape, lengths)
    _launch(values, None, padded.contiguous(), dims, 0.0, batch=padded.shape[0], unpad=True)
    return values


def _addresses(rows: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.asarray([row.data_ptr() for row in rows], dtype=np.int64)


def _ragged_dims(shape: Sequence[int], lengths: Sequence[ValidLength]) -> list[Dim3]:
    ragged = {length.dim: length.sizes for length in normalized(lengths, len(shape))}
    return _merged_dims([(shape[d], ragged.get(d, shape[d]), 0) for d in range(1, len(shape))])


def _merged_dims(dims: Sequence[Dim3]) -> list[Dim3]:
    """The same walk over fewer dimensions: one without padding joins the one around it, where memory does too."""
    merged: list[Dim3] = []
    for bucket, true, stride in dims:
        if merged and isinstance(true, int) and true == bucket:
            outer, size, step = merged[-1]
            # A stride of 0 twice is that of a ragged batch, whose rows are contiguous.
            if isinstance(size, int) and (step == stride * bucket):
                merged[-1] = (outer * bucket, size * bucket, stride)
                continue
        merged.append((bucket, true, stride))
    return merged


def _launch(
    dense: Tensor, addresses: Tensor | None, padded: Tensor, dims: list[Dim3], value: float, batch: int | None,
    unpad: bool,
) -> None:  # fmt: skip
    """Run the kernel over every element of `padded`."""
    if not padded.numel():
        return
    columns = dims[-1][0] if dims else 1
    rows = padded.numel() // columns
    block_columns = min(1 << (columns - 1).bit_length(), TILE_ELEMENTS)
    block_rows = min(max(TILE_ELEMENTS // block_columns, 1), 1 << (rows - 1).bit_length())
    batch_rows = rows // batch if batch else rows
    span = 1
    if batch and addresses is None:
        # Where each row starts is added up for a tile's rows against each other.
        block_rows = min(block_rows, math.isqrt(TILE_ELEMENTS))
        span = 1 << ((block_rows + batch_rows - 2) // batch_rows).bit_length()
    # Triton has no memory of bools; a byte each is what they are.
    memory = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in (dense, padded)]
    fill = value if dense.dtype.is_floating_point else int(value)
    # A tensor without dimensions has one of a single element.
    inwards = tuple(reversed(dims)) or ((1, 1, 1),)
    with launching_on(padded.device):
        _kernels().pad_kernel[(-(-rows // block_rows) * -(-columns // block_columns),)](
            memory[0], dense if addresses is None else addresses, memory[1], inwards, rows, columns, batch_rows,
            tuple(isinstance(true, Tensor) for _, true, _ in inwards), batch is not None, addresses is not None, unpad,
            block_rows, block_columns, span, fill,
        )  # fmt: skip
