"""Triton kernels for class targets: the weight of each row, its share of the total weight, and the summed loss."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def class_target_rows_kernel(
    targets, class_weight, class_indices, weights, shares, totals, target_stride, rows, classes, ignore_index,
    HAS_CLASS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weigh all rows in one program; an invalid target is ignored here, and flagged after the last class index."""
    weight_sum, valid_count = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    has_invalid = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        target = tl.load(targets + row.to(tl.int64) * target_stride, mask=inside, other=-1)
        is_class = (target >= 0) & (target < classes)
        not_ignored = inside & (target != ignore_index)
        valid = not_ignored & is_class
        has_invalid |= (not_ignored & (valid == 0)).to(tl.int32)
        weight = valid.to(tl.float32)
        if HAS_CLASS_WEIGHT:
            weight = tl.load(class_weight + target, mask=valid, other=0.0)
        tl.store(class_indices + row, tl.where(valid, target, -1), mask=inside)
        tl.store(weights + row, weight, mask=inside)
        if not MEAN:
            tl.store(shares + row, weight, mask=inside)
        weight_sum += weight
        valid_count += valid.to(tl.float32)
    total = tl.sum(weight_sum, 0)
    tl.store(totals, total)
    tl.store(totals + 1, tl.sum(valid_count, 0))
    tl.store(class_indices + rows, tl.max(has_invalid, 0).to(tl.int64))
    if MEAN:
        tl.debug_barrier()  # the values stored above are read below
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            inside = row < rows
            weight = tl.load(weights + row, mask=inside, other=0.0)
            valid = tl.load(class_indices + row, mask=inside, other=-1) >= 0
            # Where all rows are ignored the mean is 0 / 0, and the gradient still zero.
            tl.store(shares + row, tl.where(valid, weight / total, 0.0), mask=inside)


@triton.jit
def class_target_loss_kernel(
    class_indices, weights, weight_sum, row_maxes, sum_exps, target_logits, loss, rows, MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the weighted sum over rows of L - z[target], or the weighted mean, in one program."""
    loss_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        valid = tl.load(class_indices + row, mask=inside, other=-1) >= 0
        weight = tl.load(weights + row, mask=inside, other=0.0)
        row_max = tl.load(row_maxes + row, mask=inside, other=0.0)
        log_sum = tl.log(tl.load(sum_exps + row, mask=inside, other=1.0))
        # Subtract the largest logit first: for a confident row the difference is small, and keeps its bits.
        row_loss = weight * (log_sum - (tl.load(target_logits + row, mask=inside, other=0.0) - row_max))
        loss_sum += tl.where(valid, row_loss, 0.0)  # 0 * inf is NaN
    result = tl.sum(loss_sum, 0)
    if MEAN:
        result = result / tl.load(weight_sum)
    tl.store(loss, result)
