"""Shared by wrapper types in compiled code: the functions that a compiler calls on a wrapper itself, and gradients.

A compiler is given the wrapper alone, and not the tensors that it stores. `Join` leads from the stored tensors to the
wrapper, `Split` from a wrapper that compiled code is given to traced tensors that stand for what it stores:

    stored tensors --Join--> wrapper  |  wrapper --Split--> traced tensors -> results
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

QUERIES = frozenset(
    """size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_complex is_floating_point
    is_signed is_conj is_neg is_inference is_coalesced is_same_size is_shared is_pinned data_ptr untyped_storage
    get_device requires_grad_ register_hook retain_grad type __len__ __hash__ _is_view _is_zerotensor
    sym_size""".split()
)
"""The names of functions that a compiler calls on a wrapper itself, about its metadata and its place in autograd."""


class StoresTensors(Protocol):
    """The part of a wrapper that the two functions use."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that gradients are returned for."""

    def stored(self) -> Sequence[Tensor]:
        """The tensors that it stores."""

    def with_stored(self, tensors: list[Tensor]) -> Tensor:
        """A wrapper like it that stores other tensors."""


class _WrapperContext(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    source: StoresTensors


class Join(torch.autograd.Function):
    """An autograd function from tensors to their wrapper."""

    @staticmethod
    def forward(ctx: _WrapperContext, x: Tensor, *tensors: Tensor) -> Tensor:
        """Return the wrapper."""
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)  # torch would make zeros of the wrapper's shape
        return x

    @staticmethod
    def backward(ctx: _WrapperContext, *gradients: StoresTensors | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of each tensor."""
        [gradient] = gradients
        if gradient is None:
            return None, *[None for _ in ctx.needs_input_grad[1:]]
        parts = gradient.tensors
        return None, *[g if need else None for g, need in zip(parts, ctx.needs_input_grad[1:], strict=True)]


class Split(torch.autograd.Function):
    """An autograd function from a wrapper to aliases of the tensors that it stores."""

    @staticmethod
    def forward(ctx: _WrapperContext, x: StoresTensors) -> tuple[Tensor, ...]:
        """Return aliases of the tensors."""
        ctx.source = x
        return tuple(t.view_as(t) for t in x.stored())  # views of a function: torch refuses to write to them

    @staticmethod
    def backward(ctx: _WrapperContext, *gradients: Tensor) -> Tensor:
        """Return the wrapper of the gradients."""
        return ctx.source.with_stored(list(gradients))


def requires_grad(x: Tensor) -> bool:
    """Return whether the wrapper itself requires grad, whatever the tensors that it stores do."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def join(x: Tensor, tensors: Sequence[Tensor], by: type[Join] = Join) -> None:
    """Make tensors the origin of a wrapper's gradient, in place of what was."""
    with torch._C.DisableTorchFunctionSubclass():
        if x.requires_grad:
            x.detach_()
        by.apply(x, *tensors)  # type: ignore[no-untyped-call]  # torch's


def split(x: Tensor) -> list[Tensor]:
    """Return aliases, which autograd tracks, of the tensors that a wrapper stores."""
    return list(Split.apply(x))  # type: ignore[no-untyped-call]
