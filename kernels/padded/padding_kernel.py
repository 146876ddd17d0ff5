"""Padding and unpadding in Triton: the same walk over the padded tensor, in either direction.

The padded tensor is contiguous. Its last dimension goes along a tile's columns; each row of the tile is one index of
all the others, which is taken apart into `dims`, innermost first. A dimension is a triple: its size in the padded
tensor, its true size, and its stride in the dense one; in a ragged batch the true size is read from the device for each
row, and strides are those of contiguous rows.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton

AT_ONCE = tl.constexpr(256)
"""Rows of a ragged batch whose sizes are added up at a time."""


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
def _numels(dims, SIZES: tl.constexpr, batch, inside):
    """Return the number of elements of each row of a ragged batch, 0 outside."""
    numels = inside.to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        _, true, _ = dims[i]
        if SIZES[i]:
            true = tl.load(true + batch, mask=inside, other=0)
        numels *= true
    return numels


@triton.jit
def _starts(dims, SIZES: tl.constexpr, batch, first, batches, SPAN: tl.constexpr):
    """Return the number of elements before each row of a ragged batch; `first` is the tile's first row."""
    before = tl.zeros([1], tl.int64)
    for others in range(0, first, AT_ONCE):
        other = others + tl.arange(0, AT_ONCE)
        before += tl.sum(_numels(dims, SIZES, other, other < first), 0)
    other = first + tl.arange(0, SPAN)
    within = tl.where(other[None, :] < batch, _numels(dims, SIZES, other, other < batches)[None, :], 0)
    return before[:, None] + tl.sum(within, 1)[:, None]


@triton.jit
def pad_kernel(
    dense, addresses, padded, dims, rows, columns, batch_rows,
    SIZES: tl.constexpr, RAGGED: tl.constexpr, ADDRESSES: tl.constexpr, UNPAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Fill `padded` from `dense`, `VALUE` in the padding; with `UNPAD`, write `dense` from `padded`.

    `dense` is one tensor; of a ragged batch the rows lie in it one after the other, or row b at `addresses[b]`. A tile
    has rows of at most `SPAN` of its batch.
    """
    column_tiles = tl.cdiv(columns, BN)
    row = (tl.program_id(0) // column_tiles * BM + tl.arange(0, BM))[:, None].to(tl.int64)
    column = (tl.program_id(0) % column_tiles * BN + tl.arange(0, BN))[None, :]
    in_bucket = (row < rows) & (column < columns)
    batch = row // batch_rows
    at, inside = _dense_at(dims, SIZES, RAGGED, row % batch_rows, column, batch, in_bucket)
    if ADDRESSES:
        base = tl.load(addresses + batch, mask=row < rows, other=0).to(dense.dtype)
        pointer = base + at
    elif RAGGED:
        first = (tl.program_id(0) // column_tiles * BM // batch_rows).to(tl.int64)
        pointer = dense + (at + _starts(dims, SIZES, batch, first, rows // batch_rows, SPAN))
    else:
        pointer = dense + at
    target = padded + (row * columns + column)
    if UNPAD:
        tl.store(pointer, tl.load(target, mask=inside, other=0), mask=inside)
    else:
        tl.store(target, tl.where(inside, tl.load(pointer, mask=inside, other=0), VALUE), mask=in_bucket)
