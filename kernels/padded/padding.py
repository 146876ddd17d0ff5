"""Padding: from a tensor, or from the rows of a ragged batch, to the padded storage, with one kernel for both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import TILE_ELEMENTS
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.launcher import launching_on
from subtensors.kernels.runtime.valid_lengths import ValidLength, normalize_dims, valid_mask

DimTriple = tuple[int, "int | Tensor", int]
"""A dimension as the kernel takes it: padded size, true size, stride in the dense tensor."""


def pad_reference(dense: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """Compute `pad_dense` in torch ops."""
    padded = dense.new_full(shape, value)
    start_of(padded, dense.shape).copy_(dense)
    return padded


def pad_rows_reference(
    rows: Sequence[Tensor], shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0
) -> Tensor:
    """Compute `pad_rows` in torch ops."""
    valid = valid_mask(shape, lengths, rows[0].device).expand(tuple(shape))
    return rows[0].new_full(shape, value).masked_scatter(valid, torch.cat([row.reshape(-1) for row in rows]))


def start_of(padded: Tensor, size: Sequence[int]) -> Tensor:
    """Return the view of a tensor's first elements along each dimension, of this size."""
    return padded[tuple(map(slice, size))]


def pad_dense(dense: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """Compute `padding_ops.pad_to` with the kernel."""
    padded = dense.new_empty(shape)
    dims = _merged_dims([*zip(shape, dense.shape, dense.stride(), strict=True)])
    _launch(dense, None, padded, dims, value)
    return padded


def pad_rows(
    rows: Sequence[Tensor], shape: Sequence[int], lengths: Sequence[ValidLength], value: float = 0.0
) -> Tensor:
    """Compute `padding_ops.pad_list` with the kernel.

    It reads rows through a table of their addresses. In a captured CUDA graph that table is a constant: a
    replay reads the same memory.
    """
    contiguous = [row.contiguous() for row in rows]
    padded = rows[0].new_empty(shape)
    addresses = to_device(np.asarray([row.data_ptr() for row in contiguous], dtype=np.int64), padded.device)
    _launch(contiguous[0], addresses, padded, _ragged_dims(shape, lengths), value)
    return padded


def _ragged_dims(shape: Sequence[int], lengths: Sequence[ValidLength]) -> list[DimTriple]:
    ragged = {length.dim: length.sizes for length in normalize_dims(lengths, len(shape))}
    return _merged_dims([(shape[d], ragged.get(d, shape[d]), 0) for d in range(1, len(shape))])


def _merged_dims(dims: Sequence[DimTriple]) -> list[DimTriple]:
    """Merge each dimension without padding into the one before it, where memory allows."""
    merged: list[DimTriple] = []
    for bucket, true, stride in dims:
        if merged and isinstance(true, int) and true == bucket:
            outer, size, step = merged[-1]
            # In a ragged batch both strides are 0: its rows are contiguous.
            if isinstance(size, int) and (step == stride * bucket):
                merged[-1] = (outer * bucket, size * bucket, stride)
                continue
        merged.append((bucket, true, stride))
    return merged


def _launch(dense: Tensor, addresses: Tensor | None, padded: Tensor, dims: list[DimTriple], value: float) -> None:
    """Run the kernel over every element of `padded`; of a ragged batch `dense` is one of the rows at `addresses`."""
    if not padded.numel():
        return
    columns = dims[-1][0] if dims else 1
    rows = padded.numel() // columns
    block_columns = min(1 << (columns - 1).bit_length(), TILE_ELEMENTS)
    block_rows = min(max(TILE_ELEMENTS // block_columns, 1), 1 << (rows - 1).bit_length())
    batch_rows = rows if addresses is None else rows // padded.shape[0]
    # Triton cannot load or store bools, which are a byte each.
    memory = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in (dense, padded)]
    fill = value if dense.dtype.is_floating_point else int(value)
    # A tensor without dimensions gets one of a single element.
    inner_first = tuple(reversed(dims)) or ((1, 1, 1),)
    from subtensors.kernels.padded.padding_kernel import pad_kernel

    with launching_on(padded.device):
        pad_kernel[(-(-rows // block_rows) * -(-columns // block_columns),)](
            memory[0], dense if addresses is None else addresses, memory[1], inner_first, rows, columns, batch_rows,
            tuple(isinstance(true, Tensor) for _, true, _ in inner_first), addresses is not None, block_rows,
            block_columns, fill,
        )  # fmt: skip
