"""Autograd functions between a PaddedTensor and the storage that its rules compute on: `Unwrap` and `Wrap`.

Each is the backward of the other: the gradient of a PaddedTensor is a PaddedTensor, and that of its storage a plain
tensor of the bucket shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.sizes.dim_factors import size_of
from subtensors.padded.padded_tensor import PaddedTensor, value_of, wrap
from subtensors.padded.views import current, note_plain


def wrapped(value: PaddedValue) -> Tensor:
    """A rule's result for the user: plain where nothing is padded, else a PaddedTensor that autograd tracks."""
    if not value.padded_dims:
        return value.dense
    return Wrap.apply(value.dense, value) if value.is_tracked else wrap(value)  # type: ignore[no-untyped-call, no-any-return]


def followed(x: PaddedTensor) -> PaddedValue:
    """The value of a PaddedTensor, whose storage autograd tracks if the tensor requires grad."""
    x = current(x)
    value = value_of(x)
    if torch.is_grad_enabled() and x.requires_grad:
        arrival = GradientTracker()
        return replace(value, dense=Unwrap.apply(x, arrival), tracker=arrival)  # type: ignore[no-untyped-call]
    return value


class Unwrap(torch.autograd.Function):
    """The storage of a PaddedTensor; the gradient is padded alike."""

    @staticmethod
    def forward(ctx: Any, x: PaddedTensor, arrival: GradientTracker) -> Tensor:
        """An alias of the storage."""
        value = value_of(x)
        ctx.dims, ctx.sizes, ctx.arrival = value.dims, value.sizes, arrival
        return value.dense.view_as(value.dense)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient as a PaddedTensor; autograd adds such up where torch does not look at conjugate bits."""
        gradient = gradients[0].resolve_conj().resolve_neg()
        return wrapped(PaddedValue(gradient, ctx.dims, ctx.sizes, 0 if ctx.arrival.arrives_zero() else None)), None


class Wrap(torch.autograd.Function):
    """A PaddedTensor of a storage; the gradient is its gradient's storage."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, value: PaddedValue) -> PaddedTensor:
        """The wrapped value."""
        ctx.arrival = value.tracker or GradientTracker()
        ctx.way = len(ctx.arrival.outside)
        ctx.arrival.outside.append(False)
        return wrap(replace(value, dense=dense.detach(), tracker=None))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The storage of the gradient; a plain one has the bucket's shape already."""
        gradient = gradients[0]
        ctx.arrival.outside[ctx.way] = isinstance(gradient, PaddedTensor) and gradient._fill == 0
        return (followed(gradient).dense if isinstance(gradient, PaddedTensor) else gradient), None


def dense_of(x: PaddedTensor) -> Tensor:
    """`PaddedTensor.dense`."""
    dense = followed(x).dense
    note_plain(x, [dense])
    return dense


def mask_of(x: PaddedTensor) -> Tensor:
    """`PaddedTensor.mask`."""
    mask = value_of(x).mask()
    if mask is None:
        return torch.ones(x._dense.shape, dtype=torch.bool, device=x._dense.device)
    return mask.expand(x._dense.shape).clone()


def count_of(x: PaddedTensor, dim: int) -> Tensor:
    """`PaddedTensor.count`."""
    if not -x._dense.dim() <= dim < x._dense.dim():
        raise IndexError(f"dim {dim} of a PaddedTensor of {x._dense.dim()} dims")
    value, d = value_of(x), dim % x._dense.dim()
    if value.sizes is None or not value.is_padded(d):
        return torch.full((), value.shape[d], dtype=torch.int64, device=x._dense.device)
    return value.sizes.of(size_of(value.dims[d])).clone()
