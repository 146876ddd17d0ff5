"""The Python values that fused math reads besides its arguments, compared at each call.

A trace holds such values as constants: globals, contents of closures, defaults, and attributes and items of the objects
found there. `ReadValues` is a snapshot of all of them that the code names, of the function and of those it calls:

    function --code--> names of globals and attributes, closure cells, defaults
        '--> values --> functions: their code     objects, classes: their named attributes     containers: their items

It may hold more than a call reads, never less, except for what a library computes (`docs/fused.md`): code that reads
what nothing names, such as `globals()[name]` or an iterator, is refused. A function that names nothing of its own has
no reader, and costs nothing.
"""

from __future__ import annotations

import argparse
import dis
import functools
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from importlib.util import resolve_name
from inspect import getattr_static
from numbers import Number
from operator import attrgetter, is_, itemgetter, methodcaller
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from subtensors.dispatch.fused.errors import is_library, name_and_line
from subtensors.dispatch.ops.errors import RuleError

Read = Callable[[], Sequence[object]]

MAX_ITEMS = 1000
"""The most items of a container that are compared at each call."""

_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum, type(Ellipsis), slice)
_CONTAINERS = (list, dict, set, frozenset, deque, tuple)
_BY_NAME = frozenset({"globals", "locals", "eval", "exec", "__import__", "getattr"})
"""Functions of Python that read what a name says; of `getattr`, names in the code are known."""
_TOO_MANY = ", whose contents ({}) are too many to compare at each call"
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
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
        return name_and_line(name.rstrip("'"), self._codes)


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
    if isinstance(value, _NAMESPACES) or hasattr(value.__class__, "tobytes"):
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
        if length or found:
            read = (lambda: (*get(items), len(items))) if length else functools.partial(get, items)
            self._watch(read, [prefix + name for name in found])

    def _visit(self, name: str, value: object, is_root: bool = False) -> None:
        if isinstance(value, str):
            self.names |= _words_in(value)  # it may be the name in a `getattr`
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
                if value is os and self.names & {"environ", "getenv"}:
                    self._found(f"{name}.environ", os.environ)
                if not is_library(value.__name__):
                    found = [n for n in vars(value) if n in self.names and not n.startswith("__")]
                    self._watch_items(vars(value), found, f"{name}.", length=False)
            case type():
                self._visit_class(name, value)
            case list() | dict() | set() | frozenset() | deque() | tuple():
                self._visit_container(name, value)
            case Mapping() if is_library(type(value).__module__):
                self._visit_container(name, value)
            case Iterator() if is_library(type(value).__module__) and type(value) not in weakref.ProxyTypes:
                self._refuse(f"reads {name}, an iterator, which has other values at each call", name)
            case ContextVar():
                self._watch(lambda: [value.get(None)], [f"{name}.get()"])
            case weakref.ReferenceType():
                self._watch(lambda: [value()], [f"{name}()"])
            case attrgetter() | methodcaller():
                self.names |= _words_in(value.__reduce__()[1])
            case _ if hasattr(value.__class__, "tobytes"):
                if len(methodcaller("tobytes")(value)) > 8 * MAX_ITEMS:
                    self._refuse(f"reads {name}{_TOO_MANY.format('an array')}", name)
                self._watch(lambda: [methodcaller("tobytes")(value)], [f"the contents of {name}"])
            case _ if getattr_static(value, "__wrapped__", None) is not None:
                self._visit(name, attrgetter("__wrapped__")(value), is_root)
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
        for unknown in sorted(_read_by_name(code) - function.__globals__.keys()):
            self._refuse(f"calls {unknown}, by which it may read any value", unknown)
        if imported := _imports(code, function.__globals__.get("__package__")):
            # A module that is not imported yet is watched for: the first trace may import it.
            self._watch(lambda: [sys.modules.get(n, object) for n in imported], imported)
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
            self._refuse(f"reads {name}{_TOO_MANY.format(f'{len(value)} items')}", name)
        if isinstance(value, Mapping):
            names = [f"a key of {name}"] * len(value) + [f"{name}[{key!r}]" for key in value]
            self._watch(lambda: [*value, *value.values()], names)
            return
        names = [f"{name}[{i}]" for i in range(len(value))]
        if not isinstance(value, (tuple, frozenset)):
            self._watch(functools.partial(tuple, value), names)
            return
        for part, item in zip(names, value, strict=True):
            self._found(part, item)

    def _refuse(self, what: str, name: str) -> NoReturn:
        place = name_and_line(name, self.codes).removeprefix(name)
        raise RuleError(
            f"this math cannot be fused: it {what}{place}\n  instead: pass what it needs of them as arguments"
        )

    def _visit_class(self, name: str, kind: type) -> None:
        self._visit(f"{name}.__class__", type(kind))  # which may have properties
        for owner in kind.__mro__:
            if is_library(owner.__module__):
                continue
            own = {n: x for n, x in vars(owner).items() if n in self.names or _is_arithmetic(n, x)}
            self._watch_items(vars(owner), list(own), f"{owner.__name__}.", length=True)

    def _visit_object(self, name: str, value: object, is_root: bool) -> None:
        kind = value.__class__ if type(value) in weakref.ProxyTypes else type(value)
        if is_root:
            self.names |= {"__call__", "forward"}
        if isinstance(value, nn.Module):
            children = value._modules
            self._watch_items(children, [n for n in children if n in self.names], f"{name}.", length=False)
        attributes = value.__dict__ if kind.__dictoffset__ else None
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
    return frozenset(code.co_names).union(_words_in(code.co_consts), *map(names_in, _inner(code)))


def _words_in(values: object) -> set[str]:
    """The names that strings in nested tuples have: `rate`, and both of `inner.rate`."""
    if isinstance(values, tuple):
        return set().union(*map(_words_in, values))
    words = values.split(".") if isinstance(values, str) else [""]
    return set(words) if all(word.isidentifier() for word in words) else set()


@functools.cache
def _imports(code: types.CodeType, package: str | None) -> tuple[str, ...]:
    """The modules that a function's code may import, and those that these may be the packages of."""
    found: list[str] = []
    steps = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for level, taken, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            name = resolve_name("." * level.argval + step.argval, package)
            found += [name, *(f"{name}.{part}" for part in taken.argval or ())]
    found += [name for inner in _inner(code) for name in _imports(inner, package)]
    return tuple(name for name in dict.fromkeys(found) if name == "os" or not is_library(name))


@functools.cache
def _read_by_name(code: types.CodeType) -> frozenset[str]:
    """The functions of `_BY_NAME` that a function's code uses, except for `getattr` with names that are known."""
    if "site-packages" in Path(code.co_filename).parts:
        return frozenset()  # another package's, and the user's code names the attributes of its objects
    used = [x for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL" and x.argval in _BY_NAME]
    computed = [x.argval for x in used if x.argval != "getattr" or not _names_its_attribute(code, x)]
    return frozenset(computed).union(*map(_read_by_name, _inner(code)))


def _names_its_attribute(code: types.CodeType, getter: dis.Instruction) -> bool:
    """Return whether a use of `getattr` is a call with a literal, or with a variable from outside the function."""
    if code.co_name in ("__getattr__", "__getattribute__"):
        return True  # which Python calls with a name in the code
    steps = [x for x in dis.get_instructions(code) if x.opname not in ("PRECALL", "CACHE", "EXTENDED_ARG")]
    for i, call in enumerate(steps):
        if call.opname == "CALL" and call.positions and (call.positions[::2] == (getter.positions or ())[::2]):
            name = steps[i - (call.arg or 0) + 1]
            return name.opname in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_ATTR") or name.argval in code.co_freevars
    return False


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(own).union(*map(_globals_read, _inner(code)))
