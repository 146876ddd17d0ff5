"""Guards of what a program reads besides its arguments, checked on every call: `StateGuard.first_change()`.

A captured graph reads tensors at fixed addresses, and holds Python values as constants. A guard is a snapshot of one
kind of these, which is compared with the present:

| guard | compares |
|---|---|
| `TensorSnapshot` | address, dtype and layout of parameters, buffers and other tensors |
| `ConstantGuard` | plain values that the program's Python reads, and module hooks |
| `NewAttributes` | the names in objects and small containers |
| `StateGuard` | all of these, the modules, their training flags, and the optimizers |

A value that the program itself writes while it runs, such as a count of its calls, is guarded no longer: it changes
with every run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from subtensors.dispatch.graphs.guards import IdentityGuard
from subtensors.dispatch.graphs.released_tensors import Release, check_resident

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Kinds of values that Python code computes with, or decides by."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module holds its hooks."""

TENSOR_PROPERTIES: dict[str, Callable[[Tensor], object]] = {
    "address": Tensor.data_ptr,
    "device": attrgetter("device"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
    "strides": Tensor.stride,
    "conjugation": Tensor.is_conj,
    "negation": Tensor.is_neg,
}
"""The properties of a tensor that a graph depends on: by name, the function that reads it."""

CELL = object()
"""The key of the contents of a closure cell."""

_MAX_MODES = 4
"""Combinations of grad mode, inference mode and autocast that a program is called in."""

_VALUES = methodcaller("values")
_TRAINING = itemgetter("training")

LocatedValue: TypeAlias = "tuple[Location, object]"


def is_plain(x: object) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    return type(x) in PLAIN or (type(x) is tuple and all(map(is_plain, x)))


def slots_of(x: object) -> dict[str, object]:
    """Return the attributes in the slots of an object."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    return {name: getattr(x, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(x, name)}


class Slots:
    """The slots of an object, read like a dict."""

    def __init__(self, x: object) -> None:
        self._x = x

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self._x, name)
        except AttributeError as error:
            raise KeyError(name) from error


class Location(NamedTuple):
    """The location of a value: a key of a dict or list, a slot of an object, or a cell of a closure.

    Args:
        holder: the dict, list, slots or cell.
        key: the key in it, `CELL` for a cell.
        is_attribute: whether the dict holds the attributes of an object.
    """

    holder: Any
    key: object
    is_attribute: bool = False

    @property
    def name(self) -> str:
        """The name of the location, for messages."""
        return self.key if isinstance(self.key, str) else "a part of the program"

    def now(self) -> object:
        """Return the value at the location now; None if there is none."""
        try:
            return self.holder.cell_contents if self.key is CELL else self.holder[self.key]
        except (ValueError, LookupError):
            return None


def tensor_properties(t: Tensor) -> tuple[object, ...] | None:
    """Return the `TENSOR_PROPERTIES` of one tensor; None if it has no address, such as a sparse one."""
    try:
        return tuple([read(t) for read in TENSOR_PROPERTIES.values()])
    except (RuntimeError, ValueError):  # torch's; a parameter of a lazy module has no size before the first call
        return None


class TensorSnapshot:
    """A snapshot of some tensors, to be compared with later ones.

    A guard in C++ compares all of them at once; if it reports a difference, `TENSOR_PROPERTIES` decide.

    Args:
        tensors: the tensors, in the order in which later ones are given too.

    Example:
        >>> w = torch.ones(2, 2)
        >>> snapshot = TensorSnapshot([w])
        >>> w.data = w.data.t()
        >>> snapshot.matches([w]), snapshot.first_change([w])
        (False, (0, 'strides'))
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._properties = [tensor_properties(t) for t in tensors]
        self._guard = IdentityGuard(tensors, _MAX_MODES) if None not in self._properties else None
        with torch.no_grad():
            # Keeps the memory alive, even if `.data` is replaced.
            self._memory = [t.detach() for t, known in zip(tensors, self._properties, strict=True) if known is not None]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor still matches its snapshot."""
        if self._guard is not None and self._guard.matches(tensors):
            return True
        if self.first_change(tensors) is not None:
            return False
        if self._guard is not None:
            self._guard.accept_mode(tensors)
        return True

    def first_change(self, tensors: Sequence[Tensor]) -> tuple[int, str] | None:
        """Return the index of the first tensor that changed and the property that did; None if none changed."""
        for i, (t, before) in enumerate(zip(tensors, self._properties, strict=False)):
            if (now := tensor_properties(t)) != before:
                changed = zip(TENSOR_PROPERTIES, now or (), before or (), strict=False)
                return i, next((name for name, a, b in changed if a != b), "memory")
        known = len(self._properties)
        return None if len(tensors) == known else (min(len(tensors), known), "count")


class ConstantGuard:
    """A snapshot of plain values and hooks, to be compared with their later values.

    Args:
        constants: the locations where the program finds plain values, each with its value.
        modules: the modules whose hooks it runs.

    Example:
        >>> options = {"scale": 2.0}
        >>> guard = ConstantGuard([(Location(options, "scale"), 2.0)], [])
        >>> options["scale"] = 3.0
        >>> guard.first_change()
        'scale'
    """

    def __init__(self, constants: Iterable[LocatedValue], modules: Sequence[nn.Module]) -> None:
        self._hooks: list[dict[int, object]] = [getattr(m, kind) for m in modules for kind in HOOKS]
        self._hook_ids = self.hook_ids()
        self._watch(list(constants))

    def _watch(self, constants: Sequence[LocatedValue]) -> None:
        self._locations, self._values = [place for place, _ in constants], [value for _, value in constants]
        keys_of: dict[int, tuple[dict[object, object], list[object]]] = {}
        self._outside_dicts: list[Location] = []
        for location in self._locations:
            if type(location.holder) is dict:
                keys_of.setdefault(id(location.holder), (location.holder, []))[1].append(location.key)
            else:
                self._outside_dicts.append(location)
        self._dicts = [(itemgetter(*keys), holder) for holder, keys in keys_of.values()]
        # A value that changed before this snapshot must not pass for the captured one.
        self._snapshot = self._read_fast() if _are_equal(self.values(), self._values) else None

    def _read_fast(self) -> tuple[list[object], list[object]] | None:
        """Return all values, read dict by dict in half the time of one by one; None if a name was removed."""
        try:
            return [get(holder) for get, holder in self._dicts], [x.now() for x in self._outside_dicts]
        except KeyError:
            return None

    def values(self) -> list[object]:
        """Return the present values."""
        return [location.now() for location in self._locations]

    def watched(self) -> list[LocatedValue]:
        """Return the locations that are watched, each with its present value."""
        return list(zip(self._locations, self.values(), strict=True))

    def hook_ids(self) -> list[int]:
        """Return the ids of the present hooks, which are unique."""
        return list(chain.from_iterable(self._hooks)) if any(self._hooks) else []

    def first_change(self) -> str:
        """Return the name of the first value that changed, or "a hook of a module"; "" if nothing changed."""
        if self.hook_ids() != self._hook_ids:
            return "a hook of a module"
        if self._snapshot is not None and _are_equal(self._read_fast(), self._snapshot):
            return ""
        pairs = zip(self._locations, self.values(), self._values, strict=True)
        return next((location.name for location, now, before in pairs if not _are_equal(now, before)), "")

    def ignore_changes_since(self, hook_ids: list[int], watched: Sequence[LocatedValue]) -> None:
        """Stop watching what a run of the program changed: `hook_ids()` and `watched()` before it are given.

        A run may call the program's runner, within which fewer locations are watched after a change.
        """
        if self.hook_ids() != hook_ids:
            self._hook_ids = self.hook_ids()
        now = [(location, location.now(), before) for location, before in watched]
        # Lists compare what is the same object as equal, which a tensor in a value's place would refuse.
        changed = {id(location) for location, after, before in now if not _are_equal([after], [before])}
        if changed:
            pairs = zip(self._locations, self._values, strict=True)
            self._watch([(location, value) for location, value in pairs if id(location) not in changed])


class Holder(NamedTuple):
    """The attributes of an object, or a container.

    Args:
        items: a dict or list.
        is_object: whether these are attributes; then only names that occur in the program's code count.
    """

    items: dict[Any, Any] | list[Any]
    is_object: bool


class NewAttributes:
    """A snapshot of the keys of some holders, to be compared with their later keys.

    Code may ask whether a name exists (`getattr(self, "scale", 1)`), or find an object's name before its class's.

    Args:
        holders: distinct ones.
        names: the names in the code of the program.

    Example:
        >>> keys = NewAttributes([Holder(attributes := {"scale": 2}, True)], {"scale", "shift"})
        >>> attributes["other"] = 1
        >>> keys.first_change()
        ''
        >>> attributes["shift"] = 1
        >>> keys.first_change()
        'shift'
    """

    def __init__(self, holders: Iterable[Holder], names: Collection[object]) -> None:
        self._holders, self._names = list(holders), names
        self._items = [holder.items for holder in self._holders]
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        self._lengths = self.lengths()
        self._keys = [frozenset(items) if isinstance(items, dict) else None for items in self._items]

    def lengths(self) -> list[int]:
        """Return the present number of items of each holder."""
        return list(map(len, self._items))

    def first_change(self) -> str:
        """Return the name of the first key that was added or removed; "" if there is none."""
        if self.lengths() == self._lengths:
            return ""
        for holder, length, keys in zip(self._holders, self._lengths, self._keys, strict=True):
            if len(holder.items) != length:
                if keys is None:
                    return "a list of the program"
                changed = keys.symmetric_difference(holder.items)
                if counted := [key for key in changed if not holder.is_object or key in self._names]:
                    return str(counted[0])
        self._take_snapshot()
        return ""

    def ignore_changes_since(self, lengths: list[int]) -> None:
        """Accept what a run of the program added: `lengths()` before it is given."""
        if self.lengths() != lengths:
            self._take_snapshot()


class StateGuard:
    """One snapshot of all state that a program's graphs depend on.

    Args:
        parts: the modules and tensors that the program reaches.
        locations: where it finds them and its functions, each with the value found there.
        constants: where it finds plain values, each with the value.
        holders: the objects and small containers that it reads from.
        names: the names in its code.
        optimizer_change: says what changed of its optimizers; None if it has none.
    """

    def __init__(
        self,
        parts: Iterable[object],
        locations: Iterable[LocatedValue],
        constants: Iterable[LocatedValue],
        holders: Iterable[Holder],
        names: Collection[object],
        optimizer_change: Callable[[], str] | None,
    ) -> None:
        parts = list(parts)
        self.roots = [x for x in parts if isinstance(x, nn.Module)]
        self.modules = list(dict.fromkeys(module for root in self.roots for module in root.modules()))
        self.closed_over = [x for x in parts if isinstance(x, Tensor)]
        """Tensors that no module registers."""
        self._locations, self._optimizer_change = list(locations), optimizer_change
        self._tensor_dicts: list[dict[str, Any]] = [d for m in self.modules for d in (m._parameters, m._buffers) if d]
        self._module_dicts: list[dict[str, Any]] = [m._modules for m in self.modules if m._modules]
        self._registered, self._children = _all_values(self._tensor_dicts), _all_values(self._module_dicts)
        self._attributes = [vars(m) for m in self.modules if "training" in vars(m)]
        self._scripted = [m for m in self.modules if "training" not in vars(m)]
        self._training_flags = {self.training(): self._all_training_flags()}
        """The training flags of all modules, by those of the outermost ones: each combination has its own graphs."""
        self._constants = ConstantGuard(constants, self.modules)
        self._new_attributes = NewAttributes(holders, names)
        self.distinct_tensors = _distinct(self.tensors())
        """The tensors of the snapshot, each once."""
        self._snapshot = TensorSnapshot(self.distinct_tensors)

    def tensors(self) -> list[Tensor]:
        """Return the current parameters, buffers and tensors that the program closes over."""
        return [t for t in _all_values(self._tensor_dicts) if t is not None] + self.closed_over

    def training(self) -> tuple[bool, ...]:
        """Return for each outermost module whether it is in training mode."""
        return tuple([root.training for root in self.roots])

    def _all_training_flags(self) -> list[bool]:
        return [*map(_TRAINING, self._attributes), *[m.training for m in self._scripted]]

    def grad_flags(self, leaves: Iterable[object]) -> tuple[bool, ...] | None:
        """Return for each tensor of the state whether it requires grad; None if autograd does not track the call.

        Args:
            leaves: the leaves of the call's arguments.
        """
        if not torch.is_grad_enabled():
            return None
        flags = tuple([t.requires_grad for t in self.tensors()])
        is_tracked = any(flags) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return flags if is_tracked else None

    def check_resident(self) -> None:
        """Raise AddressError if the memory of a tensor is released."""
        if Release.count:
            check_resident((self.distinct_tensors,))

    def first_change(self) -> str:
        """Return what changed since the snapshot, in words; "" if nothing did."""
        registered = _all_values(self._tensor_dicts)
        if not _are_same(registered, self._registered) or not self._snapshot.matches(self.distinct_tensors):
            return self._first_tensor_change()
        for location, value in self._locations:
            if location.now() is not value:
                return f"{location.name} was replaced"
        if not _are_same(_all_values(self._module_dicts), self._children):
            return "a module was replaced"
        flags = self._all_training_flags()
        if self._training_flags.setdefault(self.training(), flags) != flags:
            return "a module changed between training and evaluation"
        if name := self._constants.first_change() or self._new_attributes.first_change():
            return f"{name} changed, which a graph holds as a constant"
        return self._optimizer_change() if self._optimizer_change is not None else ""

    def _first_tensor_change(self) -> str:
        tensors = _distinct(self.tensors())
        index, what = self._snapshot.first_change(tensors) or (0, "count")
        if what == "count":
            return "a tensor was replaced"
        named = [pair for root in self.roots for pair in (*root.named_parameters(), *root.named_buffers())]
        name = next((name for name, t in named if t is tensors[index]), "a tensor")
        return f"{name} was replaced: its {what} changed"

    def ignore_replaced(self) -> None:
        """Stop watching locations whose value was replaced by now: the program itself replaced it."""
        self._locations = [(location, value) for location, value in self._locations if location.now() is value]

    @contextmanager
    def during_run(self) -> Iterator[None]:
        """A context in which the program runs: what it writes itself is not guarded."""
        hook_ids, watched = self._constants.hook_ids(), self._constants.watched()
        lengths = self._new_attributes.lengths()
        try:
            yield
        finally:
            self._new_attributes.ignore_changes_since(lengths)
            self._constants.ignore_changes_since(hook_ids, watched)


def _are_equal(now: object, before: object) -> bool:
    """Return whether two values are equal; False if comparing raises, as it may where a tensor took a value's place."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError, TypeError):
        return False


def _all_values(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, dicts)))


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _are_same(now: Sequence[object], before: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects; `==` would compare tensors elementwise."""
    return len(now) == len(before) and all(map(is_, now, before))
