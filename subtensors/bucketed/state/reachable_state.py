"""The modules, tensors and optimizers that a program reaches beside its arguments, and their locations.

A function reaches them through its closure, its defaults and its globals; a method or a callable object through the
attributes of the object. The locations are checked again later, since a name may be bound to another module.

Objects also hold values of their other methods, such as a running mean of losses, which is a new tensor after each
call. A tensor that does not require grad is therefore state only if the attribute's name occurs in the program's code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subtensors.bucketed.state.constant_guards import is_plain
from subtensors.bucketed.state.locations import CELL, Location
from subtensors.bucketed.state.new_attributes import Holder
from subtensors.padded.padded_tensor import PaddedTensor

Part = nn.Module | Tensor | torch.optim.Optimizer

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

_WITHOUT_NAMES = (types.BuiltinFunctionType, types.MethodType, functools.partial, Tensor, type, types.ModuleType)
"""Kinds of objects whose attributes are not watched for new ones."""

_DRAWS = frozenset(
    "rand randn rand_like randn_like randint randperm random uniform uniform_ normal normal_ bernoulli bernoulli_ "
    "choice choices sample shuffle permutation randrange gauss standard_normal multinomial random_ exponential_".split()
)
"""Names of functions of torch, Python and NumPy that draw random numbers."""

_DEPTH = 3
"""The maximum number of steps from the program."""
_MANY = 1000
"""A container with more parts than this is data."""
_FEW = 100
"""Plain values in a container with more parts than this are data."""


class _Found(NamedTuple):
    value: Any
    place: Location | None
    """None if the value cannot be replaced, such as the function of a partial."""
    within: _Found | None


class ReachableState:
    """The parts of a program: its modules, tensors, optimizers, plain values, and their locations.

    Args:
        program: a module, a function, a method, a callable object, or a partial of these.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self._places: dict[tuple[int, Any], tuple[Location, Any]] = {}
        every, plain = _walked(program)
        names, functions = _names_used([x.value for x in every])
        named = [(place, value) for f in functions for place, value in _named_by(f) if not _is_result(value)]
        every += [_Found(value, place, None) for place, value in named if isinstance(value, Part)]
        found = [x for x in every if isinstance(x.value, Part) and _is_read(x, names)]
        self.parts: list[Part] = list({id(x.value): x.value for x in found}.values())
        plain = [x for x in plain if _is_named(x, names)]
        self.plain = [(x.place, x.value) for x in plain if x.place is not None]
        self.plain += [(place, value) for place, value in named if is_plain(value)]
        self.plain += [pair for x in every for pair in _plain_of_classes(x.value, names)]
        """The locations of plain values and functions, each with its value."""
        self.has_scaler = any(isinstance(x.value, torch.amp.GradScaler) for x in every)
        self.names = names
        called = {getattr(x.value, "__name__", "") for x in every}
        self.draws = not _DRAWS.isdisjoint(names | {name for name in called if isinstance(name, str)})
        """True if its code names a function that draws random numbers."""
        self.holders = [holder for x in every if _is_named(x, names) for holder in _holders(x.value)]
        """The objects whose attributes it reads, and small containers."""
        for x in found:
            self._watch(x)
        for x in plain:
            self._watch(x.within)

    def _watch(self, found: _Found | None) -> None:
        while found is not None:
            if found.place is not None:
                self._places[id(found.place.holder), found.place.key] = found.place, found.value
            found = found.within

    def first_other(self) -> str:
        """Return the name of the first location whose value was replaced; "" if there is none."""
        for place, value in self._places.values():
            if place.now() is not value:
                return place.name
        return ""

    def leave_out_others(self) -> None:
        """Stop watching locations whose value was replaced by now: the program itself replaced it."""
        self._places = {key: (place, value) for key, (place, value) in self._places.items() if place.now() is value}


def _walked(program: Any) -> tuple[list[_Found], list[_Found]]:
    """Return all objects that a program leads to, the nearest first, and the plain values among them."""
    every, plain, seen = [], [], {id(program)}
    todo = deque([(_Found(program, None, None), _DEPTH)])
    while todo:
        found, depth = todo.popleft()
        every.append(found)
        if depth and not isinstance(found.value, (Tensor, torch.optim.Optimizer)):
            for place, value in _below(found.value):
                if _is_constant(value, place) and _is_one_of_few(found.value, place):
                    plain.append(_Found(value, place, found))
                if not is_plain(value) and id(value) not in seen:
                    seen.add(id(value))
                    todo.append((_Found(value, place, found), depth - 1))
    return every, plain


def _holders(x: Any) -> Iterator[Holder]:
    """Yield the dicts and lists in which a reached object holds its parts."""
    if isinstance(x, nn.Module):
        yield from (Holder(vars(module), True) for module in x.modules())
    elif isinstance(x, (list, dict)):
        if len(x) <= _FEW:
            yield Holder(x, False)
    elif not isinstance(x, _WITHOUT_NAMES) and hasattr(x, "__dict__"):
        yield Holder(vars(x), True)


def _plain_of_classes(x: Any, names: Collection[str]) -> Iterator[tuple[Location, Any]]:
    """Yield the plain class attributes that the program's code names, with their locations; not of torch's classes."""
    for kind in _classes(x):
        held = vars(kind)
        yield from ((Location(held, name), value) for name, value in held.items() if name in names and is_plain(value))


def _classes(x: Any) -> set[type]:
    """Return a class, or those of an object and its submodules, with all bases, except torch's and builtin classes."""
    modules = x.modules() if isinstance(x, nn.Module) else [x]
    kinds = {kind for part in modules for kind in (part if isinstance(part, type) else type(part)).__mro__}
    # A class may define `__module__` as a property of its objects; it is no string then.
    return {kind for kind in kinds if not f"{kind.__module__}.".startswith(("builtins.", "torch."))}


def _is_constant(x: Any, place: Location | None) -> bool:
    """Return whether a value is plain, or a function that is an attribute."""
    return is_plain(x) or (isinstance(x, _FUNCTIONS) and place is not None and place.is_attribute)


def _is_one_of_few(within: Any, place: Location | None) -> bool:
    """Return whether a plain value at a location is watched.

    A container with more than `_FEW` parts is data. The defaults of a function have no location, and `_named_by` finds
    its globals.
    """
    if isinstance(within, types.FunctionType):
        return place is not None and (place.key is CELL or place.is_attribute)
    return not isinstance(within, (list, dict)) or len(within) <= _FEW


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code reads; other names may be attributes."""
    inner = [_globals_read(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(own).union(*inner)


def _is_read(found: _Found, names: Collection[str]) -> bool:
    """Return whether the program reads a value, as far as the names in its code tell."""
    return not isinstance(found.value, Tensor) or found.value.requires_grad or _is_named(found, names)


def _is_named(found: _Found, names: Collection[str]) -> bool:
    """Return whether all attributes on the way to a value are named in the program's code."""
    step: _Found | None = found
    while step is not None:
        if step.place is not None and step.place.is_attribute and step.place.key not in names:
            return False
        step = step.within
    return True


def _names_used(values: Iterable[Any]) -> tuple[set[str], set[types.FunctionType]]:
    """Return the names in the code of functions and objects' methods and of functions these name, and all of these."""
    todo = [x for x in values if isinstance(x, types.FunctionType)]
    modules = [module for x in values if isinstance(x, nn.Module) for module in x.modules()]
    kinds = {kind for x in (*values, *modules) for kind in type(x).__mro__} - {object, nn.Module}
    names, seen = {"__call__", "forward"}, set[Any]()
    while True:
        for function in todo:
            code = inspect.unwrap(function).__code__
            names |= _names_in(code) | _words_in(code)
        seen.update(todo)
        found = [f for kind in kinds for name, x in vars(kind).items() if name in names for f in _functions(x)]
        helpers = [x for f in todo for _, x in _named_by(f) if isinstance(x, types.FunctionType)]
        found += [f for f in helpers if not _is_of_library(f.__module__)]
        todo = [f for f in dict.fromkeys(found) if f not in seen]
        if not todo:
            return names, seen


def _named_by(function: types.FunctionType) -> Iterator[tuple[Location, Any]]:
    """Yield the globals that a function names, and named parts of the classes, functions and files among them.

    Functions of torch are skipped.
    """
    function = inspect.unwrap(function)
    held, code = function.__globals__, function.__code__
    if str(held.get("__name__")).startswith("torch."):
        return
    for name in _globals_read(code) & held.keys():
        value = held[name]
        yield Location(held, name), value
        if isinstance(value, types.ModuleType):
            yield from _of_file(value, code)
        elif isinstance(value, (type, types.FunctionType)):
            for within in _classes(value) if isinstance(value, type) else [value]:
                yield from (
                    (Location(vars(within), at), vars(within)[at]) for at in _names_in(code) & vars(within).keys()
                )


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names in a function's code, and in that of the functions that it defines."""
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names).union(*inner)


def _words_in(code: types.CodeType) -> set[str]:
    """Return the strings in a function's code that may be names, as `getattr` takes them."""
    inner = [_words_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}.union(*inner)


def _functions(x: Any) -> list[Any]:
    """Return the functions that an attribute of a class runs."""
    parts = [x, getattr(x, "fget", None), getattr(x, "func", None), getattr(x, "__func__", None)]
    return [f for f in parts if isinstance(f, types.FunctionType)]


def _below(x: Any) -> Iterator[tuple[Location | None, Any]]:
    """Yield the objects that one leads to directly, with their locations; None if they cannot be replaced."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            yield from _attributes(module, _OF_MODULES)
        yield from _of_classes(x)
    elif isinstance(x, types.FunctionType):
        for name in sorted(_names_in(x.__code__)):
            if isinstance(value := x.__globals__.get(name), types.ModuleType):
                yield from _of_file(value, x.__code__)
            elif value is not None:
                yield Location(x.__globals__, name), value
        yield from _attributes(x, frozenset())
        for cell in x.__closure__ or ():
            place = Location(cell, CELL)
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
            yield from ((None if isinstance(x, tuple) else Location(x, key), part) for key, part in kept)
    elif isinstance(x, type):
        yield from _of_classes(x)
    elif not isinstance(x, types.ModuleType) and hasattr(x, "__dict__"):
        if hasattr(x, "__wrapped__"):  # another bucketed program
            yield None, x.__wrapped__
        else:
            yield from _attributes(x, frozenset())
            yield from _of_classes(x)


def _of_classes(x: Any) -> Iterator[tuple[Location, Any]]:
    """Yield class attributes that are tensors, modules or containers; `_plain_of_classes` finds plain values."""
    for kind in _classes(x):
        held = vars(kind)
        kept = [(name, value) for name, value in held.items() if isinstance(value, (Tensor, nn.Module, list, dict))]
        yield from ((Location(held, name, True), value) for name, value in kept if not name.startswith("__"))


def _of_file(file: types.ModuleType, code: types.CodeType) -> Iterator[tuple[Location, Any]]:
    """Yield the attributes of another Python module that a function's code may name; none of a library's."""
    if not _is_of_library(file.__name__):
        held = vars(file)
        yield from ((Location(held, name, is_attribute=True), held[name]) for name in _names_in(code) & held.keys())


def _is_of_library(name: str | None) -> bool:
    """Return whether a Python module belongs to a library, which holds no state of programs."""
    return str(name).partition(".")[0] in _LIBRARIES


_LIBRARIES = frozenset({"torch", "numpy", "triton", "subtensors", *sys.stdlib_module_names})
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as its parameters, buffers and submodules, which `State` watches."""


def _attributes(x: Any, but: Collection[str]) -> Iterator[tuple[Location, Any]]:
    held = vars(x)
    kept = [(name, value) for name, value in held.items() if name not in but and not _is_result(value)]
    yield from ((Location(held, name, is_attribute=True), value) for name, value in kept)


def _is_result(x: Any) -> bool:
    """Return whether a value is a computed tensor: a program that keeps one does not read it as state."""
    return isinstance(x, Tensor) and (not x.is_leaf or isinstance(x, PaddedTensor))
