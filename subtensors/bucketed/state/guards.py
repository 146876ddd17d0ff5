"""Guards of what a program reads besides its arguments, checked on every call: `StateGuard.first_change()`.

A captured graph reads tensors at fixed addresses, and holds Python values as constants. A guard is a snapshot of one
kind of these, which is compared with the present:

| guard | compares |
|---|---|
| `TensorSnapshot` | address, dtype and layout of parameters, buffers and other tensors |
| `AttributeGuard` | plain values and functions in the attributes of modules and objects |
| `StateGuard` | both of these, the modules, their hooks and training flags, and the optimizers |

A value that the program itself writes while it runs, such as a count of its calls, is guarded no longer: it changes
with every run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
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

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

Attributes: TypeAlias = "dict[str, Any]"
LocatedValue: TypeAlias = "tuple[Location, object]"


def is_plain(x: object) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    return type(x) in PLAIN or (type(x) is tuple and all(map(is_plain, x)))


class Location(NamedTuple):
    """The location of a value: a key of a dict or list, or a cell of a closure.

    Args:
        holder: the dict, list or cell.
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


class AttributeGuard:
    """A snapshot of the plain values and functions in some dicts, to be compared with their later values.

    Args:
        dicts: each dict with the keys that count.

    Example:
        >>> options = {"scale": 2.0, "calls": 1}
        >>> guard = AttributeGuard([(options, ["scale"])])
        >>> options["scale"] = 3.0
        >>> guard.first_change()
        'scale'
    """

    def __init__(self, dicts: Iterable[tuple[Attributes, Iterable[str]]]) -> None:
        found = [(d, [name for name in names if _is_constant(d[name])]) for d, names in dicts]
        self._snapshots: dict[object, list[tuple[object, ...]]] = {}
        self._watch([(d, names) for d, names in found if names])
        self.first_change()

    def _watch(self, dicts: list[tuple[Attributes, list[str]]]) -> None:
        self._dicts = dicts
        # Read dict by dict in half the time of one by one; two names at least give a tuple.
        self._readers = [(itemgetter(*names, names[0]), d) for d, names in dicts]

    def first_change(self, key: object = None) -> str:
        """Return the name of the first value that changed; "" if nothing did.

        Args:
            key: calls with another one have values, and graphs, of their own.
        """
        try:
            now = [get(d) for get, d in self._readers]
        except KeyError as error:  # a name was removed
            return str(error.args[0])
        before = self._snapshots.setdefault(key, now)
        if _are_equal(now, before):
            return ""
        names = chain.from_iterable((*names, names[0]) for _, names in self._dicts)
        values = zip(names, chain.from_iterable(now), chain.from_iterable(before), strict=True)
        return next((name for name, x, y in values if not _are_equal(x, y)), "")

    @contextmanager
    def ignoring_own_changes(self) -> Iterator[None]:
        """A context in which the program runs: values that it changes are not watched any more."""
        before = [(d, name, d.get(name)) for d, names in self._dicts for name in names]
        try:
            yield
        finally:
            # Lists compare what is the same object as equal, which a tensor in a value's place would refuse.
            changed = {(id(d), name) for d, name, value in before if not _are_equal([d.get(name)], [value])}
            if changed:
                self._stop_watching(changed)

    def _stop_watching(self, changed: Collection[tuple[int, str]]) -> None:
        kept = [[(id(d), name) not in changed for name in names] for d, names in self._dicts]
        for key, rows in self._snapshots.items():
            left = [tuple(compress(row, keep)) for row, keep in zip(rows, kept, strict=True)]
            self._snapshots[key] = [(*row, row[0]) for row in left if row]
        dicts = [(d, list(compress(names, keep))) for (d, names), keep in zip(self._dicts, kept, strict=True)]
        self._watch([(d, names) for d, names in dicts if names])


class StateGuard:
    """One snapshot of all state that a program's graphs depend on.

    Args:
        parts: the modules and tensors that the program reaches.
        locations: where it finds them and its functions, each with the value found there.
        attributes: the attributes of its modules and objects, each dict with the names that its code reads.
        optimizer_change: says what changed of its optimizers; None if it has none.
    """

    def __init__(
        self,
        parts: Iterable[object],
        locations: Iterable[LocatedValue],
        attributes: Iterable[tuple[Attributes, Iterable[str]]],
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
        self.user_key: object = None
        """What `st.bucketed`'s `key` gave for the last call; plain attributes may have other values for each."""
        self._plain_attributes = AttributeGuard(attributes)
        self._hooks: list[dict[int, object]] = [getattr(m, kind) for m in self.modules for kind in HOOKS]
        self._hook_ids = self._present_hook_ids()
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
        if self._present_hook_ids() != self._hook_ids:
            return "a hook of a module changed, which a graph holds as a constant"
        if name := self._plain_attributes.first_change(self.user_key):
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
        hook_ids = self._present_hook_ids()
        try:
            with self._plain_attributes.ignoring_own_changes():
                yield
        finally:
            if self._present_hook_ids() != hook_ids:
                self._hook_ids = self._present_hook_ids()

    def _present_hook_ids(self) -> list[int]:
        return list(chain.from_iterable(self._hooks)) if any(self._hooks) else []


def _is_constant(x: object) -> bool:
    return is_plain(x) or isinstance(x, _FUNCTIONS)


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
