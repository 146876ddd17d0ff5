"""Objects among the arguments that are told by their identity: what a run of the program writes to them is found."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from torch import Tensor

BY_IDENTITY: Any = object.__hash__
"""Of a class whose objects are equal to none but themselves."""

MANY = 10_000
"""Parts of an object that leads to more of them are not looked for."""


def is_by_identity(x: Any) -> bool:
    """Is it an object with attributes that is equal to none but itself?"""
    kind = type(x)
    if kind.__hash__ is not BY_IDENTITY or issubclass(kind, (type, types.FunctionType, Tensor)):
        return False
    return hasattr(x, "__dict__")


def attributes_of(x: Any) -> dict[str, Any]:
    """The attributes that an object itself has, those of its slots among them.

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


class KeptObjects:
    """The attributes of some objects as they are now, and the contents of the lists and dicts among these.

    Example:
        >>> cache = types.SimpleNamespace(steps=[1])
        >>> kept = KeptObjects([cache])
        >>> cache.steps.append(2)
        >>> kept.put_back()
        'SimpleNamespace'
        >>> cache.steps
        [1]
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._kept: list[tuple[str, Any, Any]] = []
        for x in objects:
            held = vars(x)
            for part in (held, *held.values()):
                if type(part) in (dict, list):
                    self._kept.append((type(x).__name__, part, part.copy()))

    def put_back(self) -> str:
        """Undo what was written since: the class of the first object that was written to, "" where none was."""
        written = ""
        for name, now, before in self._kept:
            if not _is_same(now, before):
                written = written or name
                now.clear()
                now.update(before) if isinstance(now, dict) else now.extend(before)
        return written


def tensors_within(x: Any) -> Iterator[Tensor]:
    """The tensors that an object leads to by attributes, lists, tuples and dicts.

    >>> import torch
    >>> cache = types.SimpleNamespace(layers=[{"count": torch.zeros(2)}])
    >>> [*tensors_within(cache)]
    [tensor([0., 0.])]
    """
    todo, seen = [x], {id(x)}
    while todo and len(seen) < MANY:
        part = todo.pop()
        if isinstance(part, Tensor):
            yield part
            continue
        inner = [*part.values()] if isinstance(part, dict) else [*part] if isinstance(part, (list, tuple)) else []
        if not isinstance(part, (type, types.ModuleType, types.FunctionType)):
            inner += getattr(part, "__dict__", {}).values()
        new = {id(value): value for value in inner if id(value) not in seen}
        seen |= new.keys()
        todo += new.values()


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(map(is_, now.values(), before.values()))
    return len(now) == len(before) and all(map(is_, now, before))
