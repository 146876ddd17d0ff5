"""Autograd functions between a PaddedTensor and the storage that its rules compute on: `Unwrap` and `Wrap`.

Each is the backward of the other: the gradient of a PaddedTensor is a PaddedTensor, and that of its storage a plain
tensor of the bucket shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.padded.padded_tensor import PaddedTensor, handlers, make_padded, unwrap
from subtensors.padded.views import refresh_view, remember_views, track_plain_views


def wrap_with_grad(value: PaddedValue) -> Tensor:
    """A rule's result for the user: plain where nothing is padded, else a PaddedTensor that autograd tracks."""
    if not value.padded_dims:
        return value.dense
    return Wrap.apply(value.dense, value) if value.is_tracked else make_padded(value)  # type: ignore[no-untyped-call, no-any-return]


def wrap_results(
    values: Sequence[PaddedValue], func: Callable[..., PyTree], args: Args, kwargs: Kwargs
) -> list[Tensor]:
    """The same for the results of a call, which views remember."""
    results = [*map(wrap_with_grad, values)]
    if any(value.view for value in values):
        given = zip(values, results, strict=True)
        plain = [x for value, x in given if value.view == "alias" and not isinstance(x, PaddedTensor)]
        remember_views(func, args, kwargs, results, plain)
    return results


def unwrap_with_grad(x: Tensor) -> PaddedValue:
    """The value of a tensor; the storage of a PaddedTensor is one that autograd tracks if the tensor requires grad."""
    if isinstance(x, PaddedTensor) and x._view_source is not None:
        x = refresh_view(x)
    value = unwrap(x)
    if isinstance(x, PaddedTensor) and torch.is_grad_enabled() and x.requires_grad:
        tracker = GradientTracker()
        return replace(value, dense=Unwrap.apply(x, tracker), tracker=tracker)  # type: ignore[no-untyped-call]
    return value


class UnwrapContext(FunctionCtx):
    """The dims and sizes of the unwrapped tensor, and the tracker of its gradient."""

    dims: tuple[Factors, ...]
    sizes: TrueSizes | None
    tracker: GradientTracker


class Unwrap(torch.autograd.Function):
    """The storage of a PaddedTensor; the gradient has the same padding."""

    @staticmethod
    def forward(ctx: UnwrapContext, x: PaddedTensor, tracker: GradientTracker) -> Tensor:
        """Return an alias of the storage."""
        value = unwrap(x)
        ctx.dims, ctx.sizes, ctx.tracker = value.dims, value.sizes, tracker
        return value.dense.view_as(value.dense)

    @staticmethod
    def backward(ctx: UnwrapContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as a PaddedTensor; autograd adds gradients where torch ignores conjugate bits."""
        gradient = gradients[0].resolve_conj().resolve_neg()
        return wrap_with_grad(
            PaddedValue(gradient, ctx.dims, ctx.sizes, 0 if ctx.tracker.arrives_zero() else None)
        ), None


class WrapContext(FunctionCtx):
    """The tracker of the wrapped value's gradient, and the result's index in `tracker.outside`."""

    tracker: GradientTracker
    index: int


class Wrap(torch.autograd.Function):
    """A PaddedTensor of a storage; the gradient is its gradient's storage."""

    @staticmethod
    def forward(ctx: WrapContext, dense: Tensor, value: PaddedValue) -> PaddedTensor:
        """Return the wrapped value."""
        ctx.tracker = value.tracker or GradientTracker()
        ctx.index = len(ctx.tracker.outside)
        ctx.tracker.outside.append(False)
        return make_padded(replace(value, dense=dense.detach(), tracker=None))

    @staticmethod
    def backward(ctx: WrapContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the storage of the gradient; a plain gradient has the bucket's shape already."""
        gradient = gradients[0]
        ctx.tracker.outside[ctx.index] = isinstance(gradient, PaddedTensor) and gradient._fill == 0
        return unwrap_with_grad(gradient).dense, None


def dense_of(x: PaddedTensor) -> Tensor:
    """Return `PaddedTensor.dense`."""
    dense = unwrap_with_grad(x).dense
    track_plain_views(x, [dense])
    return dense


handlers.dense = dense_of
