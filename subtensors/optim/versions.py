"""Version stamps: an optimizer's state, and tensors, that record that they were changed.

Checking a thousand tensors in every step would take longer than the step. So `optimizer.state` and each entry of it are
dicts that put a new stamp on a `Version` at every change, and a step that finds the stamp it knows need not look at any
of them. Where a change leaves no trace that is cheap to find (`p.grad = g`, `p.data = t`, while something still holds
the old gradient or memory), the tensors are given a class that behaves as theirs does and stamps the change.

Copied or pickled, such a dict is a plain one, and such a tensor has its original class again.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from subtensors.dispatch.ops.plain_types import read_as_plain
from subtensors.dispatch.torch_internals.ops import enable_foreach_paths


class Version:
    """A stamp that is another object after every change."""

    def __init__(self) -> None:
        self.stamp = object()


def _stamping(method: Callable[..., Any], version: str = "version") -> Any:
    """Wrap a method so that each call puts a new stamp on the version in an attribute."""

    @wraps(method, assigned=("__name__",))  # not the documentation, whose examples are the original's
    def changing(self: object, *args: object, **kwargs: object) -> object:
        result = method(self, *args, **kwargs)
        getattr(self, version).stamp = object()
        return result

    return changing


class _VersionedDict(dict[Any, Any]):
    """A dict that stamps all of its changes."""

    __slots__ = ()
    version: Version

    __delitem__ = _stamping(dict.__delitem__)
    pop = _stamping(dict.pop)
    popitem = _stamping(dict.popitem)
    clear = _stamping(dict.clear)

    def __setitem__(self, key: object, value: object) -> None:
        self.version.stamp = object()
        super().__setitem__(key, value)

    def setdefault(self, key: object, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: object) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self


class Entry(_VersionedDict):
    """The state of one parameter: its tensors by name."""

    __slots__ = ("version",)

    def __init__(self, entries: Mapping[str, Any] | None = None, version: Version | None = None) -> None:
        super().__init__(entries or {})
        self.version = version or Version()

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


class States(_VersionedDict, defaultdict[Any, Any]):
    """The state of an optimizer: for each parameter its entry, an empty one when it is first asked for.

    A dict that is put into it is copied, so that changes of its content are stamped.

    Args:
        default_factory: only dict; it is here because defaultdict passes it on to copies.
        entries: its first content.
    """

    __slots__ = ("version",)

    def __init__(self, default_factory: type[dict[str, Any]] = dict, entries: object = ()) -> None:
        super().__init__(default_factory)
        self.version = Version()
        self.update(entries)

    def __setitem__(self, key: object, value: object) -> None:
        is_own = isinstance(value, Entry) and value.version is self.version
        super().__setitem__(key, Entry(value, self.version) if isinstance(value, dict) and not is_own else value)

    def __missing__(self, key: object) -> Entry:
        self[key] = {}
        entry: Entry = self[key]
        return entry

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict, self)

    copy = __copy__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return defaultdict, (dict, dict(self))


_VERSION = "_watched_by"
"""The attribute of a watched tensor that holds its version."""

_stamping_call = partial(_stamping, version=_VERSION)


def _stamping_attribute(attribute: Any) -> Any:
    """Wrap a tensor attribute so that setting or deleting it is stamped."""
    return property(attribute.__get__, _stamping_call(attribute.__set__), _stamping_call(attribute.__delete__))


class WatchedTensor(Tensor):
    """A tensor that stamps its version when it is given other memory, or another gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    grad = _stamping_attribute(Tensor.grad)
    _grad = _stamping_attribute(Tensor._grad)
    data = _stamping_attribute(Tensor.data)
    set_ = _stamping_call(Tensor.set_)
    _use_count = _stamping_call(Tensor._use_count)  # type: ignore[attr-defined]  # torch.utils.swap_tensors asks it

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_unwatched_alias(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _unwatched_alias(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_unwatched_alias(self))


for _name in ("as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_"):
    setattr(WatchedTensor, _name, _stamping_call(getattr(Tensor, _name)))


class WatchedParameter(WatchedTensor, Parameter):
    """A parameter that stamps its version when it is given other memory, or another gradient."""


_WATCHED: dict[type[Tensor], type[Tensor]] = {Tensor: WatchedTensor, Parameter: WatchedParameter}
_ORIGINAL = {watched: original for original, watched in _WATCHED.items()}


def watch(tensors: Iterable[Tensor], version: Version) -> None:
    """Stamp the version whenever one of these plain tensors, whose class changes, is given other memory or a gradient.

    Example:
        >>> p, version = Parameter(torch.ones(2)), Version()
        >>> watch([p], version)
        >>> before = version.stamp
        >>> p.add(1).sum().backward()
        >>> version.stamp is before
        True
        >>> p.grad = None
        >>> version.stamp is before
        False
    """
    for kind in _ORIGINAL:
        enable_foreach_paths(kind)
    for t in tensors:
        vars(t)[_VERSION] = version
        t.__class__ = _WATCHED[type(t)]


def unwatch(tensors: Iterable[Tensor | None]) -> None:
    """Give watched tensors their original class back; skip tensors that are not watched, and None."""
    for t in tensors:
        if t is not None and type(t) in _ORIGINAL:
            t.__class__ = _ORIGINAL[type(t)]
            del vars(t)[_VERSION]


def _unwatched_alias(t: Tensor) -> Tensor:
    """The same memory, attributes and gradient as a tensor of its original class."""
    alias = Tensor._make_subclass(_ORIGINAL[type(t)], t.data, t.requires_grad)
    alias.grad = t.grad
    vars(alias).update({name: value for name, value in vars(t).items() if name != _VERSION})
    return alias


for _kind in _ORIGINAL:
    read_as_plain(_kind, "a change of a packed parameter's memory or gradient is stamped outside of a graph")
