"""Tensors whose values are computed later, as the storages of another type, whose rules call ops on them.

Fills of padding are ops of their own: a lazy storage records them, and knows them from a program's own `where`. No
valid result depends on the positions where such a mask is False, and no gradient comes from them. So a loss that
ignores these positions may be computed as if they hadn't been filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.ops.wrappers import StoresTensors

Hook: TypeAlias = Callable[[Tensor], None]
"""A function that a leaf calls with its gradient."""


def is_lazy(x: object) -> bool:
    """Return whether the values of a tensor are computed later."""
    return type(x) in LAZY_TYPES


class TracedStorage(StoresTensors, Protocol):
    """A lazy tensor as compiled code holds it."""

    @property
    def is_in_graph(self) -> bool:
        """True if the graph that it is computed in goes on."""


def traced_storage(x: Tensor) -> TracedStorage | None:
    """Return a tensor that is lazy, and that compiled code may hold; None for any other."""
    return cast("TracedStorage", x) if is_lazy(x) and is_traceable_wrapper_subclass(x) else None


def realized(x: PyTree) -> PyTree:
    """Return the values of a lazy tensor, and anything else unchanged."""
    return x.realize() if is_lazy(x) else x


def fill_padding(x: Tensor, mask: Tensor, value: float | Tensor) -> Tensor:
    """Return a lazy tensor with other values where a mask is False; the gradient there is zero.

    Args:
        x: the tensor.
        mask: bool, broadcastable to it; False in the padding.
        value: the other values.
    """
    if not is_lazy(x):
        return torch.where(mask, x, value)
    return handle_torch_function(fill_padding, (x,), x, mask, value)  # type: ignore[no-any-return]


def mask_gradient(x: Tensor, mask: Tensor, lazy: Tensor) -> Tensor:
    """Return a tensor broadcast with a mask, whose gradient is zero where the mask is False.

    Args:
        x: the tensor.
        mask: bool.
        lazy: the tensor itself, or a lazy one that it is combined with: the result is lazy, too.
    """
    if not is_lazy(lazy):
        return torch.where(mask, x, x.detach())
    return handle_torch_function(mask_gradient, (lazy,), x, mask, lazy)  # type: ignore[no-any-return]


def function_around(function: torch.autograd.graph.Node) -> RuleError:
    """Return the error for a lazy tensor that came out of an autograd.Function, whose backward its graph can't call."""
    if function.name() == "BackwardHookFunctionBackward":
        return RuleError(
            "full backward hooks of a module whose arguments or results are ChunkedTensors have no rule: these have no "
            "gradients of their own; hook the module's parameters, or a module before the chunked rows or around them"
        )
    return RuleError(
        f"a ChunkedTensor came out of {function.name().removesuffix('Backward')}, an autograd.Function, and its "
        f"gradient would not go through that function's backward: give it the tensor's realize()"
    )


def _raise_on_gradient(grad: Tensor) -> NoReturn:
    raise RuleError(
        "a gradient reached a ChunkedTensor from outside its region, through an autograd.Function of your own perhaps: "
        "give that function the tensor's realize()"
    )


GRADIENT_HOOKS: OrderedDict[int, Hook] = OrderedDict({0: _raise_on_gradient})
"""The hooks of tensors that require grad, but get none: their gradient goes to what was chunked."""
