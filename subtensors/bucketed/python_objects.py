"""Python objects in the arguments and results of a call: flattened to their tensors, and restored after a run.

An object that holds tensors is no container to torch's pytrees: `FlattenedObject` makes it one, by its attributes. What
a run of the program writes to an object among its arguments is detected and undone by an `ObjectSnapshot`. A run on
other tensors in the caller's own containers is a `replaced_leaves`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.reachable_state import slots_of
from subtensors.dispatch.graphs.guards import are_same
from subtensors.dispatch.ops.tree import PyTree

Attributes: TypeAlias = dict[str, object]


def attributes_of(x: object) -> Attributes:
    """Return the attributes of an object itself, including those in its slots.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> point.x = 1
    >>> attributes_of(point)
    {'x': 1}
    """
    return slots_of(x) | getattr(x, "__dict__", {})


_CONTAINERS = (dict, OrderedDict, list)  # a module's hooks are in the second


class ObjectSnapshot:
    """A snapshot of the attributes of some objects, and of the contents of the lists and dicts among these.

    Example:
        >>> from types import SimpleNamespace
        >>> cache = SimpleNamespace(steps=[1])
        >>> snapshot = ObjectSnapshot([cache])
        >>> cache.steps.append(2)
        >>> snapshot.restore()
        'SimpleNamespace'
        >>> cache.steps
        [1]
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._before: list[tuple[str, Any, Any]] = []
        for x in objects:
            attributes = attributes_of(x)
            self._before.append((type(x).__name__, x, attributes))
            for part in attributes.values():
                if isinstance(part, (dict, list)) and type(part) in _CONTAINERS:
                    self._before.append((type(x).__name__, part, part.copy()))

    def restore(self) -> str:
        """Undo what was written since the snapshot; return the class name of the first changed object, "" if none."""
        written = ""
        for name, part, before in self._before:
            is_container = type(part) in _CONTAINERS
            if _is_same(part if is_container else attributes_of(part), before):
                continue
            written = written or name
            if is_container:
                part.clear()
                part.update(before) if isinstance(part, dict) else part.extend(before)
            else:
                _set_attributes(part, before)
        return written


def _set_attributes(x: object, to: Attributes) -> None:
    now = attributes_of(x)
    for name in now.keys() - to.keys():
        object.__delattr__(x, name)
    for name, value in to.items():
        if name not in now or now[name] is not value:
            object.__setattr__(x, name, value)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and are_same(now.values(), before.values())
    return are_same(now, before)


class FlattenedObject:
    """The attributes of an object, as a pytree node; unflattening it makes a new object of the same class."""

    def __init__(self, kind: type, attributes: Attributes) -> None:
        self.kind, self.attributes = kind, attributes


def _parts(x: FlattenedObject) -> tuple[list[object], pytree.Context]:
    return list(x.attributes.values()), (x.kind, tuple(x.attributes))


def _named_parts(x: FlattenedObject) -> tuple[list[tuple[pytree.KeyEntry, object]], pytree.Context]:
    return [(pytree.GetAttrKey(name), part) for name, part in x.attributes.items()], _parts(x)[1]


def _unflatten(attributes: Iterable[object], context: pytree.Context) -> object:
    kind, names = context
    try:
        made = object.__new__(kind)
    except TypeError:  # of a class that is written in C
        made = kind.__new__(kind)
    for name, value in zip(names, attributes, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(FlattenedObject, _parts, _unflatten, flatten_with_keys_fn=_named_parts)


def flatten_result_objects(result: PyTree, given: Collection[int]) -> PyTree:
    """Return a result with objects that hold tensors flattened.

    Args:
        result: any pytree.
        given: ids of the program's arguments, which are not flattened.
    """

    def has_tensors(x: object, parts: list[object]) -> bool:
        return id(x) not in given and any(isinstance(part, Tensor) for part in parts)

    return _flatten_objects(result, has_tensors)


def flatten_argument_objects(arguments: PyTree) -> PyTree:
    """Return arguments with those dataclasses flattened that hold tensors, or cannot be hashed for a key.

    Example:
        >>> Options = dataclasses.make_dataclass("Options", ["scale"])
        >>> pytree.tree_leaves(flatten_argument_objects([Options(2.0)]))
        [2.0]
    """

    def is_flattened(x: object, parts: list[object]) -> bool:
        if not dataclasses.is_dataclass(x):
            return False
        return type(x).__hash__ is None or any(isinstance(part, Tensor) for part in parts)

    return _flatten_objects(arguments, is_flattened)


def _flatten_objects(tree: PyTree, is_flattened: Callable[[object, list[object]], bool]) -> PyTree:
    def flatten(x: object) -> object:
        if isinstance(x, (Tensor, torch.nn.Module, type, int)):
            return x
        own: Attributes = (
            {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else {}
        )
        own |= attributes_of(x)
        if not own:
            return x
        attributes = {name: pytree.tree_map(flatten, value) for name, value in own.items()}
        parts = [part for value in attributes.values() for part in pytree.tree_leaves(value)]
        return FlattenedObject(type(x), attributes) if is_flattened(x, parts) else x

    return pytree.tree_map(flatten, tree)


@contextmanager
def replaced_leaves(tree: PyTree, replacement: Callable[[PyTree], PyTree]) -> Iterator[PyTree]:
    """A context in which the leaves of arguments are replaced; gives the arguments.

    Lists, dicts and dataclasses stay the caller's own, so that what a program writes to them stays written; where they
    still hold a replacement at the end, they get their leaf back.

    Args:
        tree: a pytree; dataclasses in it count as containers.
        replacement: returns what stands for a leaf, which may be the leaf itself.

    Example:
        >>> given = [1, 2]
        >>> with replaced_leaves((given,), lambda x: x * 10) as (inside,):
        ...     print(inside)
        ...     inside.append(3)
        [10, 20]
        >>> given
        [1, 2, 3]
    """
    written: list[tuple[Any, object, object]] = []
    seen = set[int]()

    def replaced(x: Any) -> Any:
        if _is_writable(x):
            for name, part in _entries(x) if id(x) not in seen else ():
                seen.add(id(x))
                if (new := replaced(part)) is not part:
                    _set_entry(x, name, new)
                    written.append((x, part, new))
            return x
        parts, structure = pytree.tree_flatten(x, is_leaf=lambda part: part is not x)
        if structure.is_leaf():
            return replacement(x)
        new_parts = [*map(replaced, parts)]
        return x if are_same(new_parts, parts) else pytree.tree_unflatten(new_parts, structure)

    try:
        yield replaced(tree)
    finally:
        for x, part, new in reversed(written):
            for name, now in _entries(x):
                if now is new:
                    _set_entry(x, name, part)


def _is_writable(x: object) -> bool:
    return isinstance(x, (list, dict)) or (dataclasses.is_dataclass(x) and not isinstance(x, (type, Tensor)))


def _entries(x: Any) -> list[tuple[Any, object]]:
    return [*(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else attributes_of(x).items())]


def _set_entry(x: Any, name: Any, value: object) -> None:
    if isinstance(x, (list, dict)):
        x[name] = value
    else:
        object.__setattr__(x, name, value)
