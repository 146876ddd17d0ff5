"""What a program reaches beside its arguments, and where it finds it: modules, tensors and optimizers.

A function reaches them by its closure, its defaults and the names of its file; a method and a callable object by the
attributes of the object. What stands there is looked at again later: a name may be given to another module.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subtensors.padded.padded_tensor import PaddedTensor

Part = nn.Module | Tensor | torch.optim.Optimizer

_DEPTH = 3
"""How many steps from the program."""
_MANY = 1000
"""A container of more than that is data."""


class _Place(NamedTuple):
    """Where something stands: under a key of a dict or list, or in a cell of a closure."""

    holder: Any
    key: Any

    def now(self) -> Any:
        """What stands there; None where nothing does."""
        try:
            return self.holder.cell_contents if self.key is _CELL else self.holder[self.key]
        except (ValueError, LookupError):
            return None


_CELL = object()


class _Found(NamedTuple):
    value: Any
    place: _Place | None
    """None where it can't become another, as the function of a partial."""
    within: _Found | None


class Reached:
    """The parts of a program.

    Args:
        program: a module, a function, a method, a callable object, or a partial of these.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self.parts: list[Part] = []
        self._places: dict[tuple[int, Any], tuple[_Place, Any]] = {}
        seen = {id(program)}
        todo = deque([(_Found(program, None, None), _DEPTH)])
        while todo:
            found, depth = todo.popleft()
            if isinstance(found.value, Part):
                self.parts.append(found.value)
                self._watch(found)
            if depth and not isinstance(found.value, (Tensor, torch.optim.Optimizer)):
                for place, value in _below(found.value):
                    if id(value) not in seen:
                        seen.add(id(value))
                        todo.append((_Found(value, place, found), depth - 1))

    def _watch(self, found: _Found | None) -> None:
        while found is not None:
            if found.place is not None:
                holder, key = found.place
                self._places[id(holder), key] = found.place, found.value
            found = found.within

    def first_other(self) -> str:
        """What stands where something else stood, by its name; "" where nothing does."""
        for place, value in self._places.values():
            if place.now() is not value:
                return place.key if isinstance(place.key, str) else "a part of the program"
        return ""

    def leave_out_others(self) -> None:
        """Watch no longer where something else stands now: the program itself put it there."""
        self._places = {key: (place, value) for key, (place, value) in self._places.items() if place.now() is value}


def _below(x: Any) -> Iterator[tuple[_Place | None, Any]]:
    """What something leads to, and where that stands."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            yield from _attributes(module, _OF_MODULES)
    elif isinstance(x, types.FunctionType):
        for name in x.__code__.co_names:
            if (value := x.__globals__.get(name)) is not None:
                yield _Place(x.__globals__, name), value
        for cell in x.__closure__ or ():
            place = _Place(cell, _CELL)
            yield place, place.now()
        for default in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            yield None, default
    elif isinstance(x, types.MethodType):
        yield None, x.__self__
        yield None, x.__func__
    elif isinstance(x, functools.partial):
        for part in (x.func, *x.args, *x.keywords.values()):
            yield None, part
    elif isinstance(x, (list, tuple, dict)):
        if len(x) <= _MANY:
            items = list(x.items() if isinstance(x, dict) else enumerate(x))
            kept = [(key, part) for key, part in items if not _is_result(part)]
            yield from ((None if isinstance(x, tuple) else _Place(x, key), part) for key, part in kept)
    elif not isinstance(x, (type, types.ModuleType)) and hasattr(x, "__dict__"):
        if hasattr(x, "__wrapped__"):  # another bucketed program
            yield None, x.__wrapped__
        else:
            yield from _attributes(x, frozenset())


_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has, its parameters, buffers and modules among them: `State` looks after those."""


def _attributes(x: Any, but: Collection[str]) -> Iterator[tuple[_Place, Any]]:
    held = vars(x)
    kept = [(name, value) for name, value in held.items() if name not in but and not _is_result(value)]
    yield from ((_Place(held, name), value) for name, value in kept)


def _is_result(x: Any) -> bool:
    """Is it a tensor that was computed? A program that keeps one does not read it as state."""
    return isinstance(x, Tensor) and (not x.is_leaf or isinstance(x, PaddedTensor))
