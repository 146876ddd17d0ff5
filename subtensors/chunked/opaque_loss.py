"""The cross entropy of a linear layer as one op that a compiler doesn't look into.

Gradients are computed with the loss, for an upstream of one, and are further results of the op. A loss a row, and
float16, whose gradients a loss scale must reach before they are rounded, have them computed at backward instead, by an
op of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.region.axis import Policy
from subtensors.dispatch.region.lowering import chunk_plan, loss_shape
from subtensors.kernels.cross_entropy import CrossEntropy
from subtensors.kernels.linear_cross_entropy import LossAndGradients, linear_cross_entropy


def opaque_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
) -> Tensor:
    """The loss, differentiable once.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,) or None.
        target: (N,) class indices, or (N, V) distributions.
        class_weight: (V,) or None.
        numbers: ignore_index, label_smoothing, softcap (0 for none) and temperature.
        reduction: "mean", "sum" or "none".
        division: chunks, rows of one, and bytes of memory: at most one of the three, 0 for the others.
        exact: how the weight's gradient adds up.

    Returns:
        float32 (float64 for float64): (N,) for reduction "none", 0-d otherwise.

    Example:
        >>> hidden, weight, target = torch.eye(3), torch.eye(4, 3), torch.tensor([0, 1, 3])
        >>> numbers = [-100.0, 0.0, 0.0, 1.0]
        >>> opaque_cross_entropy(hidden, weight, None, target, None, numbers, "none", [2, 0, 0], True).shape
        torch.Size([3])
    """
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    given = (hidden, weight, bias, target, class_weight, numbers, reduction, division, exact, needs)
    loss: Tensor = torch.ops.subtensors.linear_cross_entropy(*given)[0]
    return loss


def _computed(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
    upstream: Tensor | None = None,
) -> LossAndGradients:
    chunks, rows, limit = (count or None for count in division)
    rows = -(-hidden.shape[0] // chunks) if chunks else rows
    shape = replace(loss_shape(hidden, weight, False), needs_hidden=needs[0], needs_weight=needs[1])
    schedule = chunk_plan(shape, Policy(memory_limit=limit, exact=exact), rows, hidden.device).schedule
    ignored, smoothing, softcap, temperature = numbers
    options = CrossEntropy(int(ignored), class_weight, smoothing, 0.0, softcap or None, temperature, reduction)
    return linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        options=options,
        needs=(needs[0], needs[1], needs[2]),
        upstream=upstream,
        **schedule._asdict(),
    )


def _is_deferred(hidden: Tensor, reduction: str) -> bool:
    return reduction == "none" or hidden.dtype == torch.float16


def _or_nothing(hidden: Tensor, result: LossAndGradients) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_weight, of_bias = (hidden.new_empty(0) if g is None else g for g in result[1:])
    return of_hidden, of_weight, of_bias


@torch.library.custom_op("subtensors::linear_cross_entropy", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and the gradients that are needed now; empty tensors for others."""
    now = [False] * 3 if _is_deferred(hidden, reduction) else needs
    result = _computed(hidden, weight, bias, target, class_weight, numbers, reduction, division, exact, now)
    return result.loss, *_or_nothing(hidden, result)


@_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    sizes = hidden.shape[:1] if reduction == "none" else ()
    loss = hidden.new_empty(sizes, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    now = [False] * 3 if _is_deferred(hidden, reduction) else needs
    return loss, *_fake_gradients(hidden, weight, bias, now)


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, ...]:
    of = zip((hidden, weight, bias), needs, strict=True)
    return tuple(t.new_empty(t.shape) if n and t is not None else hidden.new_empty(0) for t, n in of)


@torch.library.custom_op("subtensors::linear_cross_entropy_gradients", mutates_args=())
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for an upstream gradient of the loss."""
    result = _computed(hidden, weight, bias, target, class_weight, numbers, reduction, division, exact, needs, upstream)
    return _or_nothing(hidden, result)


@_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    numbers: list[float],
    reduction: str,
    division: list[int],
    exact: bool,
    needs: list[bool],
    upstream: Tensor,
) -> tuple[Tensor, ...]:
    return _fake_gradients(hidden, weight, bias, needs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, numbers, reduction, division, exact, needs = inputs
    ctx.needs, ctx.options = needs, (numbers, reduction, division, exact, needs)
    ctx.is_deferred = _is_deferred(inputs[0], reduction)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensors if ctx.is_deferred else output[1:]))
    ctx.mark_non_differentiable(*output[1:])


def _scale(ctx: Any, loss: Tensor | None, *others: Any) -> tuple[Any, ...]:
    if loss is None:
        return (None,) * 10
    if ctx.is_deferred:
        found = torch.ops.subtensors.linear_cross_entropy_gradients(*ctx.saved_tensors, *ctx.options, loss)
        grads = [g if n else None for g, n in zip(found, ctx.needs, strict=True)]
    else:
        grads = [g * loss.to(g.dtype) if n else None for g, n in zip(ctx.saved_tensors, ctx.needs, strict=True)]
    return *grads, *[None] * 7


torch.library.register_autograd("subtensors::linear_cross_entropy", _scale, setup_context=_keep)
