"""The Triton kernels of `class_targets.py`: weights of rows, their sum and each row's share of it, and the loss."""

from __future__ import annotations

from subtensors.kernels.runtime.triton_compat import tl, triton


@triton.jit
def hard_rows_kernel(
    targets, class_weight, hard, weights, shares, totals, target_stride, rows, classes, ignore_index,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows by one program; a target that is no class is ignored here, and noted behind the last of them."""
    weight_sum, counted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    strangers = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        target = tl.load(targets + row.to(tl.int64) * target_stride, mask=inside, other=-1)
        is_class = (target >= 0) & (target < classes)
        asked = inside & (target != ignore_index)
        valid = asked & is_class
        strangers |= (asked & (valid == 0)).to(tl.int32)
        weight = valid.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(class_weight + target, mask=valid, other=0.0)
        tl.store(hard + row, tl.where(valid, target, -1), mask=inside)
        tl.store(weights + row, weight, mask=inside)
        if not MEAN:
            tl.store(shares + row, weight, mask=inside)
        weight_sum += weight
        counted += valid.to(tl.float32)
    total = tl.sum(weight_sum, 0)
    tl.store(totals, total)
    tl.store(totals + 1, tl.sum(counted, 0))
    tl.store(hard + rows, tl.max(strangers, 0).to(tl.int64))
    if MEAN:
        tl.debug_barrier()  # what was stored is read again
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            inside = row < rows
            weight = tl.load(weights + row, mask=inside, other=0.0)
            valid = tl.load(hard + row, mask=inside, other=-1) >= 0
            # Where all rows are ignored the mean is 0 / 0, and the gradient still zero.
            tl.store(shares + row, tl.where(valid, weight / total, 0.0), mask=inside)


@triton.jit
def hard_loss_kernel(
    hard, weights, weight_sum, tops, totals, picks, loss, rows, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """The weighed sum over rows of L - z of the target, or the mean, by one program."""
    loss_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        valid = tl.load(hard + row, mask=inside, other=-1) >= 0
        weight = tl.load(weights + row, mask=inside, other=0.0)
        top = tl.load(tops + row, mask=inside, other=0.0)
        log_total = tl.log(tl.load(totals + row, mask=inside, other=1.0))
        # The largest logit goes first: of a row that is sure of its target little is left.
        of_row = weight * (log_total - (tl.load(picks + row, mask=inside, other=0.0) - top))
        loss_sum += tl.where(valid, of_row, 0.0)  # zero times what is infinite would be no zero
    whole = tl.sum(loss_sum, 0)
    if MEAN:
        whole = whole / tl.load(weight_sum)
    tl.store(loss, whole)
