"""Statistics of rows of logits, each differentiable: one pass over the logits for all of them, one for the gradient.

A row's log-sum-exp, log-probabilities of given classes, entropy, expectation of a vector over the classes and largest
class are what losses of language models and policies are made of. `row_statistics_kernel.py` has the formulas.

`row_statistics` takes logits; `linear_row_statistics` takes a linear layer, and never holds all of its logits: the
first pass runs with the forward, and the second one when the gradients of the statistics are known, whatever the
program between them is. Logits that did not stay in memory are computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.kernels.cross_entropy.column_passes import ColumnPasses
from subtensors.kernels.cross_entropy.logits_block import Block, GradFlags, LinearHead, check_differentiated_once
from subtensors.kernels.cross_entropy.row_sums import (
    ClassMap,
    LogitStatistics,
    RowSums,
    StatisticsOptions,
    check_classes,
)
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard


class _StatisticsContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    sums: RowSums
    passes: ColumnPasses
    weight_grad_dtype: torch.dtype
    shard: VocabularyShard | None


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _StatisticsContext,
        logits: Tensor,
        scale: Tensor | None,
        sums: RowSums,
    ) -> LogitStatistics:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        check_classes(sums.targets, logits.shape[1])
        ctx.sums = sums
        sums.fold(Block(logits))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, *([] if scale is None else [scale]))
        return _result(ctx)

    @staticmethod
    def backward(ctx: _StatisticsContext, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_differentiated_once()
        if all(x is None for x in upstream):
            return (None,) * 3
        logits, *_ = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        ctx.sums.write_gradient(Block(logits), ctx.sums.factors(upstream), gradient)
        return gradient, _scale_grad(ctx, 1), None


class _LinearRowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _StatisticsContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        sums: RowSums,
        columns: int,
        kept: int,
        shard: VocabularyShard | None,
    ) -> LogitStatistics:
        ctx.sums, ctx.weight_grad_dtype, ctx.shard = sums, weight.dtype, shard
        weight_used = weight.detach().to(hidden.dtype)
        linear = _linear(ctx, hidden, weight_used, bias)
        check_classes(sums.targets, linear.classes)
        ctx.passes = ColumnPasses(linear, columns, kept)
        ctx.passes.fold(linear, sums.fold)
        sums.complete(shard)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight_used, bias, weight, scale)  # type: ignore[arg-type]  # None is fine
        return _result(ctx)

    @staticmethod
    def backward(ctx: _StatisticsContext, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_differentiated_once()
        if all(x is None for x in upstream):
            return (None,) * 8
        hidden, weight, bias, *_ = ctx.saved_tensors  # which checks that nothing was written to them since the forward
        linear = _linear(ctx, hidden, weight, bias)
        sums, factors = ctx.sums, ctx.sums.factors(upstream)
        gradients = ctx.passes.gradients(linear, lambda block, into: sums.write_gradient(block, factors, into))
        grad_hidden, grad_weight, grad_bias = gradients
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            _scale_grad(ctx, 3, ctx.shard),
            *(None,) * 4,
        )


def _linear(ctx: _StatisticsContext, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LinearHead:
    """Return the linear layer, in the dtype of the hidden states."""
    of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
    needs = GradFlags(of_hidden, of_weight, bias is not None and of_bias)
    bias = None if bias is None else bias.detach().to(hidden.dtype)
    return LinearHead(hidden.detach(), weight.detach(), bias, needs, ctx.weight_grad_dtype, ctx.shard)


def _scale_grad(ctx: _StatisticsContext, position: int, shard: VocabularyShard | None = None) -> Tensor | None:
    if not ctx.needs_input_grad[position]:
        return None
    gradient = ctx.sums.scale_grad.clone()
    return gradient if shard is None else shard.reduced(gradient, "SUM")


def _result(ctx: _StatisticsContext) -> LogitStatistics:
    statistics = ctx.sums.statistics()
    if statistics.argmax is not None:
        ctx.mark_non_differentiable(statistics.argmax)
    # A result that the node holds would be a cycle, and what the program writes to it would reach the backward.
    return statistics._replace(target_logits=statistics.target_logits.clone())


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    vector: Tensor | None = None,
    options: StatisticsOptions | None = None,
    scale: Tensor | None = None,
    class_map: ClassMap | None = None,
) -> LogitStatistics:
    """Return statistics of rows of logits, differentiable once in the logits and the scale.

    Args:
        logits: (N, V), floating point.
        targets: (T, N) int64, T classes of each row; T may be 0.
        vector: (V,), floating point, whose expectation is computed; no gradient flows to it.
        options: the transform of the logits, and what else to compute; None: neither.
        scale: (N,), see `RowSums`. It has a gradient unless the class map is scaled.
        class_map: of the logits; no gradient flows to it.

    Raises:
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.

    Example:
        >>> targets, options = torch.tensor([[0, 3]]), StatisticsOptions(entropy=True)
        >>> statistics = row_statistics(torch.zeros(2, 4), targets, options=options)
        >>> statistics.log_sum_exp, statistics.negative_entropy
        (tensor([1.3863, 1.3863]), tensor([-1.3863, -1.3863]))
    """
    sums = RowSums(options or StatisticsOptions(), targets, vector, logits, scale=scale, class_map=class_map)
    return LogitStatistics(*_RowStatistics.apply(logits, scale, sums))  # type: ignore[no-untyped-call]  # torch's


def linear_row_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vector: Tensor | None = None,
    *,
    options: StatisticsOptions | None = None,
    columns: int,
    kept: int = 0,
    shard: VocabularyShard | None = None,
    scale: Tensor | None = None,
    class_map: ClassMap | None = None,
) -> LogitStatistics:
    """Return statistics of the logits `hidden @ weight.T + bias`, differentiable once in these and the scale.

    Args:
        hidden: (N, H), floating point.
        weight: (V, H), of the same dtype, or float32 where hidden has 16 bits: then its gradient is float32.
        bias: (V,), or None.
        targets: (T, N) int64, T classes of each row; T may be 0.
        vector: (V,), floating point, whose expectation is computed; no gradient flows to it.
        options: the transform of the logits, and what else to compute; None: neither.
        columns: of the logits in memory at once.
        kept: further columns of the logits that are kept from the forward to the backward, rather than computed again.
        shard: the classes of weight and bias, where other processes have more; None: all.
        scale, class_map: see `row_statistics`; of all classes.

    Raises:
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.

    Example:
        >>> hidden, weight = torch.eye(3), torch.eye(4, 3).requires_grad_()
        >>> targets = torch.tensor([[0, 1, 3]])
        >>> found = linear_row_statistics(hidden, weight, None, targets, columns=2).log_probabilities
        >>> found.allclose((hidden @ weight.T).log_softmax(1).gather(1, targets.t()).t())
        True
        >>> found.sum().backward()
        >>> weight.grad.shape
        torch.Size([4, 3])
    """
    sums = RowSums(options or StatisticsOptions(), targets, vector, hidden, scale=scale, class_map=class_map)
    operands = hidden, weight, bias, scale, sums, columns, kept, shard
    return LogitStatistics(*_LinearRowStatistics.apply(*operands))  # type: ignore[no-untyped-call]  # torch's
