"""Autograd functions between a PaddedTensor and the storage that its rules compute on: `Unwrap` and `Wrap`.

Each is the backward of the other: the gradient of a PaddedTensor is a PaddedTensor, and that of its storage a plain
tensor of the bucket shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.ops.lazy_storage import (
    GRADIENT_HOOKS,
    TracedStorage,
    function_around,
    realized,
    traced_storage,
)
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.ops.wrappers import Join, join
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import FINITE_FILL, Layout, PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.dispatch.torch_internals.autograd import is_fsdp_identity_node, set_leaf_hooks
from subtensors.padded.padded_tensor import PaddedTensor, handlers, make_padded, unwrap, wrap_layout
from subtensors.padded.views import refresh_view, track_plain_views


def wrap_with_grad(value: PaddedValue) -> Tensor:
    """A rule's result for the user: plain where nothing is padded, else a PaddedTensor that autograd tracks.

    A lazy storage has gradients of its own: around it there is a leaf, which gets none.
    """
    if not value.padded_dims:
        return value.dense
    if type(value.dense) not in LAZY_TYPES:
        return wrap_storage(value.dense, value.layout(), value.sizes, value.tracker)
    out = make_padded(value)
    track_storage(out)
    if value.dense.requires_grad and traced_storage(value.dense) is None:
        with torch._C.DisableTorchFunctionSubclass():
            set_leaf_hooks(out.requires_grad_(), GRADIENT_HOOKS)
    return out


def wrap_storage(
    dense: Tensor, layout: Layout, sizes: TrueSizes | None, tracker: GradientTracker | None
) -> PaddedTensor:
    """Return a PaddedTensor of a storage of a plain type, tracked by autograd if that is."""
    if dense.requires_grad and torch.is_grad_enabled():
        return Wrap.apply(dense, layout, sizes, tracker)  # type: ignore[no-untyped-call, no-any-return]
    return wrap_layout(dense, layout, sizes, tracker)


def track_storage(x: PaddedTensor) -> None:
    """Make a PaddedTensor require grad as its lazy storage does in compiled code, where that may have changed."""
    storage = traced_storage(x._dense)
    if storage is not None and x._dense.requires_grad:
        join(x, storage.stored(), JoinStorage)


wrap_padded = cast("Callable[[PaddedValue], PaddedTensor]", wrap_with_grad)
"""`wrap_with_grad` of a value with padding; one without, if no non-strict Dim fits, becomes a plain tensor."""


def realize(x: PaddedTensor) -> PaddedTensor:
    """Return `PaddedTensor.realize()`."""
    if type(x._dense) not in LAZY_TYPES:
        return x
    fill = x._fill if x._fill in (0, FINITE_FILL) else None  # chunks of padding are skipped, and hold zeros
    return wrap_padded(replace(unwrap(x), dense=realized(x._dense), fill=fill, tracker=None))


def with_storage(x: PaddedTensor, storage_of: Callable[[PaddedValue], Tensor]) -> PaddedTensor:
    """Return a padded tensor around a lazy storage, which is made of its value, whose padding is zeros then."""
    value = unwrap_with_grad(realize(x))
    dense = value.dense if value.fill == 0 else value.filled(0)
    value = replace(value, dense=dense, fill=0, tracker=None)
    return wrap_padded(replace(value, dense=storage_of(value)))


def unwrap_with_grad(x: Tensor) -> PaddedValue:
    """The value of a tensor; the storage of a PaddedTensor is one that autograd tracks if the tensor requires grad."""
    if isinstance(x, PaddedTensor) and x._view_source is not None:
        x = refresh_view(x)
    value = unwrap(x)
    if type(value.dense) in LAZY_TYPES:
        if (storage := traced_storage(value.dense)) is not None:
            return _in_this_graph(x, value, storage)
        return value if x.grad_fn is None or x is value.dense else unwrap_with_grad(_source_of(x, x.grad_fn))
    if isinstance(x, PaddedTensor) and torch.is_grad_enabled() and x.requires_grad:
        value.tracker = GradientTracker()
        value.dense = Unwrap.apply(x, value.tracker)  # type: ignore[no-untyped-call]
    return value


def _source_of(x: Tensor, function: torch.autograd.graph.Node) -> PaddedTensor:
    """Return what a tensor with a lazy storage is a view of, where FSDP2 took the view, whose function does nothing.

    Raises:
        RuleError: another autograd.Function returned it.
    """
    source = x._view_source if isinstance(x, PaddedTensor) and is_fsdp_identity_node(function) else None
    base = None if source is None else source.base()
    if base is None:
        raise function_around(function)
    return base


def _in_this_graph(x: Tensor, value: PaddedValue, storage: TracedStorage) -> PaddedValue:
    """Return the value of a PaddedTensor in compiled code, or after it: a storage that left its graph is tracked.

    Raises:
        RuleError: an autograd.Function in the graph returned it.
    """
    if storage.is_in_graph and x.grad_fn is not None and x.grad_fn.name() != "JoinStorageBackward":
        raise function_around(x.grad_fn)
    if storage.is_in_graph or not (x.requires_grad and torch.is_grad_enabled()):
        return value
    stored: Tensor = SplitStorage.apply(x, storage)  # type: ignore[no-untyped-call]  # torch's has no types
    return replace(value, dense=storage.with_stored([stored]))


class JoinStorage(Join):
    """An autograd function from what a lazy storage stores to the PaddedTensor around it, which leaves a graph."""

    @staticmethod
    def backward(  # type: ignore[override]  # its gradient is a PaddedTensor
        ctx: FunctionCtx, *gradients: PaddedTensor | None
    ) -> tuple[None, Tensor | None]:
        """Return the gradient's storage."""
        [gradient] = gradients
        if gradient is None:
            return None, None
        storage = traced_storage(gradient._dense)
        return None, gradient._dense if storage is None else storage.stored()[0]


class SplitContext(FunctionCtx):
    """The value of the PaddedTensor, and its storage."""

    value: PaddedValue
    storage: TracedStorage


class SplitStorage(torch.autograd.Function):
    """An autograd function from a PaddedTensor that left a graph to what its lazy storage stores."""

    @staticmethod
    def forward(ctx: SplitContext, x: PaddedTensor, storage: TracedStorage) -> Tensor:
        """Return an alias."""
        ctx.value, ctx.storage = unwrap(x), storage
        [stored] = storage.stored()
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: SplitContext, *gradients: Tensor) -> tuple[PaddedTensor, None]:
        """Return the gradient as a PaddedTensor of the same types, with the same padding."""
        fill = ctx.value.fill
        plain = replace(ctx.value, dense=gradients[0], fill=None, tracker=None)
        dense = plain.filled(fill if isinstance(fill, int | float) else 0)
        return make_padded(replace(plain, dense=ctx.storage.with_stored([dense]), fill=fill)), None


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
        ctx.dims, ctx.sizes, ctx.tracker = x._layout.dims, x._sizes, tracker
        return x._dense.view_as(x._dense)

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
    def forward(
        ctx: WrapContext, dense: Tensor, layout: Layout, sizes: TrueSizes | None, tracker: GradientTracker | None
    ) -> PaddedTensor:
        """Return the wrapped value."""
        ctx.tracker = tracker or GradientTracker()
        ctx.index = len(ctx.tracker.outside)
        ctx.tracker.outside.append(False)
        return wrap_layout(dense.detach(), layout, sizes)

    @staticmethod
    def backward(ctx: WrapContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the storage of the gradient; a plain gradient has the bucket's shape already."""
        gradient = gradients[0]
        ctx.tracker.outside[ctx.index] = isinstance(gradient, PaddedTensor) and gradient._fill == 0
        return unwrap_with_grad(gradient).dense, None, None, None


def dense_of(x: PaddedTensor) -> Tensor:
    """Return `PaddedTensor.dense`."""
    if not x._dense.is_inference():  # a write to it may change what is known of the padding
        x._fill_version = x._dense._version
    dense = unwrap_with_grad(x).dense
    track_plain_views(x, [dense])
    return dense


handlers.dense, handlers.realize = dense_of, realize
