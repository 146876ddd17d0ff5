"""The masked softmax in Triton: a program handles a few rows, held whole or read twice.

It writes every element of those rows, padding included. `x` and `y` are floating point; the arithmetic is float32, or
float64 for float64.
"""

from __future__ import annotations

from subtensors.kernels.padded.masked_kernel import elements_inside, exp, rows_inside, rows_of
from subtensors.kernels.runtime.tile_math_kernel import div
from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def _safe(m):
    """Return the maximum to subtract; zero for rows without valid elements, whose maximum is -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _quotient(e, total, FAST: tl.constexpr):
    """Return e / total; through the reciprocal where half precision rounds the difference away."""
    if FAST:
        return e * (1.0 / total)
    else:
        return div(e, total)


@triton.jit
def softmax_kernel(
    x, y, slots, R1, R0, C1, C0, sr1, sr0, sc1, sc0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, LOG: tl.constexpr, ONE_PASS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Write y[row, :], the softmax of x[row, :] over its valid elements, `fill` elsewhere."""
    dtype: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    fast: tl.constexpr = x.dtype.element_ty == tl.float16 or x.dtype.element_ty == tl.bfloat16
    r1, r0 = rows_of(tl.program_id(0), R0, BM)
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    base = r1.to(tl.int64) * sr1 + r0.to(tl.int64) * sr0
    lane = tl.arange(0, BN)[None, :]
    if ONE_PASS:
        loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, 0, lane, R0, C0, in_rows)
        at = base + lane.to(tl.int64) * sc0
        value = tl.where(valid, tl.load(x + at, mask=loaded, other=0).to(dtype), float("-inf"))
        m = tl.max(value, 1, keep_dims=True)
        shifted = value - m
        e = tl.where(valid, exp(shifted, fast), 0.0)
        total = tl.sum(e, 1, keep_dims=True)
        if LOG:
            result = shifted - tl.log(total)
        else:
            result = _quotient(e, total, fast)
        tl.store(y + at, tl.where(valid, result, FILL).to(y.dtype.element_ty), mask=(r0 < R0) & (lane < C0))
    else:
        column_tiles = tl.cdiv(C0, BN)
        maxima = tl.full([BM, BN], float("-inf"), dtype)
        totals = tl.zeros([BM, BN], dtype)
        for tile in range(C1 * column_tiles):
            c1, c0 = tile // column_tiles, tile % column_tiles * BN + lane
            loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
            at = base + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
            value = tl.where(valid, tl.load(x + at, mask=loaded, other=0).to(dtype), float("-inf"))
            higher = tl.maximum(maxima, value)
            # inf - inf is NaN, as in torch; -inf is the maximum of a lane without elements.
            totals = totals * exp(maxima - _safe(higher), fast) + tl.where(valid, exp(value - _safe(higher), fast), 0.0)
            maxima = higher
        m = tl.max(maxima, 1, keep_dims=True)
        total = tl.sum(totals * exp(maxima - _safe(m), fast), 1, keep_dims=True)
        for tile in range(C1 * column_tiles):
            c1, c0 = tile // column_tiles, tile % column_tiles * BN + lane
            loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
            at = base + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
            shifted = tl.load(x + at, mask=loaded, other=0).to(dtype) - m
            if LOG:
                result = shifted - tl.log(total)
            else:
                result = _quotient(exp(shifted, fast), total, fast)
            tl.store(y + at, tl.where(valid, result, FILL).to(y.dtype.element_ty), mask=(r0 < R0) & (c0 < C0))


@triton.jit
def _products(g, y, at, loaded, valid, dtype: tl.constexpr, fast: tl.constexpr, LOG: tl.constexpr):
    """Return the gradient and the result of a tile, and the term of the row's sum."""
    upstream = tl.where(valid, tl.load(g + at, mask=loaded, other=0).to(dtype), 0.0)
    result = tl.where(valid, tl.load(y + at, mask=loaded, other=0).to(dtype), 0.0)
    if LOG:
        return upstream, exp(result, fast), upstream
    else:
        return upstream, result, upstream * result


@triton.jit
def _gradient(upstream, probability, total, LOG: tl.constexpr):
    if LOG:
        return upstream - probability * total
    else:
        return probability * (upstream - total)


@triton.jit
def softmax_backward_kernel(
    g, y, gx, slots, R1, R0, C1, C0, sr1, sr0, sc1, sc0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, LOG: tl.constexpr, ONE_PASS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write gx[row, :], the input gradient of the softmax with result y[row, :], zero in padding."""
    dtype: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    fast: tl.constexpr = y.dtype.element_ty == tl.float16 or y.dtype.element_ty == tl.bfloat16
    r1, r0 = rows_of(tl.program_id(0), R0, BM)
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    base = r1.to(tl.int64) * sr1 + r0.to(tl.int64) * sr0
    lane = tl.arange(0, BN)[None, :]
    if ONE_PASS:
        loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, 0, lane, R0, C0, in_rows)
        at = base + lane.to(tl.int64) * sc0
        upstream, probability, part = _products(g, y, at, loaded, valid, dtype, fast, LOG)
        result = _gradient(upstream, probability, tl.sum(part, 1, keep_dims=True), LOG)
        tl.store(gx + at, tl.where(valid, result, 0.0).to(gx.dtype.element_ty), mask=(r0 < R0) & (lane < C0))
    else:
        column_tiles = tl.cdiv(C0, BN)
        parts = tl.zeros([BM, BN], dtype)
        for tile in range(C1 * column_tiles):
            c1, c0 = tile // column_tiles, tile % column_tiles * BN + lane
            loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
            at = base + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
            _, _, part = _products(g, y, at, loaded, valid, dtype, fast, LOG)
            parts += part
        total = tl.sum(parts, 1, keep_dims=True)
        for tile in range(C1 * column_tiles):
            c1, c0 = tile // column_tiles, tile % column_tiles * BN + lane
            loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, c1, c0, R0, C0, in_rows)
            at = base + c1.to(tl.int64) * sc1 + c0.to(tl.int64) * sc0
            upstream, probability, _ = _products(g, y, at, loaded, valid, dtype, fast, LOG)
            result = _gradient(upstream, probability, total, LOG)
            tl.store(gx + at, tl.where(valid, result, 0.0).to(gx.dtype.element_ty), mask=(r0 < R0) & (c0 < C0))
