"""Losses with a reduction: the loss of each element or sample, then the sum or mean over all chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, constant, emit, known_tensor, replicated
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record, sliced
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.chunked.rules.reductions import cast, sum_over_rows
from subtensors.dispatch.ops import sample_dims
from subtensors.dispatch.ops.sample_dims import MEAN, NONE
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@RULES.register(sample_dims.loss, across=True)
def elementwise(call: ChunkedCall, reduction: int) -> PyTree:
    """Record the loss of each element of broadcast operands, and its reduction."""
    losses = record(call.op, **{**call.arguments, "reduction": NONE})
    dims = list(range(losses.ndim))
    if reduction == MEAN:
        return record(aten.mean.dim, losses, dims)
    return sum_over_rows(losses, dims, False, losses.dtype)


@RULES.register(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: ChunkedCall) -> PyTree:
    """Record -weight[target] * x[target], with the mean over the weights of the valid targets of all chunks."""
    log_probs, target, weight = call["self"], call["target"], call["weight"]
    reduction = call["reduction"]
    call.replace("reduction", NONE)
    metas = call.infer()
    layout: RowLayout | None = log_probs.layout
    if layout is not None and layout.dim == 1 and log_probs.ndim == 2 and target.layout is None:
        return _nll_of_chunked_classes(call, reduction)
    if layout is None or layout.dim == 1 or log_probs.ndim == 1:
        raise call.unchunkable("the classes are chunked, or only the targets")
    rows = layout.with_dim(max(layout.dim - 1, 0))
    losses, nothing = call.emit(
        [rows, None],
        lambda v: v if v is log_probs else sliced(v, rows) if v is target else replicated(v),
        metas=metas,
    )
    if reduction == NONE:
        return losses, constant(torch.zeros((), dtype=nothing.dtype, device=log_probs.device))
    return reduce_losses(losses, target, weight, call["ignore_index"], reduction == MEAN, log_probs.dtype)


def reduce_losses(
    losses: LazyValue, target: LazyValue, weight: LazyValue | None, ignored: int, mean: bool, dtype: torch.dtype
) -> tuple[LazyValue, LazyValue]:
    """Return the sum of losses of class targets, or their weighted mean, and the sum of the weights."""
    summed = sum_over_rows(losses, list(range(losses.ndim)), False, arithmetic_dtype(dtype))
    weights = _total_weight(target, weight, ignored, arithmetic_dtype(dtype), losses.device)
    out = record(aten.div.Tensor, summed, weights) if mean else summed
    return cast(out, dtype), cast(weights, dtype)


def _nll_of_chunked_classes(call: ChunkedCall, reduction: int) -> PyTree:
    """Record the loss where the classes are chunked: each sample's target is in one chunk."""
    log_probs, target, weight = call["self"], call["target"], call["weight"]
    dtype, ignored = log_probs.dtype, call["ignore_index"]
    valid = record(aten.ne.Scalar, target, ignored)
    classes = record(aten.where.ScalarOther, valid, target, 0)
    samples = torch.arange(log_probs.shape[0], device=log_probs.device)
    losses = record(aten.neg.default, record(aten.index.Tensor, log_probs, [constant(samples), classes]))
    if weight is not None:
        losses = record(aten.mul.Tensor, losses, record(aten.index.Tensor, weight, [classes]))
    losses = record(aten.where.ScalarOther, valid, losses, 0)
    weights = _total_weight(target, weight, ignored, arithmetic_dtype(dtype), log_probs.device)
    if reduction == NONE:
        return losses, cast(weights, dtype)
    summed = record(aten.sum.default, cast(losses, arithmetic_dtype(dtype)))
    out = record(aten.div.Tensor, summed, weights) if reduction == MEAN else summed
    return cast(out, dtype), cast(weights, dtype)


def _total_weight(
    target: LazyValue, weight: LazyValue | None, ignored: int, dtype: torch.dtype, device: torch.device
) -> LazyValue:
    """Return the sum of the weights of all targets that are not ignored."""

    def summed(target: Tensor, weight: Tensor | None) -> Tensor:
        valid = target != ignored
        if weight is None:
            return valid.sum(dtype=dtype)
        return torch.where(valid, weight[torch.where(valid, target, 0).clamp(0, weight.numel() - 1)], 0).sum(
            dtype=dtype
        )

    if target.layout is None and (tensor := known_tensor(target)) is not None:
        weights = None if weight is None else known_tensor(weight)
        if weight is None or (weights is not None and not weights.requires_grad):
            return constant(summed(tensor, weights))
    meta = torch.empty((), dtype=dtype, device="meta")
    operands = replicated(target), weight if weight is None else replicated(weight)
    total: LazyValue = emit(summed, operands, {}, meta)
    return total
