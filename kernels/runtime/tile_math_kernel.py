"""Triton functions that generated kernels call: formulas that take more than an expression."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import libdevice, tl, triton


@triton.jit
def _wraps(first, lane, period, BLOCK: tl.constexpr):
    """Return the number of whole periods before each lane, counted from the period of `first`; `first` < `period`."""
    if period >= BLOCK:
        wraps = (first + lane >= period).to(tl.int32)
    else:
        wraps = (first.to(tl.int32) + lane) // period.to(tl.int32)
    return wraps


@triton.jit
def row_of(lane, start, columns, matrix, BLOCK: tl.constexpr):
    """Return the row of each lane of the tile that starts at `start`, numbered across all matrices of the tensor."""
    return start // columns + _wraps(start % columns, lane, columns, BLOCK)


@triton.jit
def column_of(lane, start, columns, matrix, BLOCK: tl.constexpr):
    """Return the column of each lane, numbered across all matrices of the tensor."""
    first = start % columns
    column = first + lane - _wraps(first, lane, columns, BLOCK) * columns
    return (start // matrix + _wraps(start % matrix, lane, matrix, BLOCK)) * columns + column


@triton.jit
def div(a, b):
    """Return a / b rounded to nearest, as torch divides; Triton's own `/` on float32 is off by up to two units."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def sqrt(x):
    """Return the square root rounded to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def power(a, b):
    """Return a ** b, computed in float64: libdevice's float32 power is off by up to four units, torch's by one."""
    return libdevice.pow(a.to(tl.float64), b.to(tl.float64)).to(a.dtype)


@triton.jit
def remainder(a, b):
    """Return Python's a % b: the result has the sign of b."""
    if b.dtype.is_floating():
        rest = libdevice.fmod(a, b)
    else:
        rest = a % b
    return tl.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


@triton.jit
def trunc_divide(a, b):
    """Return a / b rounded towards zero."""
    if b.dtype.is_floating():
        return libdevice.trunc(div(a, b))
    else:
        return a // b


@triton.jit
def floor_divide(a, b):
    """Return Python's a // b, computed from the exact remainder so that 1 // 0.1 is 9."""
    if b.dtype.is_floating():
        rest = libdevice.fmod(a, b)
        quotient = div(a - rest, b)
        quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
        floored = libdevice.floor(quotient)
        floored = tl.where(quotient - floored > 0.5, floored + 1, floored)
        floored = tl.where(quotient == 0, libdevice.copysign(quotient * 0, div(a, b)), floored)
        return tl.where(b == 0, div(a, b), floored)
    else:
        quotient = a // b
        return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def _noise(seed, tile, tensor, SALT: tl.constexpr, BLOCK: tl.constexpr):
    """Return 16 random bits a lane: of Philox at the counter (lane // 4, tile, tensor, salt // 2).

    The four words of a counter serve four neighbours, and the two halves of a word serve two roundings, for which the
    compiler computes it once.
    """
    a, b, c, d = tl.philox(seed, tl.arange(0, BLOCK // 4), tile, tensor, SALT // 2)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    return ((words >> (16 * (SALT % 2))) & 0xFFFF).to(tl.int32)


@triton.jit
def stochastic_round(x, seed, tile, tensor, SALT: tl.constexpr, BLOCK: tl.constexpr):
    """Round float32 to one of its two bfloat16 neighbours, up with the probability of the part cut off.

    Adding 16 random bits below the bfloat16 mantissa carries into it with just that probability. A number
    per tensor comes as float64. The result is still float32, and exact in bfloat16. Non-finite values pass through.
    """
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) + _noise(seed, tile, tensor, SALT, BLOCK)
    rounded = (bits & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def multiply(a, b):
    """Return the product, for `tl.reduce`."""
    return a * b


@triton.jit
def larger(a, b):
    """Return the larger number, for `tl.reduce`; NaN if one is, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_sum(x):
    """Return the sum of a tile."""
    return tl.sum(x, 0)


@triton.jit
def tile_prod(x):
    """Return the product of a tile."""
    return tl.reduce(x, 0, multiply)


@triton.jit
def tile_amax(x):
    """Return the largest number of a tile; NaN if it has one, as in torch."""
    largest = tl.max(tl.where(x == x, x, float("-inf")) if x.dtype.is_floating() else x, 0)
    if x.dtype.is_floating():
        largest = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), largest)
    return largest


@triton.jit
def tile_amin(x):
    """Return the smallest number of a tile; NaN if it has one, as in torch."""
    smallest = tl.min(tl.where(x == x, x, float("inf")) if x.dtype.is_floating() else x, 0)
    if x.dtype.is_floating():
        smallest = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), smallest)
    return smallest


@triton.jit
def load_tile(pointer, lane, inside, WHOLE: tl.constexpr):
    """Load a tile of a tensor; `WHOLE` if every lane is inside."""
    if WHOLE:
        return tl.load(pointer + lane)
    else:
        return tl.load(pointer + lane, mask=inside, other=0)


@triton.jit
def store_tile(pointer, lane, inside, value, WHOLE: tl.constexpr):
    """Store a tile of a tensor; arguments as of `load_tile`."""
    if WHOLE:
        tl.store(pointer + lane, value)
    else:
        tl.store(pointer + lane, value, mask=inside)


@triton.jit
def to_bits(x):
    """Return a number as the int64 in the workspace: the float64 bits of a float, an integer unchanged."""
    if x.dtype.is_floating():
        return x.to(tl.float64).to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int64)


@triton.jit
def fold(a, b, KIND: tl.constexpr):
    """Combine the partial results of two lanes; amax and amin propagate NaN, as in torch."""
    if KIND == "sum":
        return a + b
    elif KIND == "prod":
        return a * b
    elif KIND == "amax":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_last_arrival(counters, tensor, chunks):
    """Count a chunk of this tensor as done; return whether it is the last, and reset the counter then.

    Release and acquire: what the other programs stored before they counted is visible to the last one.
    """
    done = tl.atomic_add(counters + tensor, 1, sem="acq_rel")
    if done == chunks - 1:
        tl.store(counters + tensor, 0)
    return done == chunks - 1


@triton.jit
def combine(
    partials, chunks, slots, IDENTITY: tl.constexpr, KIND: tl.constexpr, FLOAT: tl.constexpr, BLOCK: tl.constexpr
):
    """Combine the partial results of a tensor's chunks, always in the same order, into one slot."""
    lane = tl.arange(0, BLOCK)
    kind: tl.constexpr = tl.float64 if FLOAT else tl.int64
    total = tl.full([BLOCK], IDENTITY, kind)
    for first in range(0, chunks, BLOCK):
        inside = first + lane < chunks
        # .cg: the partials were written by other multiprocessors, so the L1 cache must not answer.
        bits = tl.load(partials + first + lane, mask=inside, other=0, cache_modifier=".cg")
        part = tl.where(inside, bits.to(kind, bitcast=True) if FLOAT else bits, IDENTITY)
        total = fold(total, part, KIND)
    if KIND == "sum":
        result = tile_sum(total)
    elif KIND == "prod":
        result = tile_prod(total)
    elif KIND == "amax":
        result = tile_amax(total)
    else:
        result = tile_amin(total)
    tl.store(slots, to_bits(result))
