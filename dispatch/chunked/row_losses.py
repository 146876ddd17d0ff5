"""Per-row losses of chunked logits as one op a chunk, for logits that are not matched as a linear layer.

A chunk's logits stay in the dtype of their product, and are read once for the losses and once for their gradient
(`kernels/cross_entropy/row_cross_entropy.py`). Ops on the losses (weights, masks, a sum) are recorded as usual, so the
incoming gradient scales the gradient of the logits before that enters any product.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, emit, recording
from subtensors.dispatch.chunked.match_logits import carries_gradient, match_linear_logits, match_transforms
from subtensors.dispatch.chunked.record import record, sliced
from subtensors.dispatch.chunked.row_statistics import (
    has_rows,
    has_statistics,
    record_statistic,
    untransformed_rows,
)
from subtensors.dispatch.chunked.rules.losses import reduce_losses
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.dispatch.chunked.sharded_head import is_sharded
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.row_cross_entropy import row_cross_entropy
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


def cross_entropy(logits: Tensor, target: Tensor, class_weight: Tensor | None, options: CrossEntropy) -> Tensor:
    """Compute the loss of each row of a chunk, (n,)."""
    return row_cross_entropy(logits, target, replace(options, class_weight=class_weight))


def log_softmax_input(scores: LazyValue) -> LazyValue:
    """Return the logits where scores are a log-softmax over the last dim; otherwise the scores."""
    node = scores.node
    if node is None or scores.tensor is not None or node.op is not aten._log_softmax.default:
        return scores
    logits, dim = node.args[0], node.args[1]
    if not isinstance(logits, LazyValue) or dim % logits.ndim != logits.ndim - 1 or not has_rows(logits):
        return scores
    return logits if carries_gradient(scores, [logits]) else scores


def record_cross_entropy(
    logits: LazyValue,
    target: LazyValue,
    weight: LazyValue | None,
    options: CrossEntropy,
    dtype: torch.dtype,
    grad: bool,
) -> LazyValue:
    """Record a cross entropy.

    Args:
        logits: (N, V), chunked along N, which `takes_targets` accepts with the target.
        target: (N,) class indices, or (N, V) distributions.
        weight: (V,) class weights, or None.
        options: of the cross entropy.
        dtype: of the result.
        grad: whether it is differentiable.

    Returns:
        a value: (N,), chunked, or a number.
    """
    layout = logits.row_layout
    wide = arithmetic_dtype(logits.dtype)
    is_statistic = target.ndim == 1 and weight is None and not options.label_smoothing
    # Where statistics of the same logits are recorded, the losses are one more: there is one gradient of the logits.
    # Those of logits with temperatures or masks of their own are statistics, too.
    is_mapped = is_statistic and match_transforms(logits, maps=True).maps
    if is_mapped or (is_statistic and (_is_sharded_layer(logits) or has_statistics(logits))):
        with recording(grad and logits.needs_grad):
            found = _losses_by_statistics(logits, target, options.ignore_index)
            if found is not None:
                return _reduced(found, target, weight, options, dtype, wide)
    # Targets in the padding are ignored; but each loss brings a gradient of its own, which may be NaN there.
    transforms, rows = untransformed_rows(logits, through_padding=options.reduction != "none")
    wide = arithmetic_dtype(rows.dtype)
    with recording(grad and logits.needs_grad):
        meta = torch.empty(logits.shape[0], dtype=wide, device="meta")
        row_options = transforms.applied_to(replace(options, class_weight=None, reduction="none"))
        operands = rows, sliced(target, layout), weight, row_options
        losses = emit(cross_entropy, operands, {}, meta, [layout])
        return _reduced(losses, target, weight, options, dtype, wide)


def _reduced(
    losses: LazyValue,
    target: LazyValue,
    weight: LazyValue | None,
    options: CrossEntropy,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> LazyValue:
    """Record the reduction of the losses of rows, (N,)."""
    if options.reduction == "none":
        return cast(losses, dtype)
    if target.ndim == 2:
        out: LazyValue = record(aten.sum.default if options.reduction == "sum" else aten.mean.default, losses)
        return cast(out, dtype)
    loss, _ = reduce_losses(losses, target, weight, options.ignore_index, options.reduction == "mean", wide)
    return cast(loss, dtype)


def _is_sharded_layer(logits: LazyValue) -> bool:
    found = match_linear_logits(logits, maps=True)
    return found is not None and is_sharded(found.head_weight)


def _losses_by_statistics(logits: LazyValue, target: LazyValue, ignore_index: int) -> LazyValue | None:
    """Record the losses of class targets as negative log-probabilities, with which a sharded head needs no gather."""
    valid = record(aten.ne.Scalar, target, ignore_index)
    classes = record(aten.unsqueeze.default, record(aten.where.ScalarOther, valid, target, 0), -1)
    found = record_statistic(logits, "log_probability", classes)
    if found is None:
        return None
    losses = record(aten.neg.default, record(aten.squeeze.dim, found, -1))
    out: LazyValue = record(aten.where.ScalarOther, valid, losses, 0)
    return out
