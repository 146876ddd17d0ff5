"""The modules, tensors and optimizers that a program reaches besides its arguments, and their locations.

A function reaches them through its closure, its defaults and its globals; a method or a callable object through the
attributes of the object; all of these through containers. The locations are checked again later, since a name may be
bound to another module.

Objects also hold values that the program never reads, such as a running mean of losses, which is a new tensor after
each call. A plain value, or a tensor that does not require grad, is therefore state only if the attribute's name occurs
in the program's code. Other Python values are not searched for: `docs/bucketed.md` says what sees that these changed.
"""

from __future__ import annotations

import enum
import functools
import logging
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from subtensors.dispatch.fused.errors import is_library
from subtensors.dispatch.fused.read_values import function_of, names_in
from subtensors.dispatch.graphs.capture import Generator
from subtensors.dispatch.graphs.guards import is_plain
from subtensors.dispatch.ops.lazy_storage import is_lazy
from subtensors.lists.tensor_list import TensorList
from subtensors.padded.padded_tensor import PaddedTensor

Part = nn.Module | Tensor | torch.optim.Optimizer

_RANDOM_FUNCTIONS = frozenset(
    "rand randn rand_like randn_like randint randperm random uniform uniform_ normal normal_ bernoulli bernoulli_ "
    "choice choices sample shuffle permutation randrange gauss standard_normal multinomial random_ exponential_".split()
)
"""Names of functions of torch, Python and NumPy that draw random numbers."""

_MAX_DEPTH = 3
"""The maximum number of steps from the program."""
MAX_CONTAINER_LENGTH = 1000
"""A container with more parts than this is data."""

_WITHOUT_ATTRIBUTES = (Tensor, torch.optim.Optimizer, types.ModuleType, types.FunctionType, functools.partial)
"""Kinds of objects whose plain attributes are not watched; those of optimizers are, by `Optimizers`."""

_WITHOUT_PARTS = (Tensor, torch.optim.Optimizer)
"""Kinds of objects that a walk doesn't enter."""

_WITHOUT_STATE = (type, types.ModuleType, enum.Enum, logging.Filterer)
"""Kinds of values in files, classes and closures whose attributes a program doesn't compute with."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as its parameters, buffers and submodules, which `StateGuard` watches."""


CELL = object()
"""The key of the contents of a closure cell."""

LocatedValue: TypeAlias = "tuple[Location, object]"


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


class _Found(NamedTuple):
    value: object
    location: Location | None
    """None if the value cannot be replaced, such as the function of a partial."""
    within: _Found | None


class ReachableState:
    """The parts of a program: its modules, tensors and optimizers, and their locations.

    Args:
        program: a module, a function, a method, a callable object, or a partial of these.
    """

    def __init__(self, program: Callable[..., object]) -> None:
        reached = _walk(_Found(program, None, None), _MAX_DEPTH)
        names, self.functions = _names_used([x.value for x in reached])
        # Methods are no parts of their object: the parts and objects that they name besides its attributes.
        for function in self.functions:
            reached += [x for x in _walk(_Found(function, None, None), 2)[1:] if _is_object(x.value)]
        parts = [x for x in reached if isinstance(x.value, Part) and not isinstance(x.value, TensorList)]
        found = [x for x in parts if not isinstance(x.value, Tensor) or x.value.requires_grad or _is_named(x, names)]
        self.parts = list({id(x.value): x.value for x in found}.values())
        """Its modules, tensors and optimizers."""
        self.generators = generators_in(x.value for x in reached)
        self.has_scaler = any(isinstance(x.value, torch.amp.GradScaler) for x in reached)
        called = {getattr(x.value, "__name__", None) for x in reached}
        self.draws_random_numbers = not _RANDOM_FUNCTIONS.isdisjoint(names | called)
        """True if its code names a function that draws random numbers."""
        objects = [x for x in reached if not isinstance(x.value, _WITHOUT_ATTRIBUTES) and _is_named(x, names)]
        modules = [m for x in objects for m in (x.value.modules() if isinstance(x.value, nn.Module) else [x.value])]
        dicts = {id(d): d for m in modules if type(d := getattr(m, "__dict__", None)) is dict}
        self.attributes = [(d, [name for name in d if name in names and name != "training"]) for d in dicts.values()]
        """The attributes of its modules and objects, each dict with the names that occur in the program's code."""
        located: dict[tuple[int, object], LocatedValue] = {}
        for step in [*found, *objects]:
            way: _Found | None = step
            while way is not None:
                if way.location is not None:
                    located[id(way.location.holder), way.location.key] = way.location, way.value
                way = way.within
        self.locations = list(located.values())
        """The locations of its parts, objects and containers, and on the way there, each with the value found there."""


def reached_tensors(program: Callable[..., object], functions: Iterable[types.FunctionType]) -> list[Tensor]:
    """Return the tensors that a program reaches, detached: also computed ones, and those that its code doesn't name.

    A PaddedTensor is given by its storage.

    Args:
        program: as `ReachableState` takes it.
        functions: that it runs.
    """
    reached = _walk(_Found(program, None, None), _MAX_DEPTH, with_results=True)
    for function in functions:
        reached += _walk(_Found(function, None, None), 2, with_results=True)
    found = {id(x.value): x.value for x in reached if isinstance(x.value, Tensor) and not is_lazy(x.value)}
    dense = [t._dense if isinstance(t, PaddedTensor) else t for t in found.values()]
    return [t if t.is_leaf else t.detach() for t in dense]


def generators_in(values: Iterable[object]) -> list[Generator]:
    """Return the random generators among some values."""
    return [x for x in values if isinstance(x, torch.Generator | random.Random | np.random.Generator)]


def _walk(start: _Found, depth: int, with_results: bool = False) -> list[_Found]:
    """Return all objects that a start leads to within so many steps, the nearest first; computed tensors if asked."""
    reached, seen = [], {id(start.value)}
    todo = deque([(start, depth)])
    while todo:
        found, depth = todo.popleft()
        reached.append(found)
        if depth and (isinstance(found.value, TensorList) or not isinstance(found.value, _WITHOUT_PARTS)):
            for location, value in _parts(found.value):
                if not is_plain(value) and (with_results or not _is_result(value)) and id(value) not in seen:
                    seen.add(id(value))
                    todo.append((_Found(value, location, found), depth - 1))
    return reached


def _parts(x: object) -> Iterator[tuple[Location | None, object]]:
    """Yield the objects that one leads to directly, with their locations; None if they cannot be replaced."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            yield from _items(vars(module), vars(module).keys() - _MODULE_ATTRIBUTES, True)
        yield from _class_attributes(x)
    elif isinstance(x, types.FunctionType):
        for function in _with_wrapped(x):
            yield from _function_parts(function)
    elif isinstance(x, types.MethodType):
        yield from ((None, part) for part in (x.__self__, x.__func__))
    elif isinstance(x, functools.partial):
        yield from ((None, part) for part in (x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, (list, tuple, dict)):
        if len(x) <= MAX_CONTAINER_LENGTH:
            items = list(x.items() if isinstance(x, dict) else enumerate(x))
            yield from ((None if isinstance(x, tuple) else Location(x, key), part) for key, part in items)
    elif isinstance(x, TensorList):
        yield from ((None, t) for t in x.tensors)
    elif isinstance(x, type):
        yield from _class_attributes(x)
    elif not isinstance(x, types.ModuleType):
        if hasattr(x, "__wrapped__"):  # another bucketed program
            yield None, x.__wrapped__
        elif hasattr(x, "__dict__"):
            yield from _items(vars(x), are_attributes=True)
            yield from _class_attributes(x)
        yield from ((None, value) for value in slots_of(x).values())


def _function_parts(f: types.FunctionType) -> Iterator[tuple[Location | None, object]]:
    """Yield what a function's code may name in its file and in others, its attributes, closure and defaults."""
    if not is_library(f.__globals__.get("__name__")):  # `functools.wraps` replaces `__module__`
        names = names_in(f.__code__)
        yield from _items(f.__globals__, names)
        files = [x for x in map(f.__globals__.get, names) if isinstance(x, types.ModuleType)]
        for file in [x for x in files if not is_library(x.__name__)]:
            yield from _items(vars(file), names)
    yield from _items(vars(f))
    for cell in f.__closure__ or ():
        location = Location(cell, CELL)
        yield location, location.now()
    for default in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
        yield None, default


def _items(
    holder: Mapping[str, object], names: Collection[str] | None = None, are_attributes: bool = False
) -> Iterator[LocatedValue]:
    kept = list(holder) if names is None else [name for name in holder if name in names]
    yield from ((Location(holder, name, are_attributes), holder[name]) for name in kept)


def slots_of(x: object) -> dict[str, object]:
    """Return the attributes in the slots of an object."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    return {name: getattr(x, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(x, name)}


def attributes_of(x: object) -> dict[str, object]:
    """Return the attributes of an object itself, including those in its slots.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> point.x = 1
    >>> attributes_of(point)
    {'x': 1}
    """
    return slots_of(x) | getattr(x, "__dict__", {})


def _class_attributes(x: object) -> Iterator[LocatedValue]:
    """Yield those attributes of a class, or an object's and its submodules' classes, that may be or hold state."""
    modules = x.modules() if isinstance(x, nn.Module) else [x]
    kinds = {kind for part in modules for kind in (part if isinstance(part, type) else type(part)).__mro__}
    for kind in kinds:
        # A class may define `__module__` as a property of its objects; it is no string then.
        if not f"{kind.__module__}.".startswith(("builtins.", "torch.")):
            for location, value in _items(vars(kind), are_attributes=True):
                if (isinstance(value, (list, dict)) or _is_object(value)) and not location.name.startswith("__"):
                    yield location, value


def _is_object(x: object) -> bool:
    """Return whether a value is a part, or an object with attributes that may be state: no function or descriptor."""
    if isinstance(x, Part):
        return True
    return hasattr(x, "__dict__") and not isinstance(x, _WITHOUT_STATE) and not hasattr(x, "__get__")


def _with_wrapped(f: types.FunctionType) -> list[types.FunctionType]:
    """Return a function, the one that it wraps, and so on."""
    found = [f]
    while isinstance(wrapped := getattr(found[-1], "__wrapped__", None), types.FunctionType) and wrapped not in found:
        found.append(wrapped)
    return found


def _is_named(found: _Found, names: Collection[str]) -> bool:
    """Return whether all attributes on the way to a value are named in the program's code."""
    step: _Found | None = found
    while step is not None:
        if step.location is not None and step.location.is_attribute and step.location.key not in names:
            return False
        step = step.within
    return True


def _names_used(values: Iterable[object]) -> tuple[set[str], set[types.FunctionType]]:
    """Return the names in the code of functions and of the methods that are called on objects, and all of these."""
    todo = {x for x in values if isinstance(x, types.FunctionType)}
    modules = [module for x in values if isinstance(x, nn.Module) for module in x.modules()]
    kinds = {kind for x in (*values, *modules) for kind in type(x).__mro__} - {object, nn.Module}
    names, seen = {"__call__", "forward"}, set[types.FunctionType]()
    while True:
        names = names.union(*[names_in(f.__code__) for function in todo for f in _with_wrapped(function)])
        seen |= todo
        helpers = [value for function in todo for _, value in _parts(function)]
        found = [f for f in helpers if not is_library(getattr(f, "__module__", None))]
        for x in [x for kind in kinds for name, x in vars(kind).items() if name in names]:
            found += [x, function_of(x)]
        todo = {f for f in found if isinstance(f, types.FunctionType)} - seen
        if not todo:
            return names, seen


def _is_result(x: object) -> bool:
    """Return whether a value is a computed tensor: a program that keeps one does not read it as state."""
    if not isinstance(x, Tensor) or isinstance(x, TensorList):
        return False
    return not x.is_leaf or isinstance(x, PaddedTensor) or is_lazy(x)
