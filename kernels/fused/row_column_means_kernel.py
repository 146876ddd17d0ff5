"""The means of squares of the rows and columns of matrices (`row_column_means`) in Triton."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton

# Rows of the table of matrices, a column a matrix: its address and shape, the addresses of its results, and the offset
# of its partial sums.
ADDRESS, HEIGHT, WIDTH, ROW_OUT, COLUMN_OUT, PARTIAL = (tl.constexpr(i) for i in range(6))


@triton.jit
def mean_rows(
    table, tiles, partials, N, KIND: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The means of some rows of a matrix, and the column sums of these rows."""
    entry = tl.load(tiles + tl.program_id(0))
    matrix, block = entry >> 32, entry & 0xFFFFFFFF
    x = tl.load(table + ADDRESS * N + matrix).to(tl.pointer_type(KIND))
    height, width = tl.load(table + HEIGHT * N + matrix), tl.load(table + WIDTH * N + matrix)
    out = tl.load(table + ROW_OUT * N + matrix).to(tl.pointer_type(SUM))
    partials += tl.load(table + PARTIAL * N + matrix) + block * width
    row = block * ROWS + tl.arange(0, ROWS)
    in_rows = row < height
    total = tl.zeros([ROWS], SUM)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0).to(SUM)
        squares = value * value
        total += tl.sum(squares, 1)
        tl.store(partials + column, tl.sum(squares, 0), mask=column < width)
    tl.store(out + row, total / width.to(SUM), mask=in_rows)


@triton.jit
def mean_columns(table, tiles, partials, N, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The means of some columns of a matrix, from the column sums of its parts."""
    entry = tl.load(tiles + tl.program_id(0))
    matrix, block = entry >> 32, entry & 0xFFFFFFFF
    height, width = tl.load(table + HEIGHT * N + matrix), tl.load(table + WIDTH * N + matrix)
    out = tl.load(table + COLUMN_OUT * N + matrix).to(tl.pointer_type(SUM))
    partials += tl.load(table + PARTIAL * N + matrix)
    count = tl.cdiv(height, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < width
    total = tl.zeros([COLUMNS], SUM)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)
        inside = (part < count)[:, None] & in_columns[None, :]
        total += tl.sum(tl.load(partials + part[:, None] * width + column[None, :], mask=inside, other=0), 0)
    tl.store(out + column, total / height.to(SUM), mask=in_columns)
