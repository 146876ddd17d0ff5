"""The cross entropy of a linear layer by its kernels: within which limits, by which plan, with which options.

The plan is the cost model's choice for the sizes of the loss and the limits that a user set. Row statistics of a linear
layer (`lower_statistics.py`) are planned here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from subtensors.dispatch.chunked.cost_model import (
    ChunkPlan,
    LossShape,
    device_rates,
    plan_linear_cross_entropy,
    plan_row_statistics,
)
from subtensors.dispatch.chunked.lazy_graph import LazyValue, is_autocast, without_ambient_modes
from subtensors.dispatch.chunked.match_logits import MASTER_DTYPE
from subtensors.dispatch.chunked.row_layout import RowLayout, check_limit
from subtensors.dispatch.chunked.row_statistics import has_rows
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.kernels.cross_entropy.cross_entropy import REDUCTIONS, CrossEntropy
from subtensors.kernels.cross_entropy.cross_entropy_autograd import differentiable_cross_entropy
from subtensors.kernels.cross_entropy.exp_passes import takes_exponentials
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard


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
        given = [
            (field, getattr(self.options, field.name)) for field in fields(self.options) if field.name != "reduction"
        ]
        changed = [(field.name, x) for field, x in given if isinstance(x, Tensor) or x != field.default]
        shape, part = self.shape, " of its own" * self.shape.is_shard
        return (
            f"linear + cross entropy of {shape.rows} rows, {shape.width} wide, {shape.classes} classes{part}\n"
            f"  {self.chunks}\n"
            f"  reduction {self.options.reduction}{''.join(f', {name} {value}' for name, value in changed)}"
        )


def takes_targets(logits: LazyValue, target: LazyValue, weight: LazyValue | None, options: CrossEntropy) -> bool:
    """Return whether the kernels take the cross entropy of logits (N, V), chunked along N.

    Args:
        logits: the logits.
        target: (N,) class indices or (N, V) distributions; anything else is left to torch.
        weight: (V,) class weights, or None.
        options: of the cross entropy.
    """
    if logits.ndim != 2 or not has_rows(logits):
        return False
    is_distribution = target.shape == logits.shape and target.dtype.is_floating_point and options.ignore_index < 0
    if not is_distribution and (target.shape != logits.shape[:1] or target.dtype is not torch.int64):
        return False
    if weight is not None and (weight.needs_grad or weight.shape != logits.shape[1:]):
        return False
    return target.device == logits.device and not target.needs_grad


def takes_linear(rows: LazyValue, weight: LazyValue, target: Tensor, options: CrossEntropy, dtype: torch.dtype) -> bool:
    """Return whether the kernels take the cross entropy of a linear layer of rows (N, H) that nothing else has read."""
    hidden = rows.tensor
    if hidden is None or options.reduction == "none" or not weight.like.shape[0] or target.device != rows.device:
        return False
    if target.dtype is not torch.int64 or target.shape != hidden.shape[:1] or not hidden.shape[0]:
        return False
    return not (dtype is torch.float64 is not hidden.dtype)  # the kernels would compute in a narrower dtype


def linear_cross_entropy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: CrossEntropy,
    layout: RowLayout,
    needs_grad: bool,
    dtype: torch.dtype,
    shard: VocabularyShard | None = None,
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
        shard: the classes of weight and bias, where other processes have more; None: all.

    Returns:
        a number; None where the dtypes don't fit together.
    """
    if weight.dtype is not hidden.dtype and weight.dtype is not MASTER_DTYPE.get(hidden.dtype):
        return None
    if bias is not None and bias.dtype != hidden.dtype:
        return None
    with without_ambient_modes(needs_grad):
        may_have = needs_grad and shard is None and hidden.is_cuda
        exponentials = may_have and takes_exponentials(hidden, weight, bias, target, options)
        needs = needs_grad and hidden.requires_grad, needs_grad and weight.requires_grad
        sizes = *hidden.shape, weight.shape[0]
        shape = loss_shape(sizes, hidden.dtype, weight.dtype, needs, layout, shard is not None, exponentials)
        chunks = chunk_plan(shape, layout, hidden.device)
        loss = differentiable_cross_entropy(
            hidden, weight, target, bias, options=options, schedule=chunks.schedule, shard=shard
        )
        if loss.grad_fn is not None:
            vars(loss.grad_fn)["plan"] = LoweredPlan(shape, chunks, options)  # for `explain`
        return layout.axis.with_backward_hooks(loss).to(dtype)


def loss_dtype(logits: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of a cross entropy of logits: theirs, or float32 under autocast."""
    return torch.float32 if logits.itemsize == 2 and is_autocast(device) else logits


def cross_entropy_options(
    class_weight: object, ignore_index: int, label_smoothing: float, reduction: str
) -> CrossEntropy | None:
    """Return the options of a cross entropy; None for those that torch refuses, and weights with rules of their own."""
    if reduction not in REDUCTIONS or not 0 <= label_smoothing <= 1:
        return None
    if class_weight is None:
        return _options(ignore_index, None, label_smoothing, 0.0, None, 1.0, reduction)
    if not isinstance(class_weight, Tensor) or type(class_weight) in LAZY_TYPES:
        return None
    return CrossEntropy(ignore_index, class_weight, label_smoothing, reduction=reduction)


_options = functools.lru_cache(maxsize=256)(CrossEntropy)


def chunk_plan(shape: LossShape, layout: RowLayout, device: torch.device) -> ChunkPlan:
    """Return the schedule of a loss: that of the policy, or the choice of the cost model.

    Args:
        shape: of the loss.
        layout: of the logits, with the limits that the user set.
        device: its free memory is the limit where the user set none.

    Raises:
        ValueError: the limit that the user set can't be met.
    """
    policy = layout.axis.policy
    accumulate: Accumulate = "exact" if policy.exact else "fast"
    plan = plan_linear_cross_entropy(
        shape, accumulate=accumulate, rates=device_rates(device), **_limits(layout, device)
    )
    check_limit(policy.memory_limit, plan.bytes)
    return plan


def statistics_plan(shape: LossShape, layout: RowLayout, device: torch.device) -> ChunkPlan | None:
    """Return the schedule of row statistics, by columns; None where none fits the limits. Arguments as `chunk_plan`."""
    return plan_row_statistics(shape, rates=device_rates(device), **_limits(layout, device))


def _limits(layout: RowLayout, device: torch.device) -> dict[str, int | None]:
    """Return the user's limits: rows of the logits in a chunk, bytes, or the free memory where none is set."""
    policy, size = layout.axis.policy, layout.axis.size
    if policy.rows is not None or policy.chunks is not None:
        rows = layout.size_in((0, min(size, layout.axis.rows(lambda limit: size))))
        return {"rows": max(1, rows), "memory_limit": policy.memory_limit}
    if policy.memory_limit is not None or device.type != "cuda":
        return {"memory_limit": policy.memory_limit}
    return {"free_bytes": _rounded_down(torch.cuda.mem_get_info(device)[0])}


def _rounded_down(free: int) -> int:
    """Round free memory down to a sixteenth, so that allocations of other processes don't change the plan."""
    step = 1 << max(0, free.bit_length() - 5)
    return free // step * step


def loss_shape(
    sizes: Sequence[int],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    needs: tuple[bool, bool],
    layout: RowLayout,
    is_shard: bool,
    exponentials: bool = False,
) -> LossShape:
    """Return the sizes that the cost of a loss depends on.

    Args:
        sizes: N, H, V.
        dtype, weight_dtype: of the hidden states, and of the weight whose gradient is computed.
        needs: whether the gradients of both are needed.
        layout: of the logits, whose policy says in which of these dtypes the weight's gradient is.
        is_shard: whether other processes have more classes.
        exponentials: see `takes_exponentials`.
    """
    summed = weight_dtype if layout.axis.policy.exact else dtype
    return _shape(*sizes, dtype.itemsize, summed.itemsize, *needs, is_shard, exponentials)


_shape = functools.lru_cache(maxsize=256)(LossShape)
