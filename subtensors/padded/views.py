"""Views of padded tensors: each remembers its base, and is retaken from it after the base was written to.

Autograd tracks a tensor's storage through the rules, and sees every result of a rule as a separate tensor. So after a
write to the base a view would keep its old gradient, and if it had to be copied its old values too. A view therefore
remembers the call that took it, and repeats that on the base as it is now. A plain tensor, with no padded dim left,
can't remember it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import tree_find
from subtensors.padded.padded_tensor import PaddedTensor


@dataclass(eq=False)
class ViewSource:
    """The origin of a view: its base, and the call that takes it.

    Args:
        held: returns the base; None if nothing holds it any more, as a copied view doesn't.
        view: takes the view of a base.
        versions: those of the base, and of what that is a view of, when the view was taken.
        latest: the view as last retaken; None if it was never retaken.
    """

    held: Callable[[], PaddedTensor | None]
    view: Callable[[PaddedTensor], Any]
    versions: tuple[int, ...]
    latest: PaddedTensor | None = None


def remember(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, plain: Sequence[Tensor]
) -> None:
    """Store the origin of the views that a call returned.

    Args:
        func, args, kwargs: the call.
        out: its result.
        plain: the plain tensors in the result that share the first argument's memory.
    """
    if not args or not isinstance(args[0], PaddedTensor) or args[0]._dense.is_inference():
        return
    base, rest = args[0], args[1:]
    note_plain(base, plain)
    for i, result in enumerate(tree_find(Tensor, out)):
        if not isinstance(result, PaddedTensor) or result is base:
            continue
        if result._view == "copy" or (result._view and torch.is_grad_enabled()):
            if result._view == "copy":
                for whole in _wholes(base):
                    whole._copies = [*(held for held in whole._copies if held() is not None), weakref.ref(result)]
            result._origin = ViewSource(
                weakref.ref(base) if result._view == "copy" else lambda: base,
                lambda whole, i=i: tree_find(Tensor, func(whole, *rest, **kwargs))[i],  # type: ignore[misc]
                _versions(base, result._view == "copy"),
            )


def current(x: PaddedTensor) -> PaddedTensor:
    """The view, retaken if its base was written to; another tensor itself."""
    origin: ViewSource | None = x._origin
    if origin is None:
        return x
    base = origin.held()
    versions = _versions(base, x._view == "copy") if base is not None else origin.versions
    if base is not None and versions != origin.versions:
        new = origin.view(base)
        origin.latest, origin.versions = new, versions
        x._dense, x._dims, x._sizes, x._fill, x._written = new._dense, new._dims, new._sizes, new._fill, new._written
    return x if origin.latest is None else origin.latest


def refresh_copies(x: PaddedTensor) -> None:
    """Retake the copied views of a tensor that was just written to: a copy doesn't share the memory of its base."""
    for whole in _wholes(x):
        for held in whole._copies:
            copied = held()
            if copied is not None:
                current(copied)


def note_plain(base: PaddedTensor, plain: Sequence[Tensor]) -> None:
    """Note plain tensors that share the memory of a padded one."""
    if plain and torch.is_grad_enabled():
        for x in _wholes(base):
            alive = [held for held in x._plain_views if held() is not None]
            x._plain_views = [*alive, *map(weakref.ref, plain)]


def refuse_plain_views(x: PaddedTensor) -> None:
    """Raise RuleError if a plain view is alive, which would keep the gradient of what is about to be overwritten."""
    if any(held() is not None for held in x._plain_views):
        raise RuleError(
            "a plain view of this PaddedTensor is held, which would not follow what is written to it where autograd "
            "does: take it afterwards, or write to a clone"
        )


def _wholes(x: PaddedTensor) -> Iterator[PaddedTensor]:
    """Yield a tensor, its base, and so on."""
    whole: PaddedTensor | None = x
    while whole is not None:
        yield whole
        whole = whole._origin.held() if whole._origin is not None else None


def _versions(x: PaddedTensor, copied: bool) -> tuple[int, ...]:
    """The versions of a tensor and its bases; with `copied` also of their storages, which count all writes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(v for whole in _wholes(x) for v in (whole._version, whole._dense._version if copied else 0))
