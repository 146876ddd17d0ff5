"""Softmax statistics of logits, and the gradient of cross entropy written over the logits.

For one row of logits y_k, k < V, with softcap c and temperature T:

    z_k = c tanh(y_k / c) / T            (y_k / T without a softcap)
    L   = log sum_k exp(z_k),            p_k = exp(z_k - L)

Cross entropy with label smoothing, class weights w, soft or hard targets q and a penalty on L is, for every choice
of these options, a combination of four numbers of the row. The gradient of that combination is

    d loss / d y_k = ((a + b L) p_k - t w_k q_k - s w_k) (1 - tanh(y_k / c)^2) / T

where a, b, t, s are numbers of the row (`RowFactors`), and a hard target means w_k q_k = [k = target].

Two kernels. `statistics_kernel` reads a block of columns and folds it into the running statistics of each row, the
online softmax of Milakov and Gimelshein (https://arxiv.org/abs/1805.02867); `gradient_kernel` writes the gradient over
a block of columns whose rows are known. `softmax_gradient_kernel` does both for rows that are there in full, so that
its second look at a row finds much of it in the cache. Each element is overwritten by whoever has read it last, so no
second buffer exists. Everything is computed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subtensors.kernels.libdevice import libdevice


@triton.jit
def _squash(y, softcap, per_temperature, CAPPED: tl.constexpr):
    """z, and the derivative dz / dy."""
    if CAPPED:
        t = libdevice.tanh(y / softcap)
        return softcap * t * per_temperature, (1 - t * t) * per_temperature
    else:
        return y * per_temperature, per_temperature


@triton.jit
def _fold(
    top, total, picked, summed, row_logits, row_soft, class_weight, target, begin, columns, softcap, per_temperature,
    SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of one row with these columns folded in.

    top: the largest z so far; total: sum of exp(z - top); picked: sum of w q z; summed: sum of w z.
    """
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=float("-inf")).to(tl.float32)
        z, _ = _squash(y, softcap, per_temperature, CAPPED)
        z = tl.where(inside, z, float("-inf"))  # a softcap makes the padding finite
        above = tl.maximum(top, tl.max(z, 0))
        # A row of -inf so far has no finite maximum to subtract.
        shift = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), 0)
        top = above
        if SOFT or SMOOTHED:
            if WEIGHTED:
                w = tl.load(class_weight + begin + k, mask=inside, other=0.0).to(tl.float32)
            else:
                w = 1.0
            if SMOOTHED:
                summed += tl.sum(tl.where(inside, w * z, 0.0), 0)
            if SOFT:
                q = tl.load(row_soft + k, mask=inside, other=0.0).to(tl.float32)
                picked += tl.sum(tl.where(inside, w * q * z, 0.0), 0)
    if not SOFT:
        # A target among these columns; an ignored one (-1) is among none.
        here = (target >= begin) & (target < begin + columns)
        y = tl.load(row_logits + (target - begin), mask=here, other=0.0).to(tl.float32)
        z, _ = _squash(y, softcap, per_temperature, CAPPED)
        picked += tl.where(here, z, 0.0)
    return top, total, picked, summed


@triton.jit
def _gradient(
    y, k, inside, normaliser, on_softmax, on_target, on_all, row_soft, class_weight, target, begin, softcap,
    per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """d loss / d y of some columns of a row."""
    z, slope = _squash(y, softcap, per_temperature, CAPPED)
    g = on_softmax * tl.exp(z - normaliser)
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
    logits, row_stride, soft, soft_stride, class_weight, targets, tops, totals, picks, sums, begin, columns, softcap,
    per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold columns [begin, begin + columns) into the statistics of each row, a program a row."""
    row = tl.program_id(0).to(tl.int64)
    target = 0
    if not SOFT:
        target = tl.load(targets + row)
    summed = tl.zeros((), tl.float32)
    if SMOOTHED:
        summed = tl.load(sums + row)
    top, total, picked, summed = _fold(
        tl.load(tops + row), tl.load(totals + row), tl.load(picks + row), summed, logits + row * row_stride,
        soft + row * soft_stride, class_weight, target, begin, columns, softcap, per_temperature, SOFT, WEIGHTED,
        SMOOTHED, CAPPED, BLOCK,
    )  # fmt: skip
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(picks + row, picked)
    if SMOOTHED:
        tl.store(sums + row, summed)


@triton.jit
def gradient_kernel(
    logits, row_stride, soft, soft_stride, class_weight, targets, normalisers, on_softmax, on_target, on_all, begin,
    columns, softcap, per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient over columns [begin, begin + columns), a program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    target = 0
    if not SOFT:
        target = tl.load(targets + row)
    every = 0.0
    if SMOOTHED:
        every = tl.load(on_all + row)
    place = logits + row * row_stride + k
    y = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    g = _gradient(
        y, k, inside, tl.load(normalisers + row), tl.load(on_softmax + row), tl.load(on_target + row), every,
        soft + row * soft_stride, class_weight, target, begin, softcap, per_temperature, SOFT, WEIGHTED, SMOOTHED,
        CAPPED,
    )  # fmt: skip
    tl.store(place, g.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def softmax_gradient_kernel(
    logits, row_stride, soft, soft_stride, class_weight, targets, tops, totals, picks, sums, on_softmax, on_square,
    on_target, on_all, columns, softcap, per_temperature, SOFT: tl.constexpr, WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, PENALISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of rows that are there in full, then their gradient over them, a program a row."""
    row = tl.program_id(0).to(tl.int64)
    row_logits, row_soft = logits + row * row_stride, soft + row * soft_stride
    target = 0
    if not SOFT:
        target = tl.load(targets + row)
    nothing = tl.zeros((), tl.float32)
    top, total, picked, summed = _fold(
        nothing - float("inf"), nothing, nothing, nothing, row_logits, row_soft, class_weight, target, 0, columns,
        softcap, per_temperature, SOFT, WEIGHTED, SMOOTHED, CAPPED, BLOCK,
    )  # fmt: skip
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(picks + row, picked)
    every = 0.0
    if SMOOTHED:
        tl.store(sums + row, summed)
        every = tl.load(on_all + row)
    normaliser = top + tl.log(total)
    weight = tl.load(on_softmax + row)
    if PENALISED:
        weight += tl.load(on_square + row) * normaliser
    hit = tl.load(on_target + row)
    tl.debug_barrier()  # the target's logit was read by all before anyone writes over it
    for start in range(0, columns, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=0.0).to(tl.float32)
        g = _gradient(
            y, k, inside, normaliser, weight, hit, every, row_soft, class_weight, target, 0, softcap, per_temperature,
            SOFT, WEIGHTED, SMOOTHED, CAPPED,
        )  # fmt: skip
        tl.store(row_logits + k, g.to(logits.dtype.element_ty), mask=inside)
