"""The Triton kernel of `hard_rows.py`: weights of rows, their sum, and each row's share of it."""

from __future__ import annotations

from subtensors.kernels.triton_or_none import tl, triton


@triton.jit
def hard_rows_kernel(
    targets, target_stride, class_weight, hard, weights, shares, totals, rows, classes, ignore_index,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows by one program; a target that is no class is ignored here, and torch's error elsewhere."""
    weight_sum, counted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        target = tl.load(targets + row.to(tl.int64) * target_stride, mask=inside, other=-1)
        valid = inside & (target != ignore_index) & (target >= 0) & (target < classes)
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
    if MEAN:
        tl.debug_barrier()  # what was stored is read again
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            inside = row < rows
            weight = tl.load(weights + row, mask=inside, other=0.0)
            valid = tl.load(hard + row, mask=inside, other=-1) >= 0
            # Where all rows are ignored the mean is 0 / 0, and the gradient still zero.
            tl.store(shares + row, tl.where(valid, weight / total, 0.0), mask=inside)
