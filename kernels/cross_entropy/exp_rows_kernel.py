"""Triton kernels beside a product whose epilogue has exponentials: shifts of rows, their statistics, what targets add.

With y = X W^T / T, the product has E_k = exp(y_k - c) of each row, c a shift that is near enough the largest y: E has
float32's range of exponents. From its sum s follow L = c + log s and p_k = E_k / s, and the gradient of the loss,
G = a p - b [k = target], is never written: E is 0 at the target, and the target's part is apart,

    dX = (a / s) E W + (a p_t - b) W_t,      dW = E^T ((a / s) X) + (a p_t - b) X at the targets' rows,

so that neither the rounding of (a / s) X nor the cancellation of p_t and 1 touches it.
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

LARGEST_SUM = tl.constexpr(2.0**64)
"""Beyond it a row's own shift is taken: (a / s) is then still no subnormal number."""


@triton.jit
def shifts_kernel(
    hidden, weight, targets, samples, shifts, target_logits, first, width, scale, MARGIN: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute c of each row, and the logit of its target, both in powers of two; an ignored row's E will be 0.

    The largest of some logits and the target's is no bound of the others. With MARGIN above it as the shift, E has
    room for logits that are 64 + MARGIN powers of two larger, and for some that are 126 - MARGIN smaller.
    """
    row = first + tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    valid = target >= 0
    product = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < tl.where(valid, width, 0)
        x = tl.load(hidden + row * width + column, mask=mask, other=0.0).to(tl.float32)
        product += x * tl.load(weight + target * width + column, mask=mask, other=0.0).to(tl.float32)
    logit = tl.sum(product, 0) * scale
    place = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)
    largest = tl.maximum(tl.max(tl.load(samples + place).to(tl.float32), 0) * scale, logit)
    tl.store(target_logits + row, logit)
    tl.store(shifts + row, tl.where(valid, largest + MARGIN, 1e30))


@triton.jit
def rows_kernel(
    sums, exponentials, hidden, weight, targets, shifts, sum_exps, target_logits, inverses, at_targets, grad_softmax,
    grad_z_loss, grad_target, scaled, first, rows, classes, width, scale, temperature, HAS_Z_LOSS: tl.constexpr,
    SCALES: tl.constexpr, SUMS: tl.constexpr, BLOCK_SUMS: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Complete a row: its statistics and factors, 0 over E at the target, and (a / s) X for the product of dW.

    Args:
        sums: (SUMS, rows), of E over parts of the columns.
        exponentials: E, (rows, V).
        shifts: c, in powers of two; becomes the row's maximum of `RowStatistics`, nearly.
        sum_exps, target_logits: of `RowStatistics`; the logit comes in powers of two.
        inverses: a / s, without the temperature's share in the logits.
        at_targets: a p_t - b.
        scaled: (rows, H), written where SCALES.
        scale: of the product in E's exponents.

    A row whose sum is out of range is computed again, from its own largest logit.
    """
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    target = tl.load(targets + row)
    valid = target >= 0
    part = tl.arange(0, BLOCK_SUMS)
    total = tl.sum(tl.load(sums + part.to(tl.int64) * rows + place, mask=part < SUMS, other=0.0), 0)
    shift = tl.load(shifts + row)
    is_right = tl.where(valid, (total > 0.0) & (total < LARGEST_SUM), total == 0.0)  # NaN is not
    if is_right == 0:
        shift = tl.full((), 0.0, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for turn in range(2):  # the largest logit, then exponentials
            largest = tl.full((BLOCK_CLASSES,), float("-inf"), tl.float32)
            for first_class in range(0, classes, BLOCK_CLASSES):
                of = first_class + tl.arange(0, BLOCK_CLASSES)
                power = tl.zeros((BLOCK_CLASSES,), tl.float32)
                for start in range(0, width, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    x = tl.load(hidden + row * width + column, mask=column < tl.where(valid, width, 0), other=0.0)
                    at = weight + of.to(tl.int64)[:, None] * width + column[None, :]
                    w = tl.load(at, mask=(of < classes)[:, None] & (column < width)[None, :], other=0.0)
                    power += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
                power *= scale
                if turn == 0:
                    largest = tl.maximum(largest, tl.where(of < classes, power, float("-inf")))
                else:
                    found = tl.where(of < tl.where(valid, classes, 0), tl.exp2(power - shift), 0.0)
                    total += tl.sum(found, 0)
                    at = exponentials + place * classes + of
                    tl.store(at, found.to(exponentials.dtype.element_ty), mask=of < classes)
            if turn == 0:
                shift = tl.max(largest, 0)
        tl.debug_barrier()  # E at the target is written again below
    power = tl.load(target_logits + row)
    total = tl.where(valid, total, 1.0)
    grad = tl.load(grad_softmax + row)
    if HAS_Z_LOSS:
        grad += tl.load(grad_z_loss + row) * (shift + tl.log2(total)) * LN_2
    inverse = tl.where(valid, grad / total / temperature, 0.0)
    of_target = grad * tl.exp2(power - shift) / total - tl.load(grad_target + row)
    tl.store(inverses + row, inverse)
    tl.store(at_targets + row, tl.where(valid, of_target / temperature, 0.0))
    # The sum without its power of two, which the shift takes: both are then as exact as beside the largest logit.
    exponent = tl.floor(tl.log2(total))
    exponent = tl.where(valid & (exponent == exponent) & (exponent < 1024.0) & (exponent > -1024.0), exponent, 0.0)
    tl.store(sum_exps + row, total * tl.exp2(-exponent))
    tl.store(shifts + row, tl.where(valid, (shift + exponent) * LN_2, 0.0))
    tl.store(target_logits + row, power * LN_2)
    tl.store(exponentials + place * classes + target, 0.0, mask=valid)
    if SCALES:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < tl.where(valid, width, 0)
            x = tl.load(hidden + row * width + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(scaled + place * width + column, (x * inverse).to(scaled.dtype.element_ty), mask=column < width)


@triton.jit
def hidden_grad_kernel(result, weight, targets, inverses, at_targets, width, BLOCK: tl.constexpr):
    """Compute a row of dX over its row of E W."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    inverse, at_target = tl.load(inverses + row), tl.load(at_targets + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = result + row * width + column
        value = tl.load(at, mask=column < width, other=0.0).to(tl.float32) * inverse
        mask = column < tl.where(target >= 0, width, 0)
        value += at_target * tl.load(weight + target * width + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, value.to(result.dtype.element_ty), mask=column < width)


@triton.jit
def weight_grad_kernel(
    result, hidden, classes, order, at_targets, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add what the rows of one target give to its row of dW: of equal classes, which are sorted, the first takes all.

    Args:
        classes: (rows,), sorted.
        order: (rows,), the row of each.
    """
    first = tl.program_id(0)
    target = tl.load(classes + first)
    before = tl.load(classes + first - 1, mask=first > 0, other=-1)
    if (target >= 0) & (target != before):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            place = first + tl.arange(0, ROWS)
            is_own = tl.load(classes + place, mask=place < rows, other=-1) == target
            while tl.max(is_own.to(tl.int32), 0) > 0:
                row = tl.load(order + place, mask=is_own, other=0)
                factor = tl.load(at_targets + row, mask=is_own, other=0.0)
                at = hidden + row[:, None] * width + column[None, :]
                x = tl.load(at, mask=is_own[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
                total += tl.sum(x * factor[:, None], 0)
                place += ROWS
                is_own = tl.load(classes + place, mask=place < rows, other=-1) == target
            at = result + target * width + column
            value = tl.load(at, mask=column < width, other=0.0).to(tl.float32) + total
            tl.store(at, value.to(result.dtype.element_ty), mask=column < width)
