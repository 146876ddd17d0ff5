"""Lowering of the cross entropy of a linear layer of an input to its kernels.

Where `match_linear_logits` finds a linear layer, `kernels/cross_entropy/linear_cross_entropy.py` computes loss and
gradients in three products a chunk, the gradient of the logits written over the logits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from subtensors.dispatch.chunked.cost_model import ChunkPlan, LossShape
from subtensors.dispatch.chunked.evaluation import evaluate, input_tensor
from subtensors.dispatch.chunked.lazy_graph import (
    LazyValue,
    is_autocast,
    known_tensor,
    recording,
    without_ambient_modes,
)
from subtensors.dispatch.chunked.match_logits import (
    MASTER_DTYPE,
    master_weight,
    match_linear_logits,
    transposed_weight,
)
from subtensors.dispatch.chunked.plan import chunk_plan, loss_shape, requested_rows
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.cross_entropy_autograd import differentiable_cross_entropy


@dataclass(frozen=True)
class LoweredPlan:
    """The plan of a cross entropy that kernels compute.

    Args:
        shape: the sizes of the problem.
        chunks: the schedule, and its expected cost.
        options: the options of the cross entropy.
    """

    shape: LossShape
    chunks: ChunkPlan
    options: CrossEntropy

    def describe(self) -> str:
        """Describe the plan in lines."""
        changed = [
            (field.name, value)
            for field in fields(self.options)
            if field.name != "reduction" and not _equal(value := getattr(self.options, field.name), field.default)
        ]
        shape = self.shape
        return (
            f"linear + cross entropy of {shape.rows} rows, {shape.width} wide, {shape.classes} classes\n"
            f"  {self.chunks}\n"
            f"  reduction {self.options.reduction}{''.join(f', {name} {value}' for name, value in changed)}"
        )


def _equal(value: object, default: object) -> bool:
    return not isinstance(value, Tensor) and bool(value == default)


def cross_entropy_of_linear(
    rows: LazyValue,
    weight: LazyValue,
    bias: LazyValue | None,
    target: Tensor,
    *,
    dtype: torch.dtype,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    grad: bool,
) -> Tensor | None:
    """Return the cross entropy of a linear layer that nothing else has read, without class weights.

    Args:
        rows: (N, H), an input of the region.
        weight: (V, H), a constant.
        bias: (V,), a constant, or None.
        target: (N,) class indices, plain.
        dtype: of the logits.
        ignore_index, reduction, label_smoothing: as in `torch.nn.functional.cross_entropy`.
        grad: whether the result requires grad.

    Returns:
        a number; None where `lowered_cross_entropy` has to decide.
    """
    layout = rows.layout
    if layout is None or layout.dim != 0 or rows.tensor is None or reduction == "none":
        return None
    hidden, weights = known_tensor(rows), known_tensor(weight)
    biases = None if bias is None else known_tensor(bias)
    assert hidden is not None
    assert weights is not None
    if target.dtype is not torch.int64 or target.shape != hidden.shape[:1]:
        return None
    if not hidden.shape[0] or not weights.shape[0]:
        return None
    if dtype is torch.float64 is not hidden.dtype:
        return None  # the kernels compute in a narrower dtype than was requested
    options = cross_entropy_options(None, ignore_index, label_smoothing, None, 1.0, reduction)
    result_dtype = loss_dtype(dtype, rows.device.type)
    return linear_cross_entropy_loss(hidden, weights, biases, target, options, layout, grad, result_dtype)


def lowered_cross_entropy(
    logits: LazyValue,
    target: Tensor,
    *,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    grad: bool,
) -> Tensor | None:
    """Compute the cross entropy of chunked logits by the kernels.

    Args:
        logits: (N, V), chunked along N.
        target: (N,) class indices, or (N, V) distributions, plain.
        class_weight, ignore_index, reduction, label_smoothing: as in `torch.nn.functional.cross_entropy`.
        grad: whether gradients are recorded.

    Returns:
        a number; None where the logits are no linear layer of an input, or the kernels don't take the options.
    """
    layout = logits.layout
    if layout is None or logits.ndim != 2 or layout.dim != 0 or reduction not in ("mean", "sum"):
        return None
    has_class_targets = target.shape == logits.shape[:1] and target.dtype == torch.int64
    has_soft_targets = target.shape == logits.shape and target.is_floating_point() and ignore_index < 0
    if not (has_class_targets or has_soft_targets) or not logits.shape[0] or not logits.shape[1]:
        return None
    if any(x is not None and x.requires_grad for x in (class_weight, target)):
        return None
    found = match_linear_logits(logits)
    if found is None:
        return None
    needs_grad = grad and logits.needs_grad
    dtype = loss_dtype(logits.dtype, logits.device.type)
    with recording(needs_grad), torch.set_grad_enabled(needs_grad):
        hidden = found.rows_of(input_tensor(found.hidden))
        weight = evaluate(master_weight(transposed_weight(found.weight), hidden.dtype))
        bias = None if found.bias is None else evaluate(found.bias)
    if logits.dtype == torch.float64 != hidden.dtype:
        return None  # the kernels compute in a narrower dtype than was requested
    transforms = found.transforms
    options = cross_entropy_options(
        class_weight, ignore_index, label_smoothing, transforms.softcap, transforms.temperature, reduction
    )
    return linear_cross_entropy_loss(hidden, weight, bias, target, options, layout, needs_grad, dtype)


def linear_cross_entropy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: CrossEntropy,
    layout: RowLayout,
    needs_grad: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """Compute the cross entropy of a linear layer by the kernels.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,), or None.
        target: (N,) class indices, or (N, V) distributions.
        options: the options of the cross entropy.
        layout: of the logits.
        needs_grad: whether the result requires grad.
        dtype: of the result.

    Returns:
        a number; None where the dtypes don't fit together.
    """
    if weight.dtype is not hidden.dtype and weight.dtype is not MASTER_DTYPE.get(hidden.dtype):
        return None
    if bias is not None and bias.dtype != hidden.dtype:
        return None
    axis, policy = layout.axis, layout.axis.policy
    shape = loss_shape(hidden, weight, needs_grad, policy.exact)
    chunks = chunk_plan(shape, policy, requested_rows(layout), hidden.device)
    with without_ambient_modes(needs_grad):
        loss = differentiable_cross_entropy(hidden, weight, target, bias, options=options, schedule=chunks.schedule)
        if loss.grad_fn is not None:
            vars(loss.grad_fn)["plan"] = LoweredPlan(shape, chunks, options)  # for `explain`
        return axis.with_backward_hooks(loss).to(dtype)


def loss_dtype(logits: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of a cross entropy of logits: theirs, or float32 under autocast."""
    return torch.float32 if logits.itemsize == 2 and is_autocast(device) else logits


def cross_entropy_options(
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    temperature: float,
    reduction: str,
) -> CrossEntropy:
    """Return the options of a cross entropy; cached, since each step of a training run needs the same."""
    if class_weight is None:
        return _options(ignore_index, None, label_smoothing, 0.0, softcap, temperature, reduction)
    return CrossEntropy(ignore_index, class_weight, label_smoothing, 0.0, softcap, temperature, reduction)


_options = functools.lru_cache(maxsize=256)(CrossEntropy)


def describe_expected_loss(logits: LazyValue) -> str | None:
    """Describe the cost of a cross entropy of these logits in a line; None where the kernels don't compute it."""
    found = match_linear_logits(logits) if logits.layout is not None and logits.ndim == 2 else None
    if found is None or logits.layout is None:
        return None
    (count, classes), hidden, weight = logits.shape, found.hidden, found.weight
    needs = (logits.needs_grad and hidden.needs_grad, logits.needs_grad and weight.needs_grad)
    summed = hidden.dtype
    if logits.layout.axis.policy.exact:
        summed = master_weight(transposed_weight(weight), hidden.dtype).dtype
    shape = LossShape(count, hidden.shape[1], classes, hidden.dtype.itemsize, summed.itemsize, *needs)
    chunks = chunk_plan(shape, logits.layout.axis.policy, requested_rows(logits.layout), logits.device)
    return f"their cross entropy would take {chunks}"
