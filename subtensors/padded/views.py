"""Views of padded tensors: each remembers its base, and is retaken from it after the base was written to.

Autograd tracks a tensor's storage through the rules, and sees every result of a rule as a separate tensor. So after a
write to the base a view would keep its old gradient, and if it had to be copied its old values too. A view therefore
remembers the call that took it, and repeats the call on the base's new values. A plain tensor, with no padded dim left,
can't remember it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.lazy_storage import is_lazy
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.torch_internals.memory import storage_id
from subtensors.padded.padded_tensor import PaddedTensor, ViewSource


def remember_views(
    func: Callable[..., PyTree], args: Args, kwargs: Kwargs, out: PyTree, plain_views: Sequence[Tensor]
) -> None:
    """Store the source of the views that a call returned, some of which are plain and share an argument's memory."""
    # Torch takes views of arguments by position, or of those in a list.
    given = [x for x in args if type(x) is PaddedTensor] or tree_find(PaddedTensor, (args, kwargs))
    if not given or given[0]._dense.is_inference():
        return
    for plain_view in plain_views:
        track_plain_views(_base_of(plain_view, given), [plain_view])
    for i, result in enumerate(tree_find(Tensor, out)):
        # An argument among the results, such as `out=`, is no view that this call took.
        if not isinstance(result, PaddedTensor) or any(result is x for x in given):
            continue
        is_copy = result._view == "copy"
        if is_copy or (result._view and (torch.is_grad_enabled() or is_lazy(result._dense))):
            base = _base_of(result._dense, given)
            if is_copy:
                for x in _with_bases(base):
                    x._copied_views = [*(view for view in x._copied_views if view() is not None), weakref.ref(result)]
            result._view_source = _source_of(base, func, args, kwargs, i, is_copy)


def _base_of(view: Tensor, given: Sequence[PaddedTensor]) -> PaddedTensor:
    """Return the argument whose memory a result is in; the first one for a result that was copied."""
    if len(given) == 1:
        return given[0]
    storage = storage_id(view)
    return next((x for x in given if storage_id(x._dense) == storage), given[0])


def _source_of(
    base: PaddedTensor, func: Callable[..., PyTree], args: Args, kwargs: Kwargs, index: int, is_copy: bool
) -> ViewSource:
    """Return the source of a view: its base, and the call of which it is a result."""
    versions = _versions(base, is_copy)
    # A base that is itself a view may have no other holder, as in `x.flatten()[2:4].zero_()`.
    if is_copy and not base._view:
        place = weakref.ref(base)
        call = tree_map_only(PaddedTensor, lambda t: place if t is base else t, (args, kwargs))
        return ViewSource(place, func, call, place, index, versions)
    if list in map(type, (*args, *kwargs.values())):  # which the caller may write to
        args, kwargs = tree_map_only(PaddedTensor, lambda t: t, (args, kwargs))
    return ViewSource(lambda: base, func, (args, kwargs), base, index, versions)


def refresh_view(x: PaddedTensor) -> PaddedTensor:
    """Return a view, retaken if its base was written to; return any other tensor itself."""
    source = x._view_source
    if source is None:
        return x
    base = source.base()
    versions = _versions(base, x._view == "copy") if base is not None else source.versions
    if base is not None and versions != source.versions:
        new = source.view(base)
        assert isinstance(new, PaddedTensor)
        source.latest, source.versions = new, versions
        x._dense, x._layout, x._sizes, x._fill_version = new._dense, new._layout, new._sizes, new._fill_version
    return x if source.latest is None else source.latest


def is_current(x: PaddedTensor) -> bool:
    """Return whether a tensor is no view, or its base was not written to since the view was taken."""
    source = x._view_source
    if source is None:
        return True
    base = source.base()
    return source.latest is None and (base is None or _versions(base, x._view == "copy") == source.versions)


def refresh_copies(x: PaddedTensor) -> None:
    """Retake the copied views of a tensor that was just written to: a copy doesn't share the memory of its base."""
    for base in _with_bases(x):
        for copied_view in base._copied_views:
            view = copied_view()
            if view is not None:
                refresh_view(view)


def track_plain_views(base: PaddedTensor, plain_views: Sequence[Tensor]) -> None:
    """Note plain tensors that share the memory of a padded one."""
    if plain_views and torch.is_grad_enabled():
        for x in _with_bases(base):
            alive = [view for view in x._plain_views if view() is not None]
            x._plain_views = [*alive, *map(weakref.ref, plain_views)]


def check_no_plain_views(x: PaddedTensor) -> None:
    """Raise RuleError if a plain view is alive, which would keep the gradient of what is about to be overwritten."""
    if any(view() is not None for view in x._plain_views):
        raise RuleError(
            "a plain view of this PaddedTensor is in use, and autograd would not see in it what is written here: take "
            "the view after the write, or write to a clone"
        )


def _with_bases(x: PaddedTensor) -> Iterator[PaddedTensor]:
    """Yield a tensor, its base, the base of that, and so on."""
    base: PaddedTensor | None = x
    while base is not None:
        yield base
        base = base._view_source.base() if base._view_source is not None else None


def _versions(x: PaddedTensor, with_storage: bool) -> tuple[int, ...]:
    """The versions of a tensor and its bases, and with `with_storage` of their storages, which count all writes."""
    with torch._C.DisableTorchFunctionSubclass():
        if x._view_source is None:
            return x._version, x._dense._version if with_storage else 0
        return tuple(v for base in _with_bases(x) for v in (base._version, base._dense._version if with_storage else 0))
