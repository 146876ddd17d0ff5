"""Gradients through lists in compiled code.

In eager mode gradients flow through the elements, and the list itself takes no part. Compiled code is given the list
alone, so two autograd functions connect it to the elements. `JoinElements` leads from the elements to the list, before
the guards of compiled code look at it; in compiled code, `SplitElements` leads from the list to traced tensors that
represent the elements. Between the two, results are lists of traced tensors, tracked one by one as in eager mode:

    elements --JoinElements--> list  |  list --SplitElements--> traced tensors -> results
                     eager           |                    compiled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals.autograd import is_transforming

Edge = Tensor | torch.autograd.graph.Node
"""The end of an edge from a list: an element, or the autograd node that made it."""


class StoresTensors(Protocol):
    """The part of a list that the two functions use."""

    @property
    def tensors(self) -> list[Tensor]:
        """The elements."""

    def stored(self) -> list[Tensor]:
        """The elements, or the flats of a packed list."""

    def with_stored(self, tensors: list[Tensor]) -> Tensor:
        """A list of the same structure that stores other tensors."""


class _ListContext(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    source: StoresTensors


class JoinElements(torch.autograd.Function):
    """An autograd function from elements to their list."""

    @staticmethod
    def forward(ctx: _ListContext, x: Tensor, *elements: Tensor) -> Tensor:
        """Return the list."""
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)  # torch would make a vector of zeros for a list
        return x

    @staticmethod
    def backward(ctx: _ListContext, *gradients: StoresTensors | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of each element."""
        [gradient] = gradients
        if gradient is None:
            return None, *[None for _ in ctx.needs_input_grad[1:]]
        parts = gradient.tensors
        return None, *[g if need else None for g, need in zip(parts, ctx.needs_input_grad[1:], strict=True)]


class SplitElements(torch.autograd.Function):
    """An autograd function from a list to aliases of the tensors that it stores, elements or flats."""

    @staticmethod
    def forward(ctx: _ListContext, x: StoresTensors) -> tuple[Tensor, ...]:
        """Return aliases of the tensors."""
        ctx.source = x
        return tuple(t.view_as(t) for t in x.stored())  # views of a function: torch refuses to write to them

    @staticmethod
    def backward(ctx: _ListContext, *gradients: Tensor) -> Tensor:
        """Return the list of the gradients."""
        return ctx.source.with_stored(list(gradients))


def list_requires_grad(x: Tensor) -> bool:
    """Return whether the list itself requires grad, whatever its elements do."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def check_connected(x: Tensor, joined: Sequence[Edge]) -> None:
    """Check that the gradients of a list reach its elements.

    Raises:
        RuleError: an autograd.Function returned the list, whose elements do not know of it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is not None and not joined:
        raise RuleError(
            f"{function.name()} is of an autograd.Function that took and returned a TensorList, whose elements would "
            f"get no gradients: call it, or a module whose hooks do so (FSDP), for each element, [f(t) for t in x]"
        )


def mark_requires_grad(x: Tensor, elements: Sequence[Tensor]) -> None:
    """Mark a list as requiring grad if an element does."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in elements) and not is_transforming():
        with torch._C.DisableTorchFunctionSubclass():
            x.requires_grad_(elements[0].is_floating_point())


def join_elements(x: Tensor, elements: Sequence[Tensor], joined: Sequence[Edge]) -> list[Edge] | None:
    """Connect a list to its elements in the autograd graph, unless it is connected to them already.

    Returns:
        What the list is connected to; None if that is impossible: its first element holds no floats, or one is a tensor
        of a subclass.
    """
    if not elements[0].is_floating_point() or any(type(t) not in PLAIN_TYPES for t in elements):
        return None
    edges = [t.grad_fn if t.grad_fn is not None else t for t in elements]
    is_joined = len(edges) == len(joined) and all(a is b for a, b in zip(edges, joined, strict=True))
    if not is_joined or not list_requires_grad(x):
        with torch._C.DisableTorchFunctionSubclass():
            x.detach_()
            JoinElements.apply(x, *elements)  # type: ignore[no-untyped-call]
    return edges


def split_elements(x: Tensor, is_unconnected: bool) -> list[Tensor] | None:
    """Return aliases, which autograd tracks, of the tensors that a traced list stores.

    Returns:
        The aliases; None if the list does not require grad.

    Raises:
        RuleError: the list is unconnected.
    """
    if is_unconnected:
        raise RuleError(
            "torch.compile can't differentiate through a TensorList whose first element holds no floats, or that holds "
            "tensors of a subclass: compute under torch.no_grad(), or hand it the elements, tl.tree()"
        )
    if not list_requires_grad(x):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        int(x.shape[0])  # the compiler may not leave the number of elements open
    return list(SplitElements.apply(x))  # type: ignore[no-untyped-call]


def detached_alias(element: Tensor, index: int, aliases: dict[int, Tensor]) -> Tensor:
    """Return a detached alias of an element, from a cache, since the compiler asks in its fake mode, too.

    There `detach` of a tensor that is not fake is refused.
    """
    alias = aliases.get(index)
    if alias is None or alias.data_ptr() != element.data_ptr() or alias.shape != element.shape:
        alias = aliases[index] = element.detach()
    return alias
