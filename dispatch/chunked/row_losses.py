"""Per-row losses of chunked logits as one op a chunk, for logits that are not matched as a linear layer.

A chunk's logits stay in the dtype of their product, and are read once for the losses and once for their gradient
(`kernels/cross_entropy/row_cross_entropy.py`). Ops on the losses (weights, masks, a sum) are recorded as usual, so the
incoming gradient scales the gradient of the logits before that enters any product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize, constant, emit, recording
from subtensors.dispatch.chunked.match_logits import TransformedLogits, match_transforms
from subtensors.dispatch.chunked.record import record, sliced
from subtensors.dispatch.chunked.rules.losses import reduce_losses
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.row_cross_entropy import row_cross_entropy, row_log_sum_exp
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """Compute the loss of each row of a chunk, (n,)."""
    options = CrossEntropy(ignore_index, class_weight, label_smoothing, 0.0, softcap, temperature, "none")
    return row_cross_entropy(logits, target, options)


def log_sum_exp(logits: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """Compute the log-sum-exp over the last dim of a chunk: (..., V) -> (...)."""
    options = CrossEntropy(softcap=softcap, temperature=temperature)
    return row_log_sum_exp(logits.flatten(0, -2), options).view(logits.shape[:-1])


def log_probabilities(logits: Tensor, index: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """Compute the log-softmax of a chunk's logits at one class a row: (..., V) and (..., 1) -> (..., 1)."""
    options = CrossEntropy(NEVER_IGNORED, softcap=softcap, temperature=temperature)
    return -row_cross_entropy(logits.flatten(0, -2), index.flatten(), options).view(index.shape)


NEVER_IGNORED = -(2**62)
"""An ignored class index that no target holds."""

ROW_OPS = frozenset({cross_entropy, log_sum_exp, log_probabilities})
"""Ops with kernels of their own, which torch.compile must not trace."""


def record_log_sum_exp(logits: LazyValue, dim: int, grad: bool) -> LazyValue | None:
    """Record the log-sum-exp of the classes.

    Args:
        logits: (..., V), chunked along another dim than the last.
        dim: the dim that is summed over.
        grad: whether it is differentiable.

    Returns:
        (...), chunked, in the dtype of the logits; None where the kernels don't take them.
    """
    layout = logits.layout
    if not _has_rows(logits) or layout is None or dim % logits.ndim != logits.ndim - 1:
        return None
    transforms, rows = _untransformed_rows(logits)
    with recording(grad and logits.needs_grad):
        meta = torch.empty(logits.shape[:-1], dtype=arithmetic_dtype(rows.dtype), device="meta")
        sums = emit(log_sum_exp, (rows, transforms.softcap, transforms.temperature), {}, meta, [layout], layout.axis)
        return cast(sums, logits.dtype)


def record_log_probabilities(scores: LazyValue, dim: int, index: Tensor | LazyValue, grad: bool) -> LazyValue | None:
    """Record one log-probability a row.

    Args:
        scores: (..., V), chunked along another dim than the last.
        dim: the dim of the classes.
        index: (..., 1), the class of each row.
        grad: whether it is differentiable.

    Returns:
        (..., 1), chunked, in the dtype of the scores; None where those are no log-softmax.
    """
    logits, layout = _log_softmax_input(scores), scores.layout
    index = constant(index) if isinstance(index, Tensor) else index
    if logits is None or layout is None or dim % scores.ndim != scores.ndim - 1:
        return None
    if index.shape != (*scores.shape[:-1], 1) or index.device != scores.device:
        return None
    transforms, rows = _untransformed_rows(logits)
    with recording(grad and scores.needs_grad):
        meta = torch.empty(index.shape, dtype=arithmetic_dtype(rows.dtype), device="meta")
        operands = (rows, sliced(index, layout), transforms.softcap, transforms.temperature)
        return cast(emit(log_probabilities, operands, {}, meta, [layout], layout.axis), scores.dtype)


def log_softmax_input(scores: LazyValue) -> LazyValue:
    """Return the logits where scores are a log-softmax over the last dim; otherwise the scores."""
    return _log_softmax_input(scores) or scores


def _log_softmax_input(scores: LazyValue) -> LazyValue | None:
    node = scores.node
    if node is None or scores.tensor is not None or node.op is not aten._log_softmax.default:
        return None
    logits, dim = node.args[0], node.args[1]
    if not isinstance(logits, LazyValue) or dim % logits.ndim != logits.ndim - 1 or not _has_rows(logits):
        return None
    return logits


def _has_rows(logits: LazyValue) -> bool:
    """Return whether logits are rows of classes, chunked along another dim than the classes."""
    sized = logits.ndim >= 2 and logits.shape[-1] > 0 and logits.dtype.is_floating_point
    return sized and logits.layout is not None and logits.layout.dim != logits.ndim - 1


def record_cross_entropy(
    logits: LazyValue,
    target: Tensor | LazyValue,
    *,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dtype: torch.dtype,
    grad: bool,
) -> LazyValue | None:
    """Record a cross entropy.

    Args:
        logits: (N, V), chunked along N.
        target: (N,) class indices, or (N, V) distributions.
        class_weight, ignore_index, reduction, label_smoothing: as `torch.nn.functional.cross_entropy` has them.
        dtype: of the result.
        grad: whether it is differentiable.

    Returns:
        a value: (N,), chunked, or a number; None where the kernels don't take these arguments, or torch refuses them.
    """
    layout = logits.layout
    target = constant(target) if isinstance(target, Tensor) else target
    if layout is None or logits.ndim != 2 or layout.dim != 0 or not logits.shape[1] or target.needs_grad:
        return None
    has_class_targets = target.shape == logits.shape[:1] and target.dtype == torch.int64
    has_soft_targets = target.shape == logits.shape and target.dtype.is_floating_point and ignore_index < 0
    if not (has_class_targets or has_soft_targets) or target.device != logits.device or not 0 <= label_smoothing <= 1:
        return None
    weight = None if class_weight is None else constant(class_weight)
    if weight is not None and (weight.needs_grad or weight.shape != logits.shape[1:]):
        return None
    transforms, rows = _untransformed_rows(logits)
    wide = arithmetic_dtype(rows.dtype)
    with recording(grad and logits.needs_grad):
        losses = emit(
            cross_entropy,
            (
                rows,
                sliced(target, layout),
                weight,
                ignore_index,
                label_smoothing,
                transforms.softcap,
                transforms.temperature,
            ),
            {},
            torch.empty(logits.shape[0], dtype=wide, device="meta"),
            [layout],
            layout.axis,
        )
        if reduction == "none":
            return cast(losses, dtype)
        if has_soft_targets:
            out: LazyValue = record(aten.sum.default if reduction == "sum" else aten.mean.default, losses)
            return cast(out, dtype)
        loss, _ = reduce_losses(losses, target, weight, ignore_index, reduction == "mean", wide)
        return cast(loss, dtype)


def _untransformed_rows(logits: LazyValue) -> tuple[TransformedLogits, LazyValue]:
    """Return the transforms of logits and the rows before them; without a match, no transforms and the logits."""
    transforms = match_transforms(logits)
    try:
        with recording(logits.needs_grad):
            rows = transforms.rows()
    except NeedsMaterialize:
        return TransformedLogits(logits), logits
    a, b = rows.layout, logits.layout
    is_aligned = a is not None and b is not None and a.dim == b.dim and a.aligns_with(b)
    if not is_aligned or logits.dtype == torch.float64 != rows.dtype:
        return TransformedLogits(logits), logits
    return transforms, rows
