"""Sums of squares over many tensors, as Triton kernels: of all elements (`grad_norm`), and of the rows and columns of
matrices (`row_column_means`).
"""

from __future__ import annotations

from subtensors.kernels.runtime.tile_math_kernel import combine, is_last_arrival, to_bits
from subtensors.kernels.runtime.triton_compat import tl, triton

# Rows of the table of matrices, a column a matrix: its address and shape, the addresses of its results, and the offset
# of its partial sums.
ADDRESS, HEIGHT, WIDTH, ROW_OUT, COLUMN_OUT, PARTIAL = (tl.constexpr(i) for i in range(6))


@triton.jit
def _square(x):
    if x.dtype != tl.float64:
        x = x.to(tl.float32).to(tl.float64)
    return x * x


@triton.jit
def _squares(address, first, left, KIND: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return each lane's sum of squares over the chunk at `first`; `left` elements remain from there on."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    pointer = address.to(tl.pointer_type(KIND)) + first
    if (left >= ROUNDS * BLOCK) & (address % 16 == 0):
        # Triton keeps an alignment hint only where the address is computed.
        aligned = tl.multiple_of(address.to(tl.pointer_type(KIND)) + first, 16)
        for number in tl.static_range(ROUNDS):
            total += _square(tl.load(aligned + number * BLOCK + lane))
    else:
        for number in range(ROUNDS):
            at = number * BLOCK + lane
            total += _square(tl.load(pointer + at, mask=at < left, other=0))
    return total


@triton.jit(
    do_not_specialize=[
        *["table", "chunks", "partials", "counter", "total", "N", "COUNT"],
        *["next_table", "next_scalars", "next_slots", "next_seed", "next_N"],
    ]
)
def grad_norm(
    table,
    chunks,
    partials,
    counter,
    total,
    N,
    COUNT,
    next_table,
    next_scalars,
    next_slots,
    next_seed,
    next_N,
    NEXT: tl.constexpr,
    LANES: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_BRAIN: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the squares of all elements, and the program NEXT after it, unless that is None.

    Each program takes every `num_programs`-th chunk; the last to finish adds up the partial sums, always in the same
    order. NEXT computes numbers per tensor that depend on the sum: `codegen` wrote it for `LANES` tensors, and the
    arguments `next_...`, None without it, are its own.
    """
    table = table.to(tl.pointer_type(tl.int64))
    chunks = chunks.to(tl.pointer_type(tl.int64))
    partials = partials.to(tl.pointer_type(tl.int64))
    counter = counter.to(tl.pointer_type(tl.int32))
    total = total.to(tl.pointer_type(tl.int64))
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = tl.zeros([BLOCK], tl.float64)
    for number in range(program, COUNT, programs):
        entry = tl.load(chunks + number)
        tensor = (entry >> 32).to(tl.int32)
        first = (entry & 0xFFFFFFFF) * (ROUNDS * BLOCK)
        left = tl.load(table + tensor) - first
        itemsize = tl.load(table + N + tensor)
        address = tl.load(table + 2 * N + tensor)
        if IS_SINGLE and itemsize == 4:
            own += _squares(address, first, left, tl.float32, ROUNDS, BLOCK)
        if IS_DOUBLE and itemsize == 8:
            own += _squares(address, first, left, tl.float64, ROUNDS, BLOCK)
        if IS_HALF and itemsize == 2:
            own += _squares(address, first, left, tl.float16, ROUNDS, BLOCK)
        if IS_BRAIN and itemsize == -2:
            own += _squares(address, first, left, tl.bfloat16, ROUNDS, BLOCK)
    tl.store(partials + program, to_bits(tl.sum(own, 0)))
    if is_last_arrival(counter, 0, programs):
        combine(partials, programs, total, 0, "sum", True, BLOCK)
        if NEXT is not None:
            # The sum was stored by one thread, and all threads read it.
            tl.debug_barrier()
            own_table = next_table.to(tl.pointer_type(tl.int64))
            own_scalars = next_scalars.to(tl.pointer_type(tl.int64))
            own_slots = next_slots.to(tl.pointer_type(tl.int64))
            own_seed = next_seed.to(tl.pointer_type(tl.int64))
            for tile in range(tl.cdiv(next_N, LANES)):
                NEXT(own_table, own_scalars, own_slots, own_seed, next_N, tile, LANES)


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
