"""What a program reaches beside its arguments, and where it finds it: modules, tensors and optimizers.

A function reaches them by its closure, its defaults and the names of its file; a method and a callable object by the
attributes of the object. What stands there is looked at again later: a name may be given to another module.

Objects also hold what their other methods keep, as a running mean of losses, which is another tensor after each call. A
tensor that wants no gradient is therefore state only where the code of the program has the attribute's name.
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
"""Kinds of objects whose attributes are not looked at for new ones."""

_DRAWS = frozenset(
    "rand randn rand_like randn_like randint randperm random uniform uniform_ normal normal_ bernoulli bernoulli_ "
    "choice choices sample shuffle permutation randrange gauss standard_normal multinomial random_ exponential_".split()
)
"""Functions of torch, Python and NumPy."""

_DEPTH = 3
"""How many steps from the program."""
_MANY = 1000
"""A container of more than that is data."""
_FEW = 100
"""Plain values in a container of more than that are data."""


class _Found(NamedTuple):
    value: Any
    place: Location | None
    """None where it can't become another, as the function of a partial."""
    within: _Found | None


class ReachableState:
    """The parts of a program.

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
        """Where it finds plain values and functions, and which."""
        self.has_scaler = any(isinstance(x.value, torch.amp.GradScaler) for x in every)
        self.names = names
        called = {getattr(x.value, "__name__", "") for x in every}
        self.draws = not _DRAWS.isdisjoint(names | {name for name in called if isinstance(name, str)})
        """Does code of it name what draws random numbers?"""
        self.holders = [holder for x in every if _is_named(x, names) for holder in _holders(x.value)]
        """Whose attributes it reads, and small containers."""
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
        """What stands where something else stood, by its name; "" where nothing does."""
        for place, value in self._places.values():
            if place.now() is not value:
                return place.name
        return ""

    def leave_out_others(self) -> None:
        """Watch no longer where something else stands now: the program itself put it there."""
        self._places = {key: (place, value) for key, (place, value) in self._places.items() if place.now() is value}


def _walked(program: Any) -> tuple[list[_Found], list[_Found]]:
    """What a program leads to, the nearest first, and the plain values among it."""
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
    """Where something that was reached has its parts."""
    if isinstance(x, nn.Module):
        yield from (Holder(vars(module), True) for module in x.modules())
    elif isinstance(x, (list, dict)):
        if len(x) <= _FEW:
            yield Holder(x, False)
    elif not isinstance(x, _WITHOUT_NAMES) and hasattr(x, "__dict__"):
        yield Holder(vars(x), True)


def _plain_of_classes(x: Any, names: Collection[str]) -> Iterator[tuple[Location, Any]]:
    """Where classes that are not torch's have plain values that code of the program names."""
    for kind in _classes(x):
        held = vars(kind)
        yield from ((Location(held, name), value) for name, value in held.items() if name in names and is_plain(value))


def _classes(x: Any) -> set[type]:
    """A class, or that of an object, of a module those of all in it, and their bases, but for torch's."""
    modules = x.modules() if isinstance(x, nn.Module) else [x]
    kinds = {kind for part in modules for kind in (part if isinstance(part, type) else type(part)).__mro__}
    # Where a class says of its objects where they are from, it is no text.
    return {kind for kind in kinds if not f"{kind.__module__}.".startswith(("builtins.", "torch."))}


def _is_constant(x: Any, place: Location | None) -> bool:
    """Is it a plain value, or a function that is an attribute?"""
    return is_plain(x) or (isinstance(x, _FUNCTIONS) and place is not None and place.is_attribute)


def _is_one_of_few(within: Any, place: Location | None) -> bool:
    """Is a plain value that stands there one of its own, which code may be written for?"""
    if isinstance(within, types.FunctionType):
        return place is not None and (place.key is CELL or place.is_attribute)
    return not isinstance(within, (list, dict)) or len(within) <= _FEW


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """The names of its file that a function's code reads; others may be attributes."""
    inner = [_globals_read(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(own).union(*inner)


def _is_read(found: _Found, names: Collection[str]) -> bool:
    """Is it what the program reads, as far as names tell?"""
    return not isinstance(found.value, Tensor) or found.value.requires_grad or _is_named(found, names)


def _is_named(found: _Found, names: Collection[str]) -> bool:
    """Does code of the program have the names of the attributes that lead there?"""
    step: _Found | None = found
    while step is not None:
        if step.place is not None and step.place.is_attribute and step.place.key not in names:
            return False
        step = step.within
    return True


def _names_used(values: Iterable[Any]) -> tuple[set[str], set[types.FunctionType]]:
    """The names in the code of functions and of methods of objects, and of functions that these name; all of these."""
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
    """What a function names of its file, and of the classes and files named there; torch's own files are torch's."""
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
    """The names in a function's code, and in that of the functions which it makes."""
    inner = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names).union(*inner)


def _words_in(code: types.CodeType) -> set[str]:
    """Texts that may be names, as `getattr` takes them."""
    inner = [_words_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}.union(*inner)


def _functions(x: Any) -> list[Any]:
    """What an attribute of a class runs."""
    parts = [x, getattr(x, "fget", None), getattr(x, "func", None), getattr(x, "__func__", None)]
    return [f for f in parts if isinstance(f, types.FunctionType)]


def _below(x: Any) -> Iterator[tuple[Location | None, Any]]:
    """What something leads to, and where that stands."""
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
    """Tensors, modules and containers that are attributes of classes; `_plain_of_classes` finds the rest."""
    for kind in _classes(x):
        held = vars(kind)
        kept = [(name, value) for name, value in held.items() if isinstance(value, (Tensor, nn.Module, list, dict))]
        yield from ((Location(held, name, True), value) for name, value in kept if not name.startswith("__"))


def _of_file(file: types.ModuleType, code: types.CodeType) -> Iterator[tuple[Location, Any]]:
    """What a function's code may name of another file; nothing of a library."""
    if not _is_of_library(file.__name__):
        held = vars(file)
        yield from ((Location(held, name, is_attribute=True), held[name]) for name in _names_in(code) & held.keys())


def _is_of_library(name: str | None) -> bool:
    """Is a file of this name one of those that have no state of programs?"""
    return str(name).partition(".")[0] in _LIBRARIES


_LIBRARIES = frozenset({"torch", "numpy", "triton", "subtensors", *sys.stdlib_module_names})
_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has, its parameters, buffers and modules among them: `State` looks after those."""


def _attributes(x: Any, but: Collection[str]) -> Iterator[tuple[Location, Any]]:
    held = vars(x)
    kept = [(name, value) for name, value in held.items() if name not in but and not _is_result(value)]
    yield from ((Location(held, name, is_attribute=True), value) for name, value in kept)


def _is_result(x: Any) -> bool:
    """Is it a tensor that was computed? A program that keeps one does not read it as state."""
    return isinstance(x, Tensor) and (not x.is_leaf or isinstance(x, PaddedTensor))
