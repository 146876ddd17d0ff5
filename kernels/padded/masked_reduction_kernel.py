"""The masked reductions in Triton: lanes absorb elements, merge into one state for each row, and finish it.

The state of a lane is three numbers (a, b, n); n counts the elements.

| kind | a | b | finished |
|---|---|---|---|
| sum, mean | sum x | - | a, a / n |
| prod | product of the x that are not 0 | how many are | a or 0 |
| amax, amin | extreme | how many x equal it | a |
| logsumexp | max x | sum exp(x - a) | a + log b |
| var | mean | sum (x - a)^2 | b / (n - correction) |
| norm | sum abs(x)^p, or max abs(x) | of a maximum, how many equal it | a^(1/p) |

A lane absorbs a few elements of a tile at once, those that lie in the registers of one thread. A row that is long while
rows are few is cut into parts, one program each, whose states a second kernel merges.
"""

from __future__ import annotations

from subtensors.kernels.padded.masked_kernel import column_bounds, elements_inside, exp, rows_inside, rows_of
from subtensors.kernels.runtime.tile_math_kernel import div, larger, multiply, sqrt
from subtensors.kernels.runtime.triton_compat import libdevice, tl, triton

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _lowest(dtype: tl.constexpr):
    """The identity of a maximum."""
    if dtype == tl.int64:
        return -9223372036854775808
    else:
        return float("-inf")


@triton.jit
def _identity(KIND: tl.constexpr, P: tl.constexpr, dtype: tl.constexpr):
    if KIND == "prod":
        return 1
    elif KIND == "amax" or KIND == "logsumexp" or (KIND == "norm" and P == INFINITY):
        return _lowest(dtype)
    else:
        return 0


@triton.jit
def _power(x, P: tl.constexpr):
    """x ** P for x that are not negative, by way of float64."""
    return libdevice.pow(x.to(tl.float64), tl.full(x.shape, P, tl.float64)).to(x.dtype)


@triton.jit
def _magnitude(x, P: tl.constexpr):
    """Return the terms that a p-norm sums."""
    if P == 0:
        return (x != 0).to(x.dtype)
    elif P == 1:
        return tl.abs(x)
    elif P == 2:
        return x * x
    else:
        return _power(tl.abs(x), P)


@triton.jit
def _where_valid(x, valid, other, FULL: tl.constexpr):
    """Return x at valid elements, another value elsewhere; x itself in a full tile."""
    if FULL:
        return x
    else:
        return tl.where(valid, x, other)


@triton.jit
def _by_lane(x, LANES: tl.constexpr):
    """Reshape a tile to (BM, elements a lane, LANES)."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES])


@triton.jit
def _absorb(
    KIND: tl.constexpr, P: tl.constexpr, a, b, n, x, valid, FULL: tl.constexpr, TIES: tl.constexpr, FAST: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Return the state after each lane absorbs its valid elements of a tile; in a `FULL` tile all are valid."""
    if KIND != "var" and not FULL:
        n += tl.sum(_by_lane(valid.to(tl.int32), LANES), 1)
    if KIND == "sum" or KIND == "mean":
        a += tl.sum(_by_lane(_where_valid(x, valid, 0, FULL), LANES), 1)
    elif KIND == "prod":
        b += tl.sum(_by_lane((valid & (x == 0)).to(b.dtype), LANES), 1)
        a *= tl.reduce(_by_lane(tl.where(valid & (x != 0), x, 1), LANES), 1, multiply)
    elif KIND == "amax" or (KIND == "norm" and P == INFINITY):
        x = tl.abs(x) if KIND == "norm" else x
        tile = _by_lane(_where_valid(x, valid, _lowest(a.dtype), FULL), LANES)
        higher = larger(a, tl.reduce(tile, 1, larger))
        if TIES:
            ties = tile == tl.expand_dims(higher, 1)
            if not FULL:
                ties &= _by_lane(valid, LANES)
            b = tl.where(higher == a, b, 0) + tl.sum(ties.to(b.dtype), 1)
        a = higher
    elif KIND == "logsumexp":
        # Padding adds exp(-inf - shift) = 0.
        tile = _by_lane(_where_valid(x, valid, float("-inf"), FULL), LANES)
        higher = larger(a, tl.reduce(tile, 1, larger))
        shift = tl.where(tl.abs(higher) == INFINITY, 0.0, higher)
        b = b * exp(a - shift, FAST) + tl.sum(exp(tile - tl.expand_dims(shift, 1), FAST), 1)
        a = higher
    elif KIND == "var":
        # Chan, Golub and LeVeque: mean and squares of a lane's new elements, then combined with its state.
        tile = _by_lane(_where_valid(x, valid, 0.0, FULL), LANES)
        inside = _by_lane(valid, LANES)
        if FULL:
            new = tl.full(n.shape, x.shape[1] // LANES, tl.int32)
        else:
            new = tl.sum(inside.to(tl.int32), 1)
        count = new.to(a.dtype)
        mean = div(tl.sum(tile, 1), tl.maximum(count, 1.0))
        centered = _where_valid(tile - tl.expand_dims(mean, 1), inside, 0.0, FULL)
        delta = _where_valid(mean - a, new > 0, 0.0, FULL)
        share = div(count, tl.maximum(n + new, 1).to(a.dtype))
        b += tl.sum(centered * centered, 1) + delta * delta * share * n.to(a.dtype)
        a += delta * share
        n += new
    else:
        a += tl.sum(_by_lane(_where_valid(_magnitude(x, P), valid, 0.0, FULL), LANES), 1)
    return a, b, n


@triton.jit
def _total(n):
    """Return the sum of each row, (BM, 1); for a single row a scalar, whose layout cannot spread to the lanes."""
    if n.shape[0] == 1:
        return tl.sum(n)
    else:
        return tl.sum(n, 1, keep_dims=True)


@triton.jit
def _merge(KIND: tl.constexpr, P: tl.constexpr, a, b, n, FAST: tl.constexpr):
    """Merge the states of all lanes of a row, (BM, 1)."""
    count = _total(n.to(tl.int64))
    if KIND == "prod":
        return tl.reduce(a, 1, multiply, keep_dims=True), tl.sum(b, 1, keep_dims=True), count
    elif KIND == "amax" or (KIND == "norm" and P == INFINITY):
        highest = tl.reduce(a, 1, larger, keep_dims=True)
        return highest, tl.sum(tl.where(a == highest, b, 0), 1, keep_dims=True), count
    elif KIND == "logsumexp":
        highest = tl.reduce(a, 1, larger, keep_dims=True)
        shift = tl.where(tl.abs(highest) == INFINITY, 0.0, highest)
        lanes = tl.where(tl.abs(a) == INFINITY, 0.0, a)
        return highest, tl.sum(b * exp(lanes - shift, FAST), 1, keep_dims=True), count
    elif KIND == "var":
        weight = n.to(a.dtype)
        mean = div(tl.sum(a * weight, 1, keep_dims=True), tl.maximum(count, 1).to(a.dtype))
        centered = a - mean
        return mean, tl.sum(b + weight * centered * centered, 1, keep_dims=True), count
    else:
        return tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True), count


@triton.jit
def _finish(KIND: tl.constexpr, P: tl.constexpr, a, b, n, CORRECTION: tl.constexpr):
    """Return the result of a row, and the value that its gradient needs."""
    if KIND == "mean":
        return div(a, n.to(a.dtype)), b
    elif KIND == "prod":
        # In a row with one zero, its gradient is the product of the others; with two zeros, every gradient is 0.
        return tl.where(b > 0, a * 0, a), tl.where(b > 1, a * 0, a)
    elif KIND == "logsumexp":
        shift = tl.where(tl.abs(a) == INFINITY, 0.0, a)
        return tl.log(b) + shift, tl.zeros_like(b)
    elif KIND == "var":
        free = tl.maximum(n.to(a.dtype) - CORRECTION, 0.0)
        return div(tl.where(n > 0, b, float("nan")), free), a
    elif KIND == "norm":
        if P == INFINITY:
            return tl.where(n > 0, a, 0.0), b
        elif P == 2:
            return sqrt(a), b
        elif P == 0 or P == 1:
            return a, b
        else:
            return _power(a, 1.0 / P), b
    else:
        return a, b


@triton.jit
def reduction_kernel(
    x, out, aux, counts, slots, parts, R1, R0, C1, C0, sr1, sr0, sc1, sc0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, KIND: tl.constexpr, P: tl.constexpr, NEGATE: tl.constexpr,
    CORRECTION: tl.constexpr, FILL: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, TIES: tl.constexpr, BOUNDS_VARY: tl.constexpr,
):  # fmt: skip
    """Reduce x over its columns; with `SPLIT`, write the state of one part of each row: (parts, rows) of a, b and n."""
    dtype: tl.constexpr = aux.dtype.element_ty
    r1, r0 = rows_of(tl.program_id(0), R0, BM)
    column_tiles = tl.cdiv(C0, BN)
    part = tl.program_id(1)
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    base = r1.to(tl.int64) * sr1 + r0.to(tl.int64) * sr0
    lane = tl.arange(0, BN)[None, :]
    fast: tl.constexpr = x.dtype.element_ty == tl.float16 or x.dtype.element_ty == tl.bfloat16
    a = tl.full([BM, LANES], _identity(KIND, P, dtype), dtype)
    b = tl.zeros([BM, LANES], dtype)
    n = tl.zeros([BM, LANES], tl.int32)
    # Only a running mean needs the count of each lane in full tiles. Other kinds need a scalar; as a tensor of one
    # element, its layout would spread to the counts, and one thread would hold all lanes of a row.
    in_full_tiles = part.to(tl.int64) * 0
    all_valid = tl.full([BM, BN], 1, tl.int1)
    tiles = C1 * column_tiles
    full_end, valid_end = column_bounds(slots, STATICS, ROW_SLOTS, r1, r0, 0, in_rows, R0, C0)
    for tile in range(part * tiles // parts, (part + 1) * tiles // parts):
        c1, first = tile // column_tiles, tile % column_tiles * BN
        c0 = first + lane
        if BOUNDS_VARY:
            full_end, valid_end = column_bounds(slots, STATICS, ROW_SLOTS, r1, r0, c1, in_rows, R0, C0)
        if first < valid_end:
            at = base + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
            if first + BN <= full_end:
                value = tl.load(x + at).to(dtype)
                value = -value if NEGATE else value
                a, b, n = _absorb(KIND, P, a, b, n, value, all_valid, True, TIES, fast, LANES)
                if KIND != "var":
                    in_full_tiles += BN
            else:
                loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
                value = tl.load(x + at, mask=loaded, other=0).to(dtype)
                value = -value if NEGATE else value
                a, b, n = _absorb(KIND, P, a, b, n, value, valid, False, TIES, fast, LANES)
    a, b, count = _merge(KIND, P, a, b, n, fast)
    count += in_full_tiles
    row = r1.to(tl.int64) * R0 + r0
    if SPLIT:
        row += part.to(tl.int64) * R1 * R0
        tl.store(out + row, a, mask=r0 < R0)
        tl.store(aux + row, b, mask=r0 < R0)
        tl.store(counts + row, count, mask=r0 < R0)
    else:
        _write(row, r0 < R0, in_rows, a, b, count, out, aux, counts, KIND, P, NEGATE, CORRECTION, FILL)


@triton.jit
def _write(
    row, inside, in_rows, a, b, count, out, aux, counts,
    KIND: tl.constexpr, P: tl.constexpr, NEGATE: tl.constexpr,
    CORRECTION: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    result, extra = _finish(KIND, P, a, b, count, CORRECTION)
    result = tl.where(in_rows, (-result if NEGATE else result), FILL)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)
    tl.store(aux + row, extra, mask=inside)
    tl.store(counts + row, count, mask=inside)


@triton.jit
def merge_kernel(
    states_a, states_b, states_n, out, aux, counts, slots, parts, R1, R0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, KIND: tl.constexpr, P: tl.constexpr, NEGATE: tl.constexpr,
    CORRECTION: tl.constexpr, FILL: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the states of the parts of some rows."""
    r1, r0 = rows_of(tl.program_id(0), R0, BM)
    part = tl.arange(0, PARTS)[None, :]
    row = r1.to(tl.int64) * R0 + r0
    at = row + part.to(tl.int64) * R1 * R0
    inside = (part < parts) & (r0 < R0)
    dtype: tl.constexpr = aux.dtype.element_ty
    a = tl.load(states_a + at, mask=inside, other=0)
    a = tl.where(inside, a, _identity(KIND, P, dtype))
    b = tl.load(states_b + at, mask=inside, other=0)
    n = tl.load(states_n + at, mask=inside, other=0)
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    a, b, count = _merge(KIND, P, a, b, n, False)
    _write(row, r0 < R0, in_rows, a, b, count, out, aux, counts, KIND, P, NEGATE, CORRECTION, FILL)


@triton.jit
def _row_gradient(KIND: tl.constexpr, P: tl.constexpr, x, out, aux, g, FAST: tl.constexpr):
    """Return the gradient of an element from its row's result, aux value and scaled gradient."""
    if KIND == "sum" or KIND == "mean":
        return g + x * 0
    elif KIND == "prod":
        return g * tl.where(x == 0, aux, div(out, tl.where(x == 0, 1.0, x)))
    elif KIND == "amax":
        # With a NaN no element equals the extreme, and g was divided by a count of 0: inf, then NaN, as in torch.
        return tl.where(x == out, g, g * 0)
    elif KIND == "logsumexp":
        return g * exp(x - out, FAST)
    elif KIND == "var":
        return g * (x - aux)
    else:
        sign = (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
        if P == INFINITY:
            return tl.where(tl.abs(x) == out, g * sign, g * 0)
        elif P == 1:
            return g * sign
        elif P == 2:
            return g * x
        else:
            return g * sign * tl.where(x == 0, 0.0, _power(tl.abs(x), P - 1.0))


@triton.jit
def reduction_backward_kernel(
    x, out, aux, g, gx, slots, R1, R0, C1, C0, sr1, sr0, sc1, sc0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, KIND: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write gx[row, column] from x there and from out, aux and g of the row; zero in padding. One tile a program."""
    dtype: tl.constexpr = g.dtype.element_ty
    column_tiles = tl.cdiv(C0, BN)
    tiles = C1 * column_tiles
    index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    r1, r0 = rows_of(index, R0, BM)
    c1, c0 = tile // column_tiles, tile % column_tiles * BN + tl.arange(0, BN)[None, :]
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
    at = r1.to(tl.int64) * sr1 + r0.to(tl.int64) * sr0 + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
    row = r1.to(tl.int64) * R0 + r0
    upstream = tl.load(g + row, mask=in_rows, other=0)
    if KIND == "sum" or KIND == "mean":
        # The gradient doesn't depend on x, so x is not read.
        result = upstream + tl.zeros([BM, BN], dtype)
    else:
        fast: tl.constexpr = x.dtype.element_ty == tl.float16 or x.dtype.element_ty == tl.bfloat16
        value = tl.load(x + at, mask=loaded, other=0).to(dtype)
        row_out = tl.load(out + row, mask=in_rows, other=0).to(dtype)
        extra = tl.load(aux + row, mask=in_rows, other=0).to(dtype)
        result = _row_gradient(KIND, P, value, row_out, extra, upstream, fast)
    tl.store(gx + at, tl.where(valid, result, 0.0).to(gx.dtype.element_ty), mask=(r0 < R0) & (c0 < C0))
