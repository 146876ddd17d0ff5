"""Cross entropy of each row of given logits, which are read once for it and once for the gradient.

This is the part of `linear_cross_entropy` between its products, for logits that come from elsewhere and for losses a
row. Between forward and backward it keeps the logits in their own dtype, and a few numbers a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, RowLoss
from subtensors.kernels.cross_entropy.linear_cross_entropy import LossPasses
from subtensors.kernels.cross_entropy.logits_block import Block, check_differentiated_once, uses_kernels
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype


class _RowLossContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor]
    passes: LossPasses


class _RowCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowLossContext, logits: Tensor, target: Tensor, options: CrossEntropy) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        compute = arithmetic_dtype(logits.dtype)
        row_loss = RowLoss(options, target, logits.shape[1], compute, uses_kernels(logits))
        passes = ctx.passes = LossPasses(row_loss, logits.device, uses_kernels(logits))
        passes.sums.fold(Block(logits))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return row_loss.loss(passes.statistics)

    @staticmethod
    def backward(ctx: _RowLossContext, *upstream: Tensor | None) -> tuple[Tensor | None, None, None]:
        check_differentiated_once()
        (grad_loss,) = upstream
        if grad_loss is None:
            return None, None, None
        (logits,), passes = ctx.saved_tensors, ctx.passes
        gradient = torch.empty_like(logits)
        factors = passes.factors(passes.row_loss.gradient_factors(grad_loss))
        passes.sums.write_gradient(Block(logits), factors, gradient)
        return gradient, None, None


def row_cross_entropy(logits: Tensor, target: Tensor, options: CrossEntropy) -> Tensor:
    """Return the cross entropy of each row, differentiable once in the logits.

    Args:
        logits: (N, V), floating point.
        target: (N,) int64 class indices, or (N, V) floating point distributions; no gradient flows to it.
        options: of the cross entropy; its reduction is taken to be "none".

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
