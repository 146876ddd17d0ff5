"""Cross entropy and log-sum-exp of each row of logits that are there: read once for them, and once for the gradient.

It is the part of `linear_cross_entropy` between its products, for logits that come from elsewhere and for whoever wants
a loss a row. Between forward and backward it keeps the logits in their own dtype, and a few numbers a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, GradientFactors, RowLoss, RowStatistics
from subtensors.kernels.cross_entropy.logits_block import Block, block_ops, uses_kernels
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype


class _RowCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: CrossEntropy) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        compute = arithmetic_dtype(logits.dtype)
        terms = RowLoss(options, target, logits.shape[1], compute, uses_kernels(logits))
        statistics = RowStatistics.none(logits.shape[0], compute, logits.device)
        if logits.numel():
            block_ops(terms, logits).fold(Block(logits), statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, statistics.top, statistics.total)
        ctx.terms = terms
        return terms.loss(statistics)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None]:
        (of_loss,) = upstream
        if of_loss is None:
            return None, None, None
        logits, top, total = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        if logits.numel():
            factors = ctx.terms.gradient_factors(of_loss)
            statistics = RowStatistics(top, total, top, top)  # a gradient has no use for the sums of logits
            block_ops(ctx.terms, logits).write_gradient(Block(logits), statistics, factors, gradient)
        return gradient, None, None


class _RowLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: CrossEntropy) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        compute = arithmetic_dtype(logits.dtype)
        nobody = torch.full(logits.shape[:1], -1, device=logits.device)
        terms = RowLoss(replace(options, ignore_index=-1), nobody, logits.shape[1], compute)
        statistics = RowStatistics.none(logits.shape[0], compute, logits.device)
        if logits.numel():
            block_ops(terms, logits).fold(Block(logits), statistics)
        # An infinite logit is the sum, as torch has it; the difference from itself is no number.
        statistics.total.masked_fill_(statistics.top.isinf(), 1.0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, statistics.top, statistics.total)
        ctx.terms = terms
        return statistics.log_normaliser()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None]:
        (of_sum,) = upstream
        if of_sum is None:
            return None, None
        logits, top, total = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        if logits.numel():
            of_sum = of_sum.to(top.dtype).contiguous()
            factors = GradientFactors(of_sum, of_sum, torch.zeros_like(of_sum), of_sum)  # the others are not read
            statistics = RowStatistics(top, total, top, top)
            block_ops(ctx.terms, logits).write_gradient(Block(logits), statistics, factors, gradient)
        return gradient, None


def row_log_sum_exp(logits: Tensor, options: CrossEntropy) -> Tensor:
    """The logarithm of the sum of the exponentials of each row, differentiable once in the logits.

    Args:
        logits: (N, V), floating point.
        options: of which softcap and temperature count.

    Returns:
        (N,), float32 (float64 for float64 logits).

    Example:
        >>> row_log_sum_exp(torch.zeros(2, 4), CrossEntropy())
        tensor([1.3863, 1.3863])
    """
    plain = CrossEntropy(softcap=options.softcap, temperature=options.temperature)
    sums: Tensor = _RowLogSumExp.apply(logits, plain)  # type: ignore[no-untyped-call]
    return sums


def row_cross_entropy(logits: Tensor, target: Tensor, options: CrossEntropy) -> Tensor:
    """The cross entropy of each row, differentiable once in the logits.

    Args:
        logits: (N, V), floating point.
        target: (N,) int64 class indices, or (N, V) floating point distributions; no gradient flows to it.
        options: which cross entropy; nothing is reduced, whatever they say of it.

    Returns:
        (N,), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit together, or soft targets with an index to ignore.
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.

    Example:
        >>> logits, target = torch.eye(3, 4), torch.tensor([0, 3, -100])
        >>> plain = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        >>> row_cross_entropy(logits, target, CrossEntropy()).allclose(plain)
        True
    """
    options = replace(options, reduction="none")
    losses: Tensor = _RowCrossEntropy.apply(logits, target, options)  # type: ignore[no-untyped-call]
    return losses
