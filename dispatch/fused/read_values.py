"""The Python values that fused math reads besides its arguments, compared at each call.

A trace holds such values as constants: globals, contents of closures, defaults, and attributes and items of the objects
found there. `ReadValues` is a snapshot of all of them that the code names, of the function and of those it calls:

    function --code--> names of globals and attributes, closure cells, defaults
        '--> values --> functions: their code     objects, classes: their named attributes     containers: their items

It may hold more than a call reads, never less, except for what a library computes (`docs/fused.md`). A function that
names nothing of its own has no reader, and costs nothing.
"""

from __future__ import annotations

import argparse
import dis
import functools
import linecache
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from inspect import getattr_static
from numbers import Number
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from subtensors.dispatch.ops.errors import RuleError

Read = Callable[[], Sequence[object]]

MAX_ITEMS = 1000
"""The most items of a container that are compared at each call."""

_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum, type(Ellipsis), slice)
_CONTAINERS = (list, dict, set, frozenset, deque, tuple)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
_PACKAGES = frozenset({"builtins", "torch", "numpy", "triton", "sympy", "optree", "subtensors"})
_NOT_MATH = frozenset(
    "__init__ __new__ __repr__ __str__ __eq__ __hash__ __init_subclass__ __post_init__ __reduce__ __reduce_ex__ "
    "__getstate__ __setstate__ __setattr__ __delattr__ __setitem__ __del__ __copy__ __deepcopy__ __replace__".split()
)
"""Methods that Python calls for other purposes than arithmetic, of which generated ones name all attributes."""


class ReadValues:
    """A snapshot of the values that a function reads besides its arguments.

    Raises:
        RuleError: it reads a container of more than `MAX_ITEMS`.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        names: set[str] = set()
        while True:
            known = len(names)
            walk = _Walk(function, names)
            if len(names) == known:
                break
        self.readers = walk.readers
        """Functions that read the values, each with what it read; none if the function names nothing of its own."""
        self._codes = walk.codes
        self.entries = walk.entries
        """The values by their names in the source, such as `config.rate`, in a form that can be compared."""
        self.key = tuple(self.entries.items())
        """Equal for snapshots of the same values."""

    @property
    def has_plain(self) -> bool:
        """Return whether the function reads numbers, strings and the like that may change."""
        return bool(self.readers) and any(type(value) is _Plain for value in self.entries.values())

    def hold(self) -> bool:
        """Return whether all values are what they were."""
        for index, (read, before) in enumerate(self.readers):
            try:
                now = read()
            except (LookupError, AttributeError, ValueError):
                return False
            if len(now) == len(before) and all(map(is_, now, before)):
                continue
            if len(now) != len(before) or not all(map(_are_equal, now, before)):
                return False
            self.readers[index] = read, now
        return True

    def first_difference(self, other: ReadValues, only_plain: bool = False) -> str:
        """The name of the first value that both have and that differs; "" if there is none."""
        for name, value in self.entries.items():
            if name in other.entries and other.entries[name] != value and (not only_plain or type(value) is _Plain):
                return name
        return ""

    def describe(self, name: str) -> str:
        """The name of a value, and the line of the source that reads it."""
        name = name.rstrip("'")
        last = name.partition("[")[0].rpartition(".")[2]
        for code in self._codes:
            line = next((line for line, used in _lines_with_names(code) if used == last), 0)
            if line:
                return f"{name}\n  at {code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}"
        return name


class _Plain(tuple[object, ...]):
    """A plain value as its type and text: Python finds 1, 1.0 and True equal, 0.0 and -0.0, and no NaN."""

    __slots__ = ()


class _Same:
    """A value that is compared by identity."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _comparable(value: object) -> object:
    """A value in a form that is equal where a trace would be; parts that are walked themselves are left out."""
    if isinstance(value, _PLAIN):
        return _Plain((type(value), repr(value)))
    if isinstance(value, Tensor):  # fused math can't use it, but may read its metadata
        return type(value), value.dtype, value.device, tuple(value.shape)
    if isinstance(value, _CONTAINERS):
        return type(value), len(value)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, types.MethodType):
        return "method"
    if isinstance(value, _NAMESPACES) or hasattr(value, "tobytes"):
        return type(value)
    if isinstance(value, type | types.BuiltinFunctionType) or is_library(type(value).__module__):
        return _Same(value)
    return type(value)


def _are_equal(now: object, before: object) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, _PLAIN) and _comparable(now) == _comparable(before)
    )


class _Walk:
    """One walk from a function to the values that it reads, through attributes that `names` holds; adds to `names`."""

    def __init__(self, function: Callable[..., object], names: set[str]) -> None:
        self.names = names
        self.readers: list[tuple[Read, Sequence[object]]] = []
        self.entries: dict[str, object] = {}
        self.codes: list[types.CodeType] = []
        self._seen: dict[int, object] = {}
        self._todo: deque[tuple[str, object]] = deque()
        self._visit("", function, is_root=True)
        while self._todo:
            name, value = self._todo.popleft()
            self._visit(name, value)

    def _watch(self, read: Read, names: Sequence[str]) -> None:
        """Add a reader of values with these names."""
        values = read()
        self.readers.append((read, values))
        for name, value in zip(names, values, strict=False):
            self._found(name, value)

    def _found(self, name: str, value: object) -> None:
        while name in self.entries:  # that of another function or object
            name += "'"
        self.entries[name] = _comparable(value)
        self._todo.append((name, value))

    def _watch_items(self, items: Mapping[str, object], found: Sequence[str], prefix: str, *, length: bool) -> None:
        """Watch some items of a mapping; with their number, so that new ones are noticed."""
        get: Callable[..., tuple[object, ...]] = itemgetter(*found, found[0]) if found else lambda _: ()
        if length:
            self._watch(lambda: (*get(items), len(items)), [prefix + name for name in found])
        elif found:
            self._watch(functools.partial(get, items), [prefix + name for name in found])

    def _visit(self, name: str, value: object, is_root: bool = False) -> None:
        if isinstance(value, (*_PLAIN, Tensor)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case types.FunctionType():
                self._visit_function(name, value, is_root)
            case types.MethodType():
                self._visit("self" if is_root or not name else name, value.__self__)
                self._visit(name, value.__func__, is_root)
            case functools.partial():
                for part in (value.func, value.args, value.keywords):
                    self._visit(name, part, is_root and part is value.func)
            case property() | classmethod() | staticmethod() | functools.cached_property():
                self._visit(name, function_of(value))
            case types.ModuleType():
                if not is_library(value.__name__):
                    found = [n for n in vars(value) if n in self.names and not n.startswith("__")]
                    self._watch_items(vars(value), found, f"{name}.", length=False)
            case type():
                self._visit_class(name, value)
            case list() | dict() | set() | frozenset() | deque() | tuple():
                self._visit_container(name, value)
            case _ if hasattr(value, "tobytes"):
                if len(value.tobytes()) > 8 * MAX_ITEMS:
                    self._refuse_size(name, "an array")
                self._watch(lambda: [value.tobytes()], [f"the contents of {name}"])
            case _ if hasattr(value, "__wrapped__"):
                self._visit(name, value.__wrapped__, is_root)
            case _ if not isinstance(value, types.BuiltinFunctionType):
                self._visit_object(name, value, is_root)

    def _visit_function(self, name: str, function: types.FunctionType, is_root: bool) -> None:
        code, cells = function.__code__, function.__closure__ or ()
        if is_library(function.__module__):
            # A library keeps no values of the user's, but what it was given is in its closure.
            self._todo += [(name, cell.cell_contents) for cell in cells if is_root and is_filled(cell)]
            return
        self.codes.append(code)
        self.names |= names_in(code)
        filled = [(cell, free) for cell, free in zip(cells, code.co_freevars, strict=True) if is_filled(cell)]
        if filled:
            self._watch(lambda: [cell.cell_contents for cell, _ in filled], [free for _, free in filled])
        values = function.__globals__
        found = [n for n in sorted(_globals_read(code)) if n in values]
        modules = [n for n in found if isinstance(values[n], types.ModuleType)]
        self._watch_items(values, [n for n in found if n not in modules], "", length=False)
        self._todo.extend((n, values[n]) for n in modules)
        for attribute in ("__defaults__", "__kwdefaults__"):
            if getattr(function, attribute):
                get = attrgetter(attribute, attribute)
                self._watch(functools.partial(get, function), [f"{function.__name__}.{attribute}"])

    def _visit_container(self, name: str, value: Collection[object]) -> None:
        if len(value) > MAX_ITEMS:
            self._refuse_size(name, f"{len(value)} items")
        if isinstance(value, dict):
            names = [f"a key of {name}"] * len(value) + [f"{name}[{key!r}]" for key in value]
            self._watch(lambda: [*value, *value.values()], names)
            return
        names = [f"{name}[{i}]" for i in range(len(value))]
        if isinstance(value, (tuple, frozenset)):
            for part, item in zip(names, value, strict=True):
                self._found(part, item)
        else:
            self._watch(functools.partial(tuple, value), names)

    @staticmethod
    def _refuse_size(name: str, contents: str) -> NoReturn:
        raise RuleError(
            f"this math cannot be fused: it reads {name}, whose contents ({contents}) are too many to compare at each "
            "call\n  instead: pass what it needs of them as arguments"
        )

    def _visit_class(self, name: str, kind: type) -> None:
        for owner in kind.__mro__:
            if is_library(owner.__module__):
                continue
            own = {n: x for n, x in vars(owner).items() if n in self.names or _is_arithmetic(n, x)}
            self._watch_items(vars(owner), list(own), f"{owner.__name__}.", length=True)

    def _visit_object(self, name: str, value: object, is_root: bool) -> None:
        kind = type(value)
        if is_root:
            self.names |= {"__call__", "forward"}
        if isinstance(value, nn.Module):
            children = value._modules
            self._watch_items(children, [n for n in children if n in self.names], f"{name}.", length=False)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            found = [n for n in attributes if n in self.names]
            if found or not is_library(kind.__module__):
                self._watch_items(attributes, found, f"{name}.", length=True)
        members = [n for n in self.names if isinstance(getattr_static(kind, n, None), types.MemberDescriptorType)]
        if slots := sorted(n for n in members if hasattr(value, n)):
            get = attrgetter(*slots, slots[0])
            self._watch(functools.partial(get, value), [f"{name}.{n}" for n in slots])
        if not is_library(kind.__module__):
            self._visit(f"{name}.__class__", kind)


def function_of(x: object) -> object:
    """Return the function that a property, class method, static method or cached property holds; None if none."""
    return next(filter(None, (getattr(x, part, None) for part in ("fget", "__func__", "func"))), None)


def _is_arithmetic(name: str, value: object) -> bool:
    """Return whether Python may call this method of a class without naming it."""
    return name.startswith("__") and name not in _NOT_MATH and isinstance(value, _DESCRIPTORS)


def is_filled(cell: types.CellType) -> bool:
    """Return whether a closure cell holds anything yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names in a function's code and in the functions that it defines, and strings that `getattr` may take."""
    words = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    return frozenset(code.co_names).union(words, *map(names_in, _inner(code)))


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(own).union(*map(_globals_read, _inner(code)))


def _lines_with_names(code: types.CodeType) -> Iterator[tuple[int, object]]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and instruction.positions and instruction.positions.lineno:
            yield instruction.positions.lineno, instruction.argval
    for inner in _inner(code):
        yield from _lines_with_names(inner)


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, torch or another library that holds no values of the user's."""
    name = str(module).partition(".")[0]
    if name in _PACKAGES:
        return True
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)  # a user's own file may have the name of one of Python's
    return file is None or Path(file).resolve().is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
