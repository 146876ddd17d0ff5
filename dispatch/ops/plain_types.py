"""The types of tensors whose memory other code may read, and those whose memory it may not.

Kernels and foreach overloads read and write plain types through their addresses. Lazy and masked types must not be
read like that, and meet each other in calls: lazy tensors are materialized first, then the masked type's rules apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals import dynamo, dynamo_rules
from subtensors.dispatch.torch_internals.autograd import BACKWARDS
from subtensors.dispatch.torch_internals.dispatcher import without_modes

PLAIN_TYPES: set[type[Tensor]] = {Tensor, nn.Parameter}
"""Exactly these types, not their subclasses: a subclass may mean something else by its memory."""

LAZY_TYPES: set[type[Tensor]] = set()
"""Types whose values are computed later, by a pass that does not apply the rules of other types."""

MASKED_TYPES: set[type[Tensor]] = set()
"""Types whose memory is valid only in part; only their own rules know which part."""

MAPPED_TYPES: set[type[Tensor]] = set()
"""Types that call a function once for each of several tensors, of any type."""


def read_as_plain(kind: type[Tensor], reason: str) -> None:
    """Add a tensor subclass to the plain types, here and in compiled code.

    Args:
        kind: the class.
        reason: why compiled code can't set `.data` of such a tensor.
    """
    PLAIN_TYPES.add(kind)
    dynamo_rules.declare(
        kind,
        partial(dynamo.allow_in_compiled_code, kind),
        partial(dynamo.trace_as_plain, kind),
        partial(dynamo.break_at_data_assignment, kind, reason),
    )


def detached(x: Tensor) -> Tensor:
    """Return the same memory as a plain tensor that is not tracked by autograd.

    Args:
        x: of a plain type.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(x)


class PlainViews(TorchFunctionMode):
    """A context in which torch calls get a plain view of each subclass tensor among their arguments.

    It is for torch's tracers, which know no other types. Autograd tracks the view where it tracks the tensor.

    Example:
        >>> import subtensors as st
        >>> x = st.static(torch.ones(2))
        >>> with PlainViews():
        ...     y = x.view(1, 2)
        >>> type(y), y.data_ptr() == x.data_ptr()
        (<class 'torch.Tensor'>, True)
    """

    def __torch_function__(
        self, func: Callable[..., PyTree], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Call the function with plain views of its arguments."""
        arguments: PyTree = (args, kwargs or {})
        if func not in _OF_AUTOGRAD and any(map(_is_subclass, types)):
            arguments = optree.tree_map(_plain_view, arguments, none_is_leaf=True)
        args, kwargs = arguments
        return func(*args, **kwargs)


_OF_AUTOGRAD = BACKWARDS.union(
    [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")],
    [getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")],
    [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.requires_grad_],
)
"""Functions of the tensor itself, not of its view."""

_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_subclass(kind: type) -> bool:
    return kind in PLAIN_TYPES and kind not in (Tensor, nn.Parameter)


def _plain_view(x: PyTree) -> PyTree:
    if not _is_subclass(type(x)):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        with without_modes(), torch._C.DisableTorchFunctionSubclass():
            return Tensor.view_as(x, x)
    if x not in _views:
        with without_modes():
            _views[x] = detached(x)
    return _views[x]
