"""Softmax statistics of complete rows of logits, and the gradient of cross entropy written over the logits.

For one row of logits y_k, k < V, with softcap c and temperature T:

    z_k = c tanh(y_k / c) / T            (y_k / T without a softcap)
    L   = log sum_k exp(z_k),            p_k = exp(z_k - L)

L is kept as the largest z and log sum_k exp(z_k - max z), and they are subtracted one after the other: an
error of a logit's own rounding would otherwise be in every share of a row of large logits.

Cross entropy with label smoothing, class weights w, soft or hard targets q and a penalty on L is, for every choice
of these options, a combination of four numbers of the row. The gradient of that combination is

    d loss / d y_k = ((a + b L) p_k - t w_k q_k - s w_k) (1 - tanh(y_k / c)^2) / T

where a, b, t, s are numbers of the row (`GradientFactors`), and a class target means w_k q_k = [k = target].

`softmax_gradient_kernel` computes the statistics of complete rows and writes the gradient over them; blocks of columns
have the kernels of `row_statistics_kernel.py`. Everything is computed in float32, and each element is overwritten by
the program that read it last, so there is no second buffer.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import libdevice, tl, triton

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

RUN: tl.constexpr = tl.constexpr(8)
"""Adjacent columns that a thread reads at once: 16 bytes of 16-bit logits."""


@triton.jit
def transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP: tl.constexpr):
    """Return z and the derivative dz / dy."""
    if HAS_SOFTCAP:
        t = libdevice.tanh(y / softcap)
        return softcap * t * inv_temperature, (1 - t * t) * inv_temperature
    else:
        return y * inv_temperature, inv_temperature


@triton.jit
def shift_of(top):
    """Return the number to subtract before exp: the row's maximum, or 0 where that is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _gradient(
    y, k, inside, row_max, log_sum, grad_softmax, grad_target, grad_smoothing, row_soft, class_weight, target, softcap,
    inv_temperature, SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return d loss / d y of columns k of a row."""
    z, slope = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
    g = grad_softmax * tl.exp((z - row_max) - log_sum)
    if SOFT_TARGETS or HAS_SMOOTHING:
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight + k, mask=inside, other=0.0).to(tl.float32)
        else:
            w = 1.0
        if HAS_SMOOTHING:
            g -= grad_smoothing * w
        if SOFT_TARGETS:
            g -= grad_target * w * tl.load(row_soft + k, mask=inside, other=0.0).to(tl.float32)
    if not SOFT_TARGETS:
        g -= tl.where(k == target, grad_target, 0.0)
    return g * slope


@triton.jit(do_not_specialize=["first_row"])
def softmax_gradient_kernel(
    logits, soft, class_weight, targets, row_maxes, sum_exps, target_logits, logit_sums, grad_softmax, grad_z_loss,
    grad_target, grad_smoothing, row_stride, soft_stride, first_row, columns, softcap, inv_temperature,
    SOFT_TARGETS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of complete rows, then write the gradient over the logits, one program per row.

    The logits begin with row `first_row`; every other operand holds all rows.

    Each thread keeps statistics of its own columns, `RUN` adjacent ones at a time, and threads combine them once a row.
    The gradient is written from the end of the row to its beginning: the columns read last are still in the cache,
    and the written ones need not stay in it.

    Where a row's loss depends on its logits and a class target alone, everything is in powers of two: with
    c = log2(e) / T, exp(z - L) = 2^(c (y - max y) - log2(sum)) is a subtraction, a multiply-add and
    one power.
    """
    PLAIN: tl.constexpr = not (SOFT_TARGETS or HAS_SMOOTHING or HAS_SOFTCAP)
    place = tl.program_id(0).to(tl.int64)
    row = place + first_row
    row_logits, row_soft = logits + place * row_stride, soft + row * soft_stride
    power = inv_temperature * LOG2_E
    target = tl.zeros((), tl.int64)
    if not SOFT_TARGETS:
        target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    zeros = tl.zeros((BLOCK // RUN,), tl.float32)
    lane_sum, lane_target_logit, lane_logit_sum, lane_max = zeros, zeros, zeros, zeros - float("inf")
    for start in range(0, columns, BLOCK):
        k = start + offsets
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        if PLAIN:
            new_max = tl.maximum(lane_max, tl.max(y, 1))
            shift = shift_of(new_max)
            lane_sum = lane_sum * tl.exp2((lane_max - shift) * power) + tl.sum(tl.exp2((y - shift[:, None]) * power), 1)
        else:
            z, _ = transformed_logit(y, softcap, inv_temperature, HAS_SOFTCAP)
            z = tl.where(inside, z, float("-inf"))  # a softcap makes the padding finite
            new_max = tl.maximum(lane_max, tl.max(z, 1))
            shift = shift_of(new_max)
            lane_sum = lane_sum * tl.exp(lane_max - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
            if SOFT_TARGETS or HAS_SMOOTHING:
                w = tl.full((BLOCK // RUN, RUN), 1.0, tl.float32)
                if HAS_CLASS_WEIGHT:
                    w = tl.load(class_weight + k, mask=inside, other=0.0).to(tl.float32)
                if HAS_SMOOTHING:
                    lane_logit_sum += tl.sum(tl.where(inside, w * z, 0.0), 1)
                if SOFT_TARGETS:
                    q = tl.load(row_soft + k, mask=inside, other=0.0).to(tl.float32)
                    lane_target_logit += tl.sum(tl.where(inside, w * q * z, 0.0), 1)
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    row_shift = shift_of(row_max)
    if PLAIN:
        row_sum_exp = tl.sum(lane_sum * tl.exp2((lane_max - row_shift) * power), 0)
    else:
        row_sum_exp = tl.sum(lane_sum * tl.exp(lane_max - row_shift), 0)
    target_y = tl.zeros((), tl.float32)
    if SOFT_TARGETS:
        tl.store(target_logits + row, tl.sum(lane_target_logit, 0))
    else:
        target_y = tl.load(row_logits + target, mask=target >= 0, other=0.0).to(tl.float32)
        z, _ = transformed_logit(target_y, softcap, inv_temperature, HAS_SOFTCAP)
        tl.store(target_logits + row, z)
    tl.store(row_maxes + row, row_max * inv_temperature if PLAIN else row_max)
    tl.store(sum_exps + row, row_sum_exp)
    smoothing = 0.0
    if HAS_SMOOTHING:
        tl.store(logit_sums + row, tl.sum(lane_logit_sum, 0))
        smoothing = tl.load(grad_smoothing + row)
    softmax_factor, target_factor = tl.load(grad_softmax + row), tl.load(grad_target + row)
    if HAS_Z_LOSS:
        row_log_sum_exp = (row_max * inv_temperature if PLAIN else row_max) + tl.log(row_sum_exp)
        softmax_factor += tl.load(grad_z_loss + row) * row_log_sum_exp
    log_sum = tl.log2(row_sum_exp) if PLAIN else tl.log(row_sum_exp)
    tl.debug_barrier()  # every thread has read the target's logit before one overwrites it
    blocks = tl.cdiv(columns, BLOCK)
    for i in range(blocks):
        k = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        inside = k < columns
        y = tl.load(row_logits + k, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if PLAIN:
            g = softmax_factor * inv_temperature * tl.exp2((y - row_max) * power - log_sum)
        else:
            g = _gradient(
                y, k, inside, row_max, log_sum, softmax_factor, target_factor, smoothing, row_soft, class_weight,
                target, softcap, inv_temperature, SOFT_TARGETS, HAS_CLASS_WEIGHT, HAS_SMOOTHING, HAS_SOFTCAP,
            )  # fmt: skip
        tl.store(row_logits + k, g.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    if PLAIN:
        tl.debug_barrier()  # the target's gradient overwrites the one that was written for every class
        g = inv_temperature * (softmax_factor * tl.exp2((target_y - row_max) * power - log_sum) - target_factor)
        tl.store(row_logits + target, g.to(logits.dtype.element_ty), mask=target >= 0)
