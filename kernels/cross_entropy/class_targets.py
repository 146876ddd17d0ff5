"""Row weights for hard targets, by one kernel where torch launches a dozen: the GPU waits for the host at this point.

A row whose target y is a class and not ignored has the weight w_y (1 without class weights), any other row 0. A row's
share is its weight divided by the sum of all weights, or its weight where the losses are summed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.kernels.runtime.launcher import CachedLauncher

BLOCK, WARPS = 8192, 32
"""The fastest on an H200, for 16384 rows."""

MOST = 2**16
"""Rows that one program goes through; with more the logits take far longer than the host does."""


@cache
def launch_hard_rows() -> CachedLauncher:
    """The launch of the kernel that weighs the rows."""
    from subtensors.kernels.cross_entropy.class_targets_kernel import hard_rows_kernel

    return CachedLauncher(hard_rows_kernel)


@cache
def launch_hard_loss() -> CachedLauncher:
    """The launch of the kernel that adds the rows' losses."""
    from subtensors.kernels.cross_entropy.class_targets_kernel import hard_loss_kernel

    return CachedLauncher(hard_loss_kernel)


class ClassTargets(NamedTuple):
    """The targets, weights and loss shares of all rows, for hard targets.

    Args:
        target: (N,) int64, -1 for an ignored row.
        weight: (N,), of each row.
        share: (N,), of each row in the loss.
        totals: (2,), the sum of the weights, and how many rows are not ignored.
        strangers: (1,) int64, 1 if a target is no class and has not been refused yet; None: all are classes.
    """

    target: Tensor
    weight: Tensor
    share: Tensor
    totals: Tensor
    strangers: Tensor | None = None

    def refuse_strangers(self) -> None:
        """Torch's own error where a target is no class: on a GPU its assertion, as in a gather that is out of range."""
        if self.strangers is not None:
            self.totals[:1].gather(0, self.strangers)


def hard_rows_by_kernel(
    target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int, mean: bool
) -> ClassTargets:
    """`hard_rows` in float32 by the kernel."""
    count = target.shape[0]
    hard = torch.empty(count + 1, dtype=torch.int64, device=target.device)
    numbers = torch.empty(2 * count + 2, dtype=torch.float32, device=target.device)
    weights, shares, totals = numbers.split_with_sizes((count, count, 2))
    launch_hard_rows()(
        1,
        (target, target if class_weight is None else class_weight, hard, weights, shares, totals),
        *(target.stride(0), count, classes, ignore_index),
        WEIGHTED=class_weight is not None,
        MEAN=mean,
        **_tile(count),
    )
    return ClassTargets(hard[:count], weights, shares, totals, hard[count:])


def hard_loss_by_kernel(rows: ClassTargets, top: Tensor, total: Tensor, picked: Tensor, mean: bool) -> Tensor:
    """The cross entropy of all rows, added or averaged.

    Args:
        rows: what each counts for, found by the kernel.
        top, total, picked: (N,), see `RowStatistics`.
        mean: whether the losses are averaged.

    Returns:
        a number, float32.
    """
    count, loss = rows.target.shape[0], torch.empty((), dtype=torch.float32, device=top.device)
    tensors = (rows.target, rows.weight, rows.totals, top, total, picked, loss)
    launch_hard_loss()(1, tensors, count, MEAN=mean, **_tile(count))
    return loss


def _tile(count: int) -> dict[str, int]:
    """Return the block size and the warps of the single program, fewer for few rows."""
    block = min(BLOCK, max(128, 1 << (count - 1).bit_length()))
    return {"BLOCK": block, "num_warps": max(4, WARPS * block // BLOCK)}


def hard_rows(
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    kernels: bool = False,
) -> ClassTargets:
    """Return the targets, weights and loss shares of all rows.

    Args:
        target: (N,) int64.
        class_weight: (V,), in `dtype`, or None.
        classes: V.
        ignore_index: rows with this target do not count.
        mean: whether the losses are averaged rather than added.
        dtype: of the computation.
        kernels: whether to use a Triton kernel, which leaves out targets that are no class: see `refuse_strangers`.

    Raises:
        IndexError: on a CPU, a target that is no class and not ignored; on a GPU torch's device assertion.

    Example:
        >>> hard_rows(torch.tensor([1, -100, 0]), None, 2, -100, True, torch.float32).share
        tensor([0.5000, 0.0000, 0.5000])
    """
    if kernels and dtype == torch.float32 and target.dtype == torch.int64 and 0 < target.shape[0] <= MOST:
        return hard_rows_by_kernel(target, class_weight, classes, ignore_index, mean)
    valid = target != ignore_index
    weight = assert_classes(target, valid, class_weight, classes, ignore_index, dtype)
    total = weight.sum()
    share = torch.where(valid, weight * (1 / total), 0.0) if mean else weight
    count = total if class_weight is None else valid.sum().to(dtype)
    return ClassTargets(torch.where(valid, target, -1).long(), weight, share, torch.stack([total, count]))


def assert_classes(
    target: Tensor, valid: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The class weight of each hard target, 0 for an ignored one; a target that is no class is torch's own error."""
    # On a GPU nll_loss would make its stand-in for the logits contiguous; gather has the same assertion.
    if target.is_cuda:
        ones = torch.ones(1, dtype=dtype, device=target.device).expand(classes)
        table = ones if class_weight is None else class_weight
        return torch.where(valid, table.gather(0, torch.where(valid, target, 0).long()), 0.0)
    minus_one = torch.full((1, 1), -1.0, dtype=dtype, device=target.device).expand(target.shape[0], classes)
    return F.nll_loss(minus_one, target, class_weight, reduction="none", ignore_index=ignore_index)
