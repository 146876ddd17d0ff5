"""The sum of squares over chunks of many tensors, as a Triton kernel: see `square_sum`."""

from __future__ import annotations

from subtensors.kernels.runtime.tile_math_kernel import atomic_ticket, combine, to_bits
from subtensors.kernels.runtime.triton_compat import tl, triton


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
        # The promise holds for a sum of pointers alone, and where it is made.
        whole = tl.multiple_of(address.to(tl.pointer_type(KIND)) + first, 16)
        for number in tl.static_range(ROUNDS):
            total += _square(tl.load(whole + number * BLOCK + lane))
    else:
        for number in range(ROUNDS):
            at = number * BLOCK + lane
            total += _square(tl.load(pointer + at, mask=at < left, other=0))
    return total


@triton.jit
def add_up_squares(
    table,
    chunks,
    partials,
    counter,
    total,
    N,
    COUNT,
    IS_SINGLE: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_BRAIN: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes every so-manieth chunk; the last to finish adds up what all have, always in the same order.

    Returns whether this is that one.
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
    is_last = atomic_ticket(counter, 0, programs)
    if is_last:
        combine(partials, programs, total, 0, "sum", True, BLOCK)
    return is_last


@triton.jit(do_not_specialize=["table", "chunks", "partials", "counter", "total", "N", "COUNT"])
def square_sum(
    table,
    chunks,
    partials,
    counter,
    total,
    N,
    COUNT,
    IS_SINGLE: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_BRAIN: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum alone."""
    add_up_squares(
        table, chunks, partials, counter, total, N, COUNT, IS_SINGLE, IS_DOUBLE, IS_HALF, IS_BRAIN, ROUNDS, BLOCK
    )


@triton.jit(
    do_not_specialize=[
        *["table", "chunks", "partials", "counter", "total", "N", "COUNT"],
        *["next_table", "next_scalars", "next_slots", "next_seed", "next_N"],
    ]
)
def square_sum_then(
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
    """The sum, and then, by the last program to finish, the numbers per tensor that depend on it.

    NEXT is what `codegen` wrote for `LANES` tensors; `next_...` are what it is given.
    """
    is_last = add_up_squares(
        table, chunks, partials, counter, total, N, COUNT, IS_SINGLE, IS_DOUBLE, IS_HALF, IS_BRAIN, ROUNDS, BLOCK
    )
    if is_last:
        # The sum was stored by one thread, and all are to read it.
        tl.debug_barrier()
        own_table = next_table.to(tl.pointer_type(tl.int64))
        own_scalars = next_scalars.to(tl.pointer_type(tl.int64))
        own_slots = next_slots.to(tl.pointer_type(tl.int64))
        own_seed = next_seed.to(tl.pointer_type(tl.int64))
        for tile in range(tl.cdiv(next_N, LANES)):
            NEXT(own_table, own_scalars, own_slots, own_seed, next_N, tile, LANES)
