"""Padding in Triton: a walk over the padded tensor.

The padded tensor is contiguous. Its last dimension goes along a tile's columns; each row of the tile is one index of
all the others, which is taken apart into `dims`, innermost first. A dimension is a triple: its size in the padded
tensor, its true size, and its stride in the dense one; in a ragged batch the true size is read from the device for each
row, and strides are those of contiguous rows.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def _dense_at(dims, SIZES: tl.constexpr, RAGGED: tl.constexpr, row, column, batch, inside):
    """Return the offset of an element in its dense tensor, and whether it lies in that tensor."""
    at = tl.zeros_like(row + column).to(tl.int64)
    step = tl.full([1, 1], 1, tl.int64)
    index = row
    for i in tl.static_range(len(SIZES)):
        bucket, true, stride = dims[i]
        if SIZES[i]:
            true = tl.load(true + batch, mask=inside, other=0)
        if i == 0:
            coordinate = column
        else:
            coordinate = index % bucket
            index = index // bucket
        inside = inside & (coordinate < true)
        if RAGGED:
            at += coordinate * step
            step = step * true
        else:
            at += coordinate.to(tl.int64) * stride
    return at, inside


@triton.jit
def pad_kernel(
    dense, addresses, padded, dims, rows, columns, batch_rows,
    SIZES: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Fill `padded` from `dense`, or of a ragged batch from row b at `addresses[b]`, with `VALUE` in the padding."""
    column_tiles = tl.cdiv(columns, BN)
    row = (tl.program_id(0) // column_tiles * BM + tl.arange(0, BM))[:, None].to(tl.int64)
    column = (tl.program_id(0) % column_tiles * BN + tl.arange(0, BN))[None, :]
    in_bucket = (row < rows) & (column < columns)
    batch = row // batch_rows
    at, inside = _dense_at(dims, SIZES, RAGGED, row % batch_rows, column, batch, in_bucket)
    base = tl.load(addresses + batch, mask=row < rows, other=0).to(dense.dtype) if RAGGED else dense
    values = tl.load(base + at, mask=inside, other=0)
    tl.store(padded + (row * columns + column), tl.where(inside, values, VALUE), mask=in_bucket)
