"""Masked layer and rms norm in Triton: a program holds a few whole rows.

`x` is contiguous and its rows are the last dimensions together, so that an element's weight is that of its column.
"""

from __future__ import annotations

from subtensors.kernels.padded.masked_kernel import elements_inside, rows_inside, rows_of
from subtensors.kernels.runtime.tile_math_kernel import div, sqrt
from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def _count(STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, valid, C0, dtype: tl.constexpr):
    """Return the number of valid elements in each row, at least 1."""
    if len(STATICS) == ROW_SLOTS:
        return tl.zeros([1, 1], dtype) + C0
    else:
        return tl.maximum(tl.sum(valid.to(tl.int32), 1, keep_dims=True), 1).to(dtype)


@triton.jit
def norm_kernel(
    x, weight, bias, y, means, scales, slots, R0, C0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, EPS: tl.constexpr, FILL: tl.constexpr, RMS: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write y[row, :], and each row's mean and reciprocal standard deviation (for rms norm, root mean square)."""
    dtype: tl.constexpr = means.dtype.element_ty
    r1, r0 = rows_of(tl.program_id(0), R0, BM)
    c0 = tl.arange(0, BN)[None, :]
    in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
    loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, 0, c0, R0, C0, in_rows)
    row = r1.to(tl.int64) * R0 + r0
    at = row * C0 + c0
    value = tl.where(valid, tl.load(x + at, mask=loaded, other=0).to(dtype), 0.0)
    count = _count(STATICS, ROW_SLOTS, valid, C0, dtype)
    if RMS:
        mean = tl.zeros([BM, 1], dtype)
        centered = value
    else:
        mean = div(tl.sum(value, 1, keep_dims=True), count)
        centered = tl.where(valid, value - mean, 0.0)
    tl.store(means + row, tl.where(in_rows, mean, 0.0), mask=r0 < R0)
    variance = div(tl.sum(centered * centered, 1, keep_dims=True), count)
    scale = div(1.0, sqrt(variance + EPS))
    tl.store(scales + row, tl.where(in_rows, scale, 0.0), mask=r0 < R0)
    result = centered * scale
    if WEIGHTED:
        result *= tl.load(weight + c0, mask=c0 < C0, other=0).to(dtype)
    if BIASED:
        result += tl.load(bias + c0, mask=c0 < C0, other=0).to(dtype)
    tl.store(y + at, tl.where(valid, result, FILL).to(y.dtype.element_ty), mask=(r0 < R0) & (c0 < C0))


@triton.jit
def norm_backward_kernel(
    g, x, weight, means, scales, gx, weight_parts, bias_parts, slots, tiles, R0, C0,
    STATICS: tl.constexpr, ROW_SLOTS: tl.constexpr, RMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write gx, and in each program's row of the parts its rows' sums for the gradients of weight and bias.

    With h = (x - mean) * scale and u = g * weight, gx = scale * (u - h * mean(u * h) - mean(u)), the last term for
    layer norm only; weight gets the sum over rows of g * h, bias that of g.
    """
    dtype: tl.constexpr = scales.dtype.element_ty
    c0 = tl.arange(0, BN)[None, :]
    weight_part = tl.zeros([BM, BN], dtype)
    bias_part = tl.zeros([BM, BN], dtype)
    w = tl.load(weight + c0, mask=c0 < C0, other=0).to(dtype)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r1, r0 = rows_of(tile, R0, BM)
        in_rows = rows_inside(slots, STATICS, ROW_SLOTS, r1, r0, R0)
        loaded, valid = elements_inside(slots, STATICS, ROW_SLOTS, r1, r0, 0, c0, R0, C0, in_rows)
        row = r1.to(tl.int64) * R0 + r0
        at = row * C0 + c0
        upstream = tl.where(valid, tl.load(g + at, mask=loaded, other=0).to(dtype), 0.0)
        value = tl.load(x + at, mask=loaded, other=0).to(dtype)
        scale = tl.load(scales + row, mask=r0 < R0, other=0)
        count = _count(STATICS, ROW_SLOTS, valid, C0, dtype)
        if not RMS:
            value = value - tl.load(means + row, mask=r0 < R0, other=0)
        unit = tl.where(valid, value * scale, 0.0)
        weight_part += upstream * unit
        bias_part += upstream
        upstream *= w
        result = upstream - unit * div(tl.sum(upstream * unit, 1, keep_dims=True), count)
        if not RMS:
            result -= div(tl.sum(upstream, 1, keep_dims=True), count)
        tl.store(gx + at, tl.where(valid, result * scale, 0.0).to(gx.dtype.element_ty), mask=(r0 < R0) & (c0 < C0))
    part = tl.program_id(0).to(tl.int64) * C0 + c0
    tl.store(weight_parts + part, tl.sum(weight_part, 0, keep_dims=True), mask=c0 < C0)
    tl.store(bias_parts + part, tl.sum(bias_part, 0, keep_dims=True), mask=c0 < C0)
