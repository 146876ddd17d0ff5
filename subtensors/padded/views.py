"""What a view of a padded tensor is a view of: it is taken again after the whole was written to.

Autograd follows a tensor's storage through the rules, and to it every result of a rule is a tensor of its own. So of a
write to the whole a view would keep its old gradient, and where it had to be copied its old values too. A view knows
the call that took it, and is that of the whole as it is now. A plain tensor, with no padded dim left, can't know.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.tree import found
from subtensors.padded.padded_tensor import PaddedTensor


@dataclass(eq=False)
class ViewSource:
    """Where a view comes from.

    Args:
        held: gives what it is a view of; None where nobody holds that any more, and a copy holds it not either.
        view: takes it.
        versions: of the base and what that is a view of, when it was taken.
        latest: the view as it was taken last; None where that is the view itself.
    """

    held: Callable[[], PaddedTensor | None]
    view: Callable[[PaddedTensor], Any]
    versions: tuple[int, ...]
    latest: PaddedTensor | None = None


def remember(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, plain: Sequence[Tensor]
) -> None:
    """Have the views that a call gave know where they come from.

    Args:
        func, args, kwargs: the call.
        out: what it gave.
        plain: those of its results that lie in the first argument's memory, and are plain.
    """
    if not args or not isinstance(args[0], PaddedTensor) or args[0]._dense.is_inference():
        return
    base, rest = args[0], args[1:]
    note_plain(base, plain)
    for i, result in enumerate(found(Tensor, out)):
        if not isinstance(result, PaddedTensor) or result is base:
            continue
        if result._view == "copy" or (result._view and torch.is_grad_enabled()):
            if result._view == "copy":
                for whole in _wholes(base):
                    whole._copies = [*(held for held in whole._copies if held() is not None), weakref.ref(result)]
            result._origin = ViewSource(
                weakref.ref(base) if result._view == "copy" else lambda: base,
                lambda whole, i=i: found(Tensor, func(whole, *rest, **kwargs))[i],  # type: ignore[misc]
                _versions(base, result._view == "copy"),
            )


def current(x: PaddedTensor) -> PaddedTensor:
    """A view as its whole is now; what is none as it is."""
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
    """Have views that had to be copied follow what was just written: a copy doesn't hold what it is a view of."""
    for whole in _wholes(x):
        for held in whole._copies:
            copied = held()
            if copied is not None:
                current(copied)


def note_plain(base: PaddedTensor, plain: Sequence[Tensor]) -> None:
    """Note plain tensors that lie in the memory of a padded one."""
    if plain and torch.is_grad_enabled():
        for x in _wholes(base):
            alive = [held for held in x._plain_views if held() is not None]
            x._plain_views = [*alive, *map(weakref.ref, plain)]


def refuse_plain_views(x: PaddedTensor) -> None:
    """Raise RuleError where a plain tensor would go on with the gradient of what is about to be overwritten."""
    if any(held() is not None for held in x._plain_views):
        raise RuleError(
            "a plain view of this PaddedTensor is held, which would not follow what is written to it where autograd "
            "does: take it afterwards, or write to a clone"
        )


def _wholes(x: PaddedTensor) -> Iterator[PaddedTensor]:
    """A tensor, what it is a view of, and so on."""
    whole: PaddedTensor | None = x
    while whole is not None:
        yield whole
        whole = whole._origin.held() if whole._origin is not None else None


def _versions(x: PaddedTensor, copied: bool) -> tuple[int, ...]:
    """How often a tensor and what it is a view of were written to: copies count what autograd doesn't follow, too."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(v for whole in _wholes(x) for v in (whole._version, whole._dense._version if copied else 0))
