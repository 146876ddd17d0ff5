"""Snapshots of identity-keyed arguments, which detect and undo what a run of the program writes to them."""

from __future__ import annotations

import types
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor

BY_IDENTITY: Any = object.__hash__
"""The `__hash__` of a class whose objects are equal only to themselves."""


def is_by_identity(x: Any) -> bool:
    """Return whether a value is an object with attributes that is equal only to itself."""
    kind = type(x)
    if kind.__hash__ is not BY_IDENTITY or issubclass(kind, (type, types.FunctionType, Tensor)):
        return False
    return hasattr(x, "__dict__")


def attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, including those in its slots.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> point.x = 1
    >>> attributes_of(point)
    {'x': 1}
    """
    slots = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    names = [name for held in slots for name in ([held] if isinstance(held, str) else held)]
    found = {name: getattr(x, name) for name in names if name != "__dict__" and hasattr(x, name)}
    return found | getattr(x, "__dict__", {})


class ObjectSnapshot:
    """A snapshot of the attributes of some objects, and of the contents of the lists and dicts among these.

    Example:
        >>> cache = types.SimpleNamespace(steps=[1])
        >>> kept = ObjectSnapshot([cache])
        >>> cache.steps.append(2)
        >>> kept.put_back()
        'SimpleNamespace'
        >>> cache.steps
        [1]
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._kept: list[tuple[str, Any, Any]] = []
        for x in objects:
            held = attributes_of(x)
            self._kept.append((type(x).__name__, x, held))
            for part in held.values():
                if type(part) in (dict, list):
                    self._kept.append((type(x).__name__, part, part.copy()))

    def put_back(self) -> str:
        """Undo what was written since the snapshot; return the class name of the first changed object, "" if none."""
        written = ""
        for name, part, before in self._kept:
            is_container = type(part) in (dict, list)
            if _is_same(part if is_container else attributes_of(part), before):
                continue
            written = written or name
            if is_container:
                part.clear()
                part.update(before) if isinstance(part, dict) else part.extend(before)
            else:
                _set_attributes(part, before)
        return written


def _set_attributes(x: Any, to: dict[str, Any]) -> None:
    now = attributes_of(x)
    for name in now.keys() - to.keys():
        object.__delattr__(x, name)
    for name, value in to.items():
        if name not in now or now[name] is not value:
            object.__setattr__(x, name, value)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))
    return len(now) == len(before) and all(map(is_, now, before))
