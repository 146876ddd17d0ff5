"""Softmax statistics of logits, and the gradient of cross entropy written over the logits.

For one row of logits y_k, k < V, with softcap c and temperature T:

    z_k = c tanh(y_k / c) / T            (y_k / T without a softcap)
    L   = log sum_k exp(z_k),            p_k = exp(z_k - L)

L is kept as the largest z and the logarithm of sum_k exp(z_k - top), and they are subtracted one after the other: an
error of a logit's own rounding would otherwise be in every share of a row of large logits.

Cross entropy with label smoothing, class weights w, soft or hard targets q and a penalty on L is, for every choice
of these options, a combination of four numbers of the row. The gradient of that combination is

    d loss / d y_k = ((a + b L) p_k - t w_k q_k - s w_k) (1 - tanh(y_k / c)^2) / T

where a, b, t, s are numbers of the row (`GradientFactors`), and a hard target means w_k q_k = [k = target].

`statistics_kernel` reads a block of columns and folds it into the running statistics of each row, the online softmax of
Milakov and Gimelshein (https://arxiv.org/abs/1805.02867); `gradient_kernel` writes the gradient of a block of columns
whose rows are known. `softmax_gradient_kernel` does both for rows that are there in full. Everything is computed in
float32, and each element is overwritten by whoever has read it last, so that there is no second buffer.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import libdevice, tl, triton

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

RUN: tl.constexpr = tl.constexpr(8)
"""Columns next to each other that a thread reads at once: 16 bytes of 16-bit logits."""


@triton.jit
def _squash(y, softcap, per_temperature, CAPPED: tl.constexpr):
    """z, and the derivative dz / dy."""
    if CAPPED:
        t = libdevice.tanh(y / softcap)
        return softcap * t * per_temperature, (1 - t * t) * per_temperature
    else:
        return y * per_temperature, per_temperature


@triton.jit
def _shift(top):
    """Return the number to subtract before exp: the row's maximum, or 0 where that is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _gradient(
    y, k, inside, top, log_total, on_softmax, on_target, on_all, row_soft, class_weight, target, begin, softcap,
    per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """d loss / d y of columns begin + k of a row."""
    z, slope = _squash(y, softcap, per_temperature, CAPPED)
    g = on_softmax * tl.exp((z - top) - log_total)
    if SOFT or SMOOTHED:
        if WEIGHTED:
            w = tl.load(class_weight + begin + k, mask=inside, other=0.0).to(tl.float32)
        else:
            w = 1.0
        if SMOOTHED:
            g -= on_all * w
        if SOFT:
            g -= on_target * w * tl.load(row_soft + k, mask=inside, other=0.0).to(tl.float32)
    if not SOFT:
        g -= tl.where(k == target - begin, on_target, 0.0)
    return g * slope


@triton.jit
def statistics_kernel(
    logits, row_stride, soft, soft_stride, class_weight, targets, tops, totals, picks, sums, rows, begin, columns,
    softcap, per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold columns [begin, begin + columns) into the statistics of each row, a program for ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    top = tl.load(tops + row, mask=real, other=0.0)
    total = tl.load(totals + row, mask=real, other=0.0)
    picked = tl.load(picks + row, mask=real, other=0.0)
    if SMOOTHED:
        summed = tl.load(sums + row, mask=real, other=0.0)
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = real[:, None] & (k < columns)[None, :]
        place = row[:, None] * row_stride + k[None, :]
        y = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        z, _ = _squash(y, softcap, per_temperature, CAPPED)
        z = tl.where(inside, z, float("-inf"))  # a softcap makes the padding finite
        above = tl.maximum(top, tl.max(z, 1))
        shift = _shift(above)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        top = above
        if SOFT or SMOOTHED:
            w = tl.full((1, BLOCK), 1.0, tl.float32)
            if WEIGHTED:
                w = tl.load(class_weight + begin + k, mask=k < columns, other=0.0).to(tl.float32)[None, :]
            if SMOOTHED:
                summed += tl.sum(tl.where(inside, w * z, 0.0), 1)
            if SOFT:
                q = tl.load(soft + row[:, None] * soft_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
                picked += tl.sum(tl.where(inside, w * q * z, 0.0), 1)
    if not SOFT:
        # A target among these columns; an ignored one (-1) is among none.
        target = tl.load(targets + row, mask=real, other=-1)
        here = (target >= begin) & (target < begin + columns)
        y = tl.load(logits + row * row_stride + (target - begin), mask=here, other=0.0).to(tl.float32)
        z, _ = _squash(y, softcap, per_temperature, CAPPED)
        picked += tl.where(here, z, 0.0)
    tl.store(tops + row, top, mask=real)
    tl.store(totals + row, total, mask=real)
    tl.store(picks + row, picked, mask=real)
    if SMOOTHED:
        tl.store(sums + row, summed, mask=real)


@triton.jit
def gradient_kernel(
    logits, row_stride, soft, soft_stride, class_weight, targets, gradients, gradient_stride, tops, totals, on_softmax,
    on_target, on_all, begin, columns, softcap, per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of columns [begin, begin + columns), a program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    y = tl.load(logits + row * row_stride + k, mask=inside, other=0.0).to(tl.float32)
    target = 0
    if not SOFT:
        target = tl.load(targets + row)
    every = 0.0
    if SMOOTHED:
        every = tl.load(on_all + row)
    g = _gradient(
        y, k, inside, tl.load(tops + row), tl.log(tl.load(totals + row)), tl.load(on_softmax + row),
        tl.load(on_target + row), every, soft + row * soft_stride, class_weight, target, begin, softcap,
        per_temperature, SOFT, WEIGHTED, SMOOTHED, CAPPED,
    )  # fmt: skip
    tl.store(gradients + row * gradient_stride + k, g.to(gradients.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def softmax_gradient_kernel(
    logits, soft, class_weight, targets, tops, totals, picks, sums, on_softmax, on_square, on_target, on_all,
    row_stride, soft_stride, first_row, columns, softcap, per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, PENALISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of rows that are there in full, then their gradient over them, a program a row.

    The logits begin with row `first_row` of all; everything else is of all rows.

    Each thread keeps statistics of its own columns, `RUN` next to each other at a time, and threads meet once a row.
    The gradient is written from the end of the row to its beginning: what was read last is still in the cache, where
    what is written need not stay.

    Where only the logits and a target are read of a row, everything is in powers of two: with c = log2(e) / T,
    exp(z - L) = 2^(c (y - top) - log2(total)) is a subtraction, one multiplication with an addition and one power.
    """
    PLAIN: tl.constexpr = not (SOFT or SMOOTHED or CAPPED)
    place = tl.program_id(0).to(tl.int64)
    row = place + first_row
    row_logits, row_soft = logits + place * row_stride, soft + row * soft_stride
    power = per_temperature * LOG2_E
    target = tl.zeros((), tl.int64)
    if not SOFT:
        target = tl.load(targets + row)
    places = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    nothing = tl.zeros((BLOCK // RUN,), tl.float32)
    total, picked, summed, top = nothing, nothing, nothing, nothing - float("inf")
    for start in range(0, columns, BLOCK):
        k = start + places
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        if PLAIN:
            above = tl.maximum(top, tl.max(y, 1))
            shift = _shift(above)
            total = total * tl.exp2((top - shift) * power) + tl.sum(tl.exp2((y - shift[:, None]) * power), 1)
        else:
            z, _ = _squash(y, softcap, per_temperature, CAPPED)
            z = tl.where(inside, z, float("-inf"))  # a softcap makes the padding finite
            above = tl.maximum(top, tl.max(z, 1))
            shift = _shift(above)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
            if SOFT or SMOOTHED:
                w = tl.full((BLOCK // RUN, RUN), 1.0, tl.float32)
                if WEIGHTED:
                    w = tl.load(class_weight + k, mask=inside, other=0.0).to(tl.float32)
                if SMOOTHED:
                    summed += tl.sum(tl.where(inside, w * z, 0.0), 1)
                if SOFT:
                    q = tl.load(row_soft + k, mask=inside, other=0.0).to(tl.float32)
                    picked += tl.sum(tl.where(inside, w * q * z, 0.0), 1)
        top = above
    row_top = tl.max(top, 0)
    shift_of_all = _shift(row_top)
    if PLAIN:
        row_total = tl.sum(total * tl.exp2((top - shift_of_all) * power), 0)
    else:
        row_total = tl.sum(total * tl.exp(top - shift_of_all), 0)
    target_logit = tl.zeros((), tl.float32)
    if SOFT:
        tl.store(picks + row, tl.sum(picked, 0))
    else:
        target_logit = tl.load(row_logits + target, mask=target >= 0, other=0.0).to(tl.float32)
        z, _ = _squash(target_logit, softcap, per_temperature, CAPPED)
        tl.store(picks + row, z)
    tl.store(tops + row, row_top * per_temperature if PLAIN else row_top)
    tl.store(totals + row, row_total)
    every = 0.0
    if SMOOTHED:
        tl.store(sums + row, tl.sum(summed, 0))
        every = tl.load(on_all + row)
    weight, hit = tl.load(on_softmax + row), tl.load(on_target + row)
    if PENALISED:
        normaliser = (row_top * per_temperature if PLAIN else row_top) + tl.log(row_total)
        weight += tl.load(on_square + row) * normaliser
    log_total = tl.log2(row_total) if PLAIN else tl.log(row_total)
    tl.debug_barrier()  # the target's logit was read by all before anyone writes over it
    blocks = tl.cdiv(columns, BLOCK)
    for i in range(blocks):
        k = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if PLAIN:
            g = weight * per_temperature * tl.exp2((y - row_top) * power - log_total)
        else:
            g = _gradient(
                y, k, inside, row_top, log_total, weight, hit, every, row_soft, class_weight, target, 0, softcap,
                per_temperature, SOFT, WEIGHTED, SMOOTHED, CAPPED,
            )  # fmt: skip
        tl.store(row_logits + k, g.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    if PLAIN:
        tl.debug_barrier()  # the target's gradient is written over what was written for every class
        g = per_temperature * (weight * tl.exp2((target_logit - row_top) * power - log_total) - hit)
        tl.store(row_logits + target, g.to(logits.dtype.element_ty), mask=target >= 0)
