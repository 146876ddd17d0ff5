"""Triton kernels beside a product whose epilogue has exponentials: shifts of rows, their statistics, what targets add.

With y = X W^T / T, the product has E_k = exp(y_k - c) of each row in bfloat16, which has float32's range, and the sums
of E over blocks of columns. The shift c lies above the largest y by no more than that range allows. From
e = exp(y_t - c) of the target, in float32, and the sum r of all other E follow s = r + e, L = c + log s and
p_k = E_k / s. The gradient of the loss is a p - b [k = target], where a and b are `grad_softmax` and `grad_target` of
`GradientFactors`, z-loss added. It is never written: E is 0 at the target, and the target's part is apart,

    dX = (a / s) E W + g W_t,      dW = E^T ((a / s) X) + g X at the targets' rows,      g = (a - b) - a r / s

so that the rounding of (a / s) X does not touch it; nor does p_t - 1 cancel, as r has all but the target.

Shifts and targets' logits are in powers of two between these kernels: y log2(e).
"""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

SMALLEST_SUM, LARGEST_SUM, LARGEST_FACTOR = tl.constexpr(2.0**-110), tl.constexpr(2.0**90), tl.constexpr(2.0**100)
"""A row whose s, or a / s, is outside of these takes a shift of its own: E may have overflowed, or lost bits."""

COLUMNS = tl.constexpr(128)
"""The columns of E whose sum is one number."""


@triton.jit
def shifts_kernel(
    hidden, weight, targets, samples, shifts, target_logits, first, width, scale, MARGIN: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute c of each row and the logit of its target; the E of an ignored row will be 0.

    c is MARGIN above the largest of some logits and the target's.
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
        sums: (SUMS, rows), of E over blocks of columns.
        exponentials: E, (rows, V).
        shifts: c; becomes the row's maximum of `RowStatistics`, nearly.
        sum_exps, target_logits: of `RowStatistics`.
        inverses: a / s, over the temperature.
        at_targets: g, likewise.
        scaled: (rows, H), written where SCALES.
        scale: of the product in E's exponents.
    """
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    target = tl.load(targets + row)
    valid = target >= 0
    power = tl.load(target_logits + row)
    shift = tl.load(shifts + row)
    grad = tl.load(grad_softmax + row)
    # Of the target's block, E itself without the target; an ignored row has none, which is after the last.
    block = tl.where(valid, target // COLUMNS, SUMS)
    part = tl.arange(0, BLOCK_SUMS)
    own_sums = tl.load(sums + part.to(tl.int64) * rows + place, mask=(part < SUMS) & (part != block), other=0.0)
    near = block * COLUMNS + tl.arange(0, COLUMNS)
    is_beside = (near < classes) & (near != target)
    beside = tl.load(exponentials + place * classes + near, mask=is_beside, other=0.0).to(tl.float32)
    rest = tl.sum(own_sums, 0) + tl.sum(beside, 0)
    total = rest + tl.exp2(power - shift)
    in_range = (total > SMALLEST_SUM) & (total < LARGEST_SUM) & (tl.abs(grad) < total * LARGEST_FACTOR)
    if valid & (in_range == 0) & (total == total):  # again, from the row's own largest logit
        shift = power
        rest = tl.full((), 0.0, tl.float32)
        for turn in range(2):  # the largest logit, then exponentials
            largest = tl.full((BLOCK_CLASSES,), float("-inf"), tl.float32)
            for first_class in range(0, classes, BLOCK_CLASSES):
                of = first_class + tl.arange(0, BLOCK_CLASSES)
                others = tl.zeros((BLOCK_CLASSES,), tl.float32)
                for start in range(0, width, BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    x = tl.load(hidden + row * width + column, mask=column < width, other=0.0)
                    at = weight + of.to(tl.int64)[:, None] * width + column[None, :]
                    w = tl.load(at, mask=(of < classes)[:, None] & (column < width)[None, :], other=0.0)
                    others += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
                others = tl.where((of < classes) & (of != target), others * scale, float("-inf"))
                if turn == 0:
                    largest = tl.maximum(largest, others)
                else:
                    found = tl.exp2(others - shift)
                    rest += tl.sum(found, 0)
                    at = exponentials + place * classes + of
                    tl.store(at, found.to(exponentials.dtype.element_ty), mask=of < classes)
            if turn == 0:
                shift = tl.maximum(tl.max(largest, 0), power)
        total = rest + tl.exp2(power - shift)
    if (target < 0) & (total != 0.0):  # what an ignored row holds is no number
        for first_class in range(0, classes, BLOCK):
            of = first_class + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), exponentials.dtype.element_ty)
            tl.store(exponentials + place * classes + of, nothing, mask=of < classes)
    own = tl.exp2(power - shift)
    total = tl.where(valid, total, 1.0)
    if HAS_Z_LOSS:
        grad += tl.load(grad_z_loss + row) * (shift + tl.log2(total)) * LN_2
    inverse = tl.where(valid, grad / total / temperature, 0.0)
    of_target = grad - tl.load(grad_target + row) - grad * (rest / total)
    tl.debug_barrier()  # all has been read that is written over
    tl.store(inverses + row, inverse)
    tl.store(at_targets + row, tl.where(valid, of_target / temperature, 0.0))
    # A likely target's logit is the row's maximum; else the shift takes the power of two of the sum.
    exponent = tl.floor(tl.log2(total))
    exponent = tl.where(valid & (exponent == exponent) & (exponent < 1024.0) & (exponent > -1024.0), exponent, 0.0)
    is_likely = valid & (own >= rest)
    tl.store(sum_exps + row, tl.where(is_likely, 1.0 + rest / own, total * tl.exp2(-exponent)))
    tl.store(shifts + row, tl.where(valid, tl.where(is_likely, power, shift + exponent) * LN_2, 0.0))
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
