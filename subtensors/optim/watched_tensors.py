"""Parameters and gradients that mark when Python gives them other memory, or another gradient.

`p.grad = g` and `p.data = t` leave no trace that is cheap to find among a thousand tensors, if something still holds
the old gradient or memory. So the tensors are given a class that behaves as theirs does, and marks the change. Tensors
that are computed, copied or unpickled from them have the original class again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from subtensors.dispatch.ops.plain_types import read_as_plain
from subtensors.dispatch.torch_internals import dynamo
from subtensors.dispatch.torch_internals.ops import take_foreach_paths
from subtensors.optim.versioned_state import Changes

_CHANGES = "_changes"


def _marking(attribute: Any) -> Any:
    """Wrap a tensor attribute so that setting or deleting it is marked."""

    def change(t: Tensor, value: Any) -> None:
        attribute.__set__(t, value)
        _mark(t)

    def delete(t: Tensor) -> None:
        attribute.__delete__(t)
        _mark(t)

    return property(attribute.__get__, change, delete)


def _marking_call(method: Callable[..., Any]) -> Any:
    """Wrap a tensor method so that each call is marked."""

    @wraps(method, assigned=("__name__",))  # not the examples of torch's own documentation
    def call(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = method(t, *args, **kwargs)
        _mark(t)
        return result

    return call


def _mark(t: Tensor) -> None:
    vars(t)[_CHANGES].mark = object()


class WatchedTensor(Tensor):
    """A tensor that marks when it is given other memory, or another gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    grad = _marking(Tensor.grad)
    _grad = _marking(Tensor._grad)
    data = _marking(Tensor.data)
    set_ = _marking_call(Tensor.set_)
    _use_count = _marking_call(Tensor._use_count)  # type: ignore[attr-defined]  # torch.utils.swap_tensors asks it

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_unwatched_alias(self))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unwatched_alias(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_unwatched_alias(self))


for _name in ("as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_"):
    setattr(WatchedTensor, _name, _marking_call(getattr(Tensor, _name)))


class WatchedParameter(WatchedTensor, Parameter):
    """A parameter that marks when it is given other memory, or another gradient."""


_WATCHED: dict[type[Tensor], type[Tensor]] = {Tensor: WatchedTensor, Parameter: WatchedParameter}
_OWN = {watched: own for own, watched in _WATCHED.items()}


def watch(tensors: Iterable[Tensor], changes: Changes) -> None:
    """Mark what happens to these tensors from now on.

    Args:
        tensors: torch's own, or parameters.
        changes: where it is marked.

    Example:
        >>> p, changes = Parameter(torch.ones(2)), Changes()
        >>> watch([p], changes)
        >>> before = changes.mark
        >>> p.add(1).sum().backward()
        >>> changes.mark is before
        True
        >>> p.grad = None
        >>> changes.mark is before
        False
    """
    for kind in _OWN:
        take_foreach_paths(kind)
    for t in tensors:
        vars(t)[_CHANGES] = changes
        t.__class__ = _WATCHED[type(t)]


def unwatch(tensors: Iterable[Tensor]) -> None:
    """Give watched tensors their original class back; skip tensors that are not watched, and None."""
    for t in tensors:
        if type(t) in _OWN:
            t.__class__ = _OWN[type(t)]
            del vars(t)[_CHANGES]


def _unwatched_alias(t: Tensor) -> Tensor:
    """The same memory, attributes and gradient as a tensor of its own class."""
    alias = Tensor._make_subclass(_OWN[type(t)], t.data, t.requires_grad)
    alias.grad = t.grad
    vars(alias).update({name: value for name, value in vars(t).items() if name != _CHANGES})
    return alias


for _kind in _OWN:
    dynamo.compile_methods_only_inlined(_kind)
    read_as_plain(_kind, "what moves a packed parameter, or its gradient, is marked outside of a graph")
