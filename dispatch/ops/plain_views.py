"""Plain views of tensors that are read as plain ones, for torch's tracers, which know no other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES, detached
from subtensors.dispatch.torch_internals.dispatcher import without_modes


class PlainViews(TorchFunctionMode):
    """A context in which torch calls get a cached, untracked plain view of each subclass tensor among their arguments.

    While gradients are recorded, a tensor that requires grad is passed unchanged.

    Example:
        >>> import subtensors as st
        >>> x = st.static(torch.ones(2))
        >>> with PlainViews():
        ...     y = x.view(1, 2)
        >>> type(y), y.data_ptr() == x.data_ptr()
        (<class 'torch.Tensor'>, True)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with plain views of its arguments."""
        given: Any = (args, kwargs or {})
        if func not in _OF_AUTOGRAD and any(map(_is_subclass, types)):
            given = optree.tree_map(_plain, given, none_is_leaf=True)
        args, kwargs = given
        return func(*args, **kwargs)


# The attributes of autograd are those of the tensor itself, not of its view.
_OF_AUTOGRAD = {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")}

_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_subclass(kind: type[Any]) -> bool:
    return kind in PLAIN_TYPES and kind not in (Tensor, nn.Parameter)


def _plain(x: Any) -> Any:
    if not _is_subclass(type(x)) or (x.requires_grad and torch.is_grad_enabled()):
        return x
    if x not in _views:
        with without_modes():
            _views[x] = detached(x)
    return _views[x]
