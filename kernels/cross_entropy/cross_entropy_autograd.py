"""`linear_cross_entropy` as a differentiable function: gradients are computed with the forward, for an upstream of one.

The upstream gradient of a loss is a number that is known only at backward, and the saved gradients are multiplied by it
there, in place: they are handed out once, and a second backward through a retained graph computes them again. On a GPU
the multiplication reads the number on the device and does nothing where it is one.

Two cases compute their gradients at backward instead, with the upstream gradient in them from the start, for one GEMM
more: a loss a row, whose upstream is a vector; and float16, in which the gradient of a mean over N rows would be lost
before a loss scale could save it.

A float32 weight of 16-bit hidden states, as autocast has them, is multiplied in their dtype and gets its exact gradient
in its own: summed in the gradient's memory, and never rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate, linear_cross_entropy
from subtensors.kernels.cross_entropy.problem import LossAndGradients
from subtensors.kernels.cross_entropy.scale_add import scale_


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


class _Loss(NamedTuple):
    """The options of a loss without its tensors, and how it is computed.

    Args:
        options: those of the cross entropy.
        schedule: the parts in which it is computed.
        needs: whether to compute the gradients of hidden, weight and bias.
    """

    options: CrossEntropy
    schedule: Schedule
    needs: tuple[bool, bool, bool]

    def computed(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        upstream: Tensor | None = None,
        needs: tuple[bool, bool, bool] | None = None,
    ) -> LossAndGradients:
        """The loss, and those gradients that are wanted: of the loss, or of something with this gradient in it."""
        rows, columns, kept, accumulate = self.schedule
        return linear_cross_entropy(
            hidden,
            weight if weight.dtype is hidden.dtype else weight.to(hidden.dtype),
            target,
            bias,
            options=self.options,
            needs=self.needs if needs is None else needs,
            rows=rows,
            columns=columns,
            kept=kept,
            accumulate=accumulate,
            upstream=upstream,
            weight_grad_dtype=weight.dtype if accumulate == "exact" else hidden.dtype,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """The node of the graph. It is made of what was computed: a GPU need not wait for it to be made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        loss: _Loss,
        computed: LossAndGradients,
        is_deferred: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, target, bias)
        ctx.loss = loss
        ctx.gradients = None if is_deferred else computed[1:]
        return computed.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the gradient of a chunked linear cross entropy cannot be differentiated again (create_graph=True); "
                "compute this loss from whole logits instead"
            )
        # Handed out once: whoever gets a gradient may keep it, add to it, or free it.
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            gradients = (None, None, None)
        elif gradients is None:
            gradients = ctx.loss.computed(*ctx.saved_tensors, upstream)[1:]
        else:
            for gradient in gradients:
                if gradient is not None:
                    scale_(gradient, upstream)
        for_hidden, for_weight, for_bias = gradients
        return for_hidden, for_weight, None, for_bias, None, None, None


def differentiable_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    options: CrossEntropy | None = None,
    schedule: Schedule | None = None,
) -> Tensor:
    """The cross entropy of `hidden @ weight.T + bias`, differentiable once.

    Args:
        hidden: (N, H), floating point.
        weight: (V, H), of the same device and dtype, or float32 where that has 16 bits.
        target: (N,) int64 class indices, or (N, V) floating point distributions; no gradient flows to it.
        bias: (V,), of the same dtype.
        options: which cross entropy; None: the mean over all rows but those of target -100.
        schedule: which part of the logits is in memory at once; None: all of them.

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
    of_bias = grad and bias is not None and bias.requires_grad
    loss = _Loss(options, schedule, (grad and hidden.requires_grad, grad and weight.requires_grad, of_bias))
    is_deferred = options.reduction == "none" or hidden.dtype is torch.float16
    computed = loss.computed(hidden, weight, target, bias, needs=(False,) * 3 if is_deferred else None)
    if not any(loss.needs):
        return computed.loss
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, bias, loss, computed, is_deferred
    )
    return result
