"""The modules, tensors and optimizers that a program reaches besides its arguments, and their locations.

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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from subtensors.bucketed.state.guards import CELL, Holder, LocatedValue, Location, Slots, is_plain, slots_of
from subtensors.padded.padded_tensor import PaddedTensor

Part = nn.Module | Tensor | torch.optim.Optimizer

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)

_WITHOUT_NAMES = (types.BuiltinFunctionType, types.MethodType, functools.partial, Tensor, type, types.ModuleType)
"""Kinds of objects whose attributes are not watched for new ones."""

_RANDOM_FUNCTIONS = frozenset(
    "rand randn rand_like randn_like randint randperm random uniform uniform_ normal normal_ bernoulli bernoulli_ "
    "choice choices sample shuffle permutation randrange gauss standard_normal multinomial random_ exponential_".split()
)
"""Names of functions of torch, Python and NumPy that draw random numbers."""

_MAX_DEPTH = 3
"""The maximum number of steps from the program."""
MAX_CONTAINER_LENGTH = 1000
"""A container with more parts than this is data."""
MAX_CONSTANTS_PER_CONTAINER = 100
"""Plain values in a container with more parts than this are data."""


class _Found(NamedTuple):
    value: object
    location: Location | None
    """None if the value cannot be replaced, such as the function of a partial."""
    within: _Found | None


class ReachableState:
    """The parts of a program: its modules, tensors, optimizers, plain values, and their locations.

    Args:
        program: a module, a function, a method, a callable object, or a partial of these.
    """

    def __init__(self, program: Callable[..., object]) -> None:
        self._located: dict[tuple[int, object], LocatedValue] = {}
        reached, plain = _walk(program)
        names, functions = _names_used([x.value for x in reached])
        named = [pair for f in functions for pair in _globals_named_in(f) if not _is_result(pair[1])]
        reached += [_Found(value, location, None) for location, value in named if isinstance(value, Part)]
        found = [x for x in reached if isinstance(x.value, Part) and _is_read(x, names)]
        self.parts = list({id(x.value): x.value for x in found}.values())
        """Its modules, tensors and optimizers."""
        plain = [x for x in plain if _is_named(x, names)]
        self.constants = [(x.location, x.value) for x in plain if x.location is not None]
        self.constants += [(location, value) for location, value in named if is_plain(value)]
        self.constants += [pair for x in reached for pair in _class_constants(x.value, names)]
        """The locations of plain values and functions, each with its value."""
        self.has_scaler = any(isinstance(x.value, torch.amp.GradScaler) for x in reached)
        self.names = names
        called = {getattr(x.value, "__name__", "") for x in reached}
        called_names = {name for name in called if isinstance(name, str)}
        self.draws_random_numbers = not _RANDOM_FUNCTIONS.isdisjoint(names | called_names)
        """True if its code names a function that draws random numbers."""
        self.holders = [holder for x in reached if _is_named(x, names) for holder in _holders(x.value)]
        """The objects whose attributes it reads, and small containers."""
        for x in found:
            self._watch(x)
        for x in plain:
            self._watch(x.within)

    def _watch(self, found: _Found | None) -> None:
        while found is not None:
            if found.location is not None:
                self._located[id(found.location.holder), found.location.key] = found.location, found.value
            found = found.within

    @property
    def locations(self) -> list[LocatedValue]:
        """The locations on the way to its parts and functions, each with the value found there."""
        return list(self._located.values())


def _walk(program: object) -> tuple[list[_Found], list[_Found]]:
    """Return all objects that a program leads to, the nearest first, and the plain values among them."""
    reached, plain, seen = [], [], {id(program)}
    todo = deque([(_Found(program, None, None), _MAX_DEPTH)])
    while todo:
        found, depth = todo.popleft()
        reached.append(found)
        if depth and not isinstance(found.value, (Tensor, torch.optim.Optimizer)):
            for location, value in _direct_parts(found.value):
                if _is_constant(value, location) and _is_watched_constant(found.value, location):
                    plain.append(_Found(value, location, found))
                if not is_plain(value) and id(value) not in seen:
                    seen.add(id(value))
                    todo.append((_Found(value, location, found), depth - 1))
    return reached, plain


def _holders(x: object) -> Iterator[Holder]:
    """Yield the dicts and lists in which a reached object holds its parts."""
    if isinstance(x, nn.Module):
        yield from (Holder(vars(module), True) for module in x.modules())
    elif isinstance(x, (list, dict)):
        if len(x) <= MAX_CONSTANTS_PER_CONTAINER:
            yield Holder(x, False)
    elif not isinstance(x, _WITHOUT_NAMES) and hasattr(x, "__dict__"):
        yield Holder(x.__dict__, True)


def _class_constants(x: object, names: Collection[str]) -> Iterator[LocatedValue]:
    """Yield the plain class attributes that the program's code names, with their locations; not of torch's classes."""
    for kind in _classes(x):
        attributes = vars(kind)
        yield from (
            (Location(attributes, name), value)
            for name, value in attributes.items()
            if name in names and is_plain(value)
        )


def _classes(x: object) -> set[type]:
    """Return a class, or those of an object and its submodules, with all bases, except torch's and builtin classes."""
    modules = x.modules() if isinstance(x, nn.Module) else [x]
    kinds = {kind for part in modules for kind in (part if isinstance(part, type) else type(part)).__mro__}
    # A class may define `__module__` as a property of its objects; it is no string then.
    return {kind for kind in kinds if not f"{kind.__module__}.".startswith(("builtins.", "torch."))}


def _is_constant(x: object, location: Location | None) -> bool:
    """Return whether a value is plain, or a function that is an attribute."""
    return is_plain(x) or (isinstance(x, _FUNCTIONS) and location is not None and location.is_attribute)


def _is_watched_constant(within: object, location: Location | None) -> bool:
    """Return whether a plain value at a location is watched.

    A container with more than `MAX_CONSTANTS_PER_CONTAINER` parts is data. The defaults of a function have no location,
    and `_globals_named_in` finds its globals.
    """
    if isinstance(within, types.FunctionType):
        return location is not None and (location.key is CELL or location.is_attribute)
    return not isinstance(within, (list, dict)) or len(within) <= MAX_CONSTANTS_PER_CONTAINER


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
        if step.location is not None and step.location.is_attribute and step.location.key not in names:
            return False
        step = step.within
    return True


def _names_used(values: Iterable[object]) -> tuple[set[str], set[types.FunctionType]]:
    """Return the names in the code of functions and objects' methods and of functions these name, and all of these."""
    todo = [x for x in values if isinstance(x, types.FunctionType)]
    modules = [module for x in values if isinstance(x, nn.Module) for module in x.modules()]
    kinds = {kind for x in (*values, *modules) for kind in type(x).__mro__} - {object, nn.Module}
    names, seen = {"__call__", "forward"}, set[types.FunctionType]()
    while True:
        for function in todo:
            code = inspect.unwrap(function).__code__
            names |= _names_in(code) | _words_in(code)
        seen.update(todo)
        found = [f for kind in kinds for name, x in vars(kind).items() if name in names for f in _functions(x)]
        helpers = [x for f in todo for _, x in _globals_named_in(f) if isinstance(x, types.FunctionType)]
        found += [f for f in helpers if not _is_of_library(f.__module__)]
        todo = [f for f in dict.fromkeys(found) if f not in seen]
        if not todo:
            return names, seen


def _globals_named_in(function: types.FunctionType) -> Iterator[LocatedValue]:
    """Yield the globals that a function names, and named parts of the classes, functions and files among them.

    Functions of torch are skipped.
    """
    function = inspect.unwrap(function)
    globals_, code = function.__globals__, function.__code__
    if str(globals_.get("__name__")).startswith("torch."):
        return
    for name in _globals_read(code) & globals_.keys():
        value = globals_[name]
        yield Location(globals_, name), value
        if isinstance(value, types.ModuleType):
            yield from _module_attributes(value, code)
        elif isinstance(value, (type, types.FunctionType)):
            for within in _classes(value) if isinstance(value, type) else [value]:
                yield from (
                    (Location(vars(within), at), vars(within)[at]) for at in _names_in(code) & vars(within).keys()
                )


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names in a function's code, and in the code of the functions that it defines."""
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names).union(*inner)


def _words_in(code: types.CodeType) -> set[str]:
    """Return the strings in a function's code that may be names, as `getattr` takes them."""
    inner = [_words_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}.union(*inner)


def _functions(x: object) -> list[types.FunctionType]:
    """Return the functions that an attribute of a class runs."""
    parts = [x, getattr(x, "fget", None), getattr(x, "func", None), getattr(x, "__func__", None)]
    return [f for f in parts if isinstance(f, types.FunctionType)]


def _direct_parts(x: object) -> Iterator[tuple[Location | None, object]]:
    """Yield the objects that one leads to directly, with their locations; None if they cannot be replaced."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            yield from _attributes(module, _MODULE_ATTRIBUTES)
        yield from _class_attributes(x)
    elif isinstance(x, types.FunctionType):
        for name in sorted(_names_in(x.__code__)):
            if isinstance(value := x.__globals__.get(name), types.ModuleType):
                yield from _module_attributes(value, x.__code__)
            elif value is not None:
                yield Location(x.__globals__, name), value
        yield from _attributes(x)
        for cell in x.__closure__ or ():
            location = Location(cell, CELL)
            yield location, location.now()
        for default in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            yield None, default
    elif isinstance(x, types.MethodType):
        yield None, x.__self__
        yield None, x.__func__
    elif isinstance(x, functools.partial):
        for part in (x.func, *x.args, *x.keywords.values()):
            yield None, part
    elif isinstance(x, (list, tuple, dict)):
        if len(x) <= MAX_CONTAINER_LENGTH:
            items = list(x.items() if isinstance(x, dict) else enumerate(x))
            kept = [(key, part) for key, part in items if not _is_result(part)]
            yield from ((None if isinstance(x, tuple) else Location(x, key), part) for key, part in kept)
    elif isinstance(x, type):
        yield from _class_attributes(x)
    elif not isinstance(x, types.ModuleType):
        if hasattr(x, "__wrapped__"):  # another bucketed program
            yield None, x.__wrapped__
        elif hasattr(x, "__dict__"):
            yield from _attributes(x)
            yield from _class_attributes(x)
        if hasattr(type(x), "__slots__"):
            yield from ((Location(Slots(x), name, is_attribute=True), value) for name, value in slots_of(x).items())


def _class_attributes(x: object) -> Iterator[LocatedValue]:
    """Yield class attributes that are tensors, modules or containers; `_class_constants` finds plain values."""
    for kind in _classes(x):
        attributes = vars(kind)
        kept = [
            (name, value) for name, value in attributes.items() if isinstance(value, (Tensor, nn.Module, list, dict))
        ]
        yield from ((Location(attributes, name, True), value) for name, value in kept if not name.startswith("__"))


def _module_attributes(file: types.ModuleType, code: types.CodeType) -> Iterator[LocatedValue]:
    """Yield the attributes of another Python module that a function's code may name; none of a library's."""
    if not _is_of_library(file.__name__):
        attributes = vars(file)
        yield from (
            (Location(attributes, name, is_attribute=True), attributes[name])
            for name in _names_in(code) & attributes.keys()
        )


def _is_of_library(name: str | None) -> bool:
    """Return whether a Python module belongs to a library, which holds no state of programs."""
    return str(name).partition(".")[0] in _LIBRARIES


_LIBRARIES = frozenset({"torch", "numpy", "triton", "subtensors", *sys.stdlib_module_names})
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as its parameters, buffers and submodules, which `State` watches."""


def _attributes(x: object, but: Collection[str] = ()) -> Iterator[LocatedValue]:
    attributes = vars(x)
    kept = [(name, value) for name, value in attributes.items() if name not in but and not _is_result(value)]
    yield from ((Location(attributes, name, is_attribute=True), value) for name, value in kept)


def _is_result(x: object) -> bool:
    """Return whether a value is a computed tensor: a program that keeps one does not read it as state."""
    return isinstance(x, Tensor) and (not x.is_leaf or isinstance(x, PaddedTensor))
