"""What rows with hard targets count for, by one kernel where torch takes a dozen: the host is waited for at this point.

A row with target y that is a class and not ignored weighs w_y (1 without class weights), another one 0. A row's share
is its weight over the weights of all rows, or its weight where the losses are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.kernels.hard_rows_tiles import hard_rows_kernel
from subtensors.kernels.repeated_launch import RepeatedLaunch

find_hard_rows = RepeatedLaunch(hard_rows_kernel)

BLOCK = 4096

MOST = 2**16
"""Rows that one program goes through; with more the logits take far longer than the host does."""


class HardRows(NamedTuple):
    """What each row counts for.

    Args:
        target: (N,) int64, -1 for an ignored row.
        weight: (N,), of each row.
        share: (N,), of each row in the loss.
        total: 0-d, the sum of the weights.
        counted: 0-d, rows that are not ignored.
    """

    target: Tensor
    weight: Tensor
    share: Tensor
    total: Tensor
    counted: Tensor


def hard_rows_by_kernel(
    target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int, mean: bool
) -> HardRows:
    """`hard_rows` in float32 by the kernel."""
    count = target.shape[0]
    hard = torch.empty(count, dtype=torch.int64, device=target.device)
    weights, shares = torch.empty(2, count, dtype=torch.float32, device=target.device).unbind()
    totals = torch.empty(2, dtype=torch.float32, device=target.device)
    find_hard_rows(
        1,
        *(target, target.stride(0), target if class_weight is None else class_weight),
        *(hard, weights, shares, totals, count, classes, ignore_index),
        WEIGHTED=class_weight is not None,
        MEAN=mean,
        BLOCK=min(BLOCK, max(128, 1 << (count - 1).bit_length())),
        num_warps=8,
    )
    total, counted = totals.unbind()
    return HardRows(hard, weights, shares, total, counted)


def hard_rows(
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    kernels: bool = False,
) -> HardRows:
    """What each row counts for.

    Args:
        target: (N,) int64.
        class_weight: (V,), in `dtype`, or None.
        classes: V.
        ignore_index: rows with this target count for nothing.
        mean: whether the losses are averaged, and not added.
        dtype: of the computation.
        kernels: whether by a Triton kernel, which leaves out targets that are no class: see `assert_classes`.

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
    return HardRows(torch.where(valid, target, -1).long(), weight, share, total, count)


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
