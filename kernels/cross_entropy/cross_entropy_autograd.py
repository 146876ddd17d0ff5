"""`linear_cross_entropy` as a differentiable function: gradients are computed with the forward, for an upstream of one.

The upstream gradient of a loss is a number that is known only at backward, where the saved gradients are multiplied by
it in place: they are returned once, and a second backward through a retained graph computes them again. On a GPU the
multiplication reads the number on the device and does nothing where it is one.

Two cases compute their gradients at backward instead, from the upstream gradient, for one GEMM more: reduction "none",
whose upstream is a vector; and float16, in which the gradient of a mean over N rows would underflow before a loss scale
could save it.

A float32 weight of 16-bit hidden states, as under autocast, is multiplied in their dtype and gets its exact gradient in
float32: summed in the gradient's memory, and never rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate, linear_cross_entropy
from subtensors.kernels.cross_entropy.logits_block import LossAndGradients, check_differentiated_once, scale_
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard


class Schedule(NamedTuple):
    """The part of the logits in memory at once, and how the weight's gradient is accumulated.

    Args:
        rows: the rows of a chunk.
        columns: the columns of a block, for the schedule by columns.
        kept: the number of further columns whose logits have memory between the two passes over columns.
        accumulate: "exact", or "fast": in the gradient's own dtype.
    """

    rows: int | None = None
    columns: int | None = None
    kept: int = 0
    accumulate: Accumulate = "exact"


class _LinearLossContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    compute: Callable[..., LossAndGradients]
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] | None


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd node. It is made after the computation was launched, so that the GPU need not wait for it."""

    @staticmethod
    def forward(
        ctx: _LinearLossContext,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        compute: Callable[..., LossAndGradients],
        computed: LossAndGradients,
        is_deferred: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        # The weights of the classes, so that a write to them is seen.
        ctx.save_for_backward(hidden, weight, target, bias, class_weight)  # type: ignore[arg-type]  # None is fine
        ctx.compute = compute
        ctx.gradients = None if is_deferred else computed[1:]
        return computed.loss

    @staticmethod
    def backward(ctx: _LinearLossContext, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        check_differentiated_once()
        # Returned once: the receiver may keep a gradient, add to it, or free it.
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            gradients = (None, None, None)
        elif gradients is None:
            hidden, weight, target, bias, _ = ctx.saved_tensors
            gradients = ctx.compute(hidden, weight.to(hidden.dtype), target, bias, upstream=upstream)[1:]
        else:
            for gradient in gradients:
                if gradient is not None:
                    scale_(gradient, upstream)
        grad_hidden, grad_weight, grad_bias = gradients
        return grad_hidden, grad_weight, None, grad_bias, *(None,) * 4


def differentiable_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    options: CrossEntropy | None = None,
    schedule: Schedule | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias`, differentiable once.

    Args:
        hidden: (N, H), floating point.
        weight: (V, H), of the same device and dtype, or float32 where hidden has 16 bits.
        target: (N,) int64 class indices, or (N, V) floating point distributions; no gradient flows to it.
        bias: (V,), of the same dtype.
        options: of the cross entropy; None: the mean over all rows whose target is not -100.
        schedule: the part of the logits in memory at once; None: all of them.
        shard: see `linear_cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64 inputs), (N,) for reduction "none" and 0-d otherwise.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a target that requires a gradient.
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.
        NotImplementedError: at a backward with `create_graph=True`.

    Example:
        >>> weight = torch.eye(4, 3).requires_grad_()
        >>> target = torch.tensor([0, 1, 3])
        >>> loss = differentiable_cross_entropy(torch.eye(3), weight, target, schedule=Schedule(rows=2))
        >>> (2 * loss).backward()
        >>> weight.grad.shape
        torch.Size([4, 3])
    """
    options, schedule, grad = options or CrossEntropy(), schedule or Schedule(), torch.is_grad_enabled()
    if grad and (target.requires_grad or (options.class_weight is not None and options.class_weight.requires_grad)):
        raise ValueError("no gradient flows to targets and class weights; give them detached")
    if weight.dtype is not hidden.dtype and (weight.dtype is not torch.float32 or hidden.itemsize != 2):
        raise ValueError(f"weight has the dtype of hidden, {hidden.dtype}, or float32; got {weight.dtype}")
    needs_bias = grad and bias is not None and bias.requires_grad
    needs = grad and hidden.requires_grad, grad and weight.requires_grad, needs_bias
    weight_grad_dtype = weight.dtype if schedule.accumulate == "exact" else hidden.dtype
    compute: Callable[..., LossAndGradients] = functools.partial(
        linear_cross_entropy,
        options=options,
        needs=needs,
        **schedule._asdict(),
        weight_grad_dtype=weight_grad_dtype,
        shard=shard,
    )
    is_deferred = options.reduction == "none" or hidden.dtype is torch.float16
    now = needs if not is_deferred else (False,) * 3
    computed = compute(hidden, weight.to(hidden.dtype), target, bias, needs=now)
    if not any(needs):
        return computed.loss
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, bias, options.class_weight, compute, computed, is_deferred
    )
    return result
