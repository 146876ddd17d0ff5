"""Checks of public functions' arguments, and of names that are nearly right. Each error says what to write instead."""

from __future__ import annotations

import difflib
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import SizeError

LARGEST_SIZE = (1 << 63) - 1
"""The largest size that a tensor's dim can have."""


def signature_of(function: Callable[..., object]) -> str:
    """Return the signature of a function or class as text; "(...)" where Python doesn't know it.

    >>> signature_of(lambda x, *, y=1: x), signature_of(torch.add)
    ('(x, *, y=1)', '(...)')
    """
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


def shown(value: object) -> str:
    """Return a value as an error message shows it: a tensor by its type and shape, others by their repr, cut off.

    >>> shown(torch.ones(2, 3)), shown("a" * 100), shown(None)
    ('a Tensor of shape (2, 3)', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...", 'None')
    """
    if isinstance(value, Tensor):
        kind = type(value)
        has_shape = kind in (Tensor, torch.nn.Parameter) and not value.is_nested
        return f"a {kind.__name__} of shape {tuple(value.shape)}" if has_shape else f"a {kind.__name__}"
    text = repr(value)
    return text if len(text) <= 63 else f"{text[:60]}..."


def whole_number(name: str, value: object, at_least: int | None = None) -> int:
    """Return an argument as an int.

    Args:
        name: of the argument, as a message names it.
        value: an int, or a whole number of another type such as numpy's.
        at_least: the smallest value that is allowed; None for any.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below `at_least`.

    >>> whole_number("rows", "8", at_least=1)
    Traceback (most recent call last):
    ...
    TypeError: rows is an int of at least 1, got '8'
    """
    wanted = "an int" if at_least is None else f"an int of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or isinstance(value, Tensor):
        raise TypeError(f"{name} is {wanted}, got {shown(value)}")
    try:
        found = operator.index(value)
    except TypeError:  # an array of several numbers
        raise TypeError(f"{name} is {wanted}, got {shown(value)}") from None
    if at_least is not None and found < at_least:
        raise ValueError(f"{name} is {wanted}, got {shown(value)}")
    return found


def size(name: str, value: object) -> int:
    """Return an argument that is a size: an int that a tensor's dim can have.

    Raises:
        TypeError: it is no int.
        SizeError: no dim is as large.
    """
    found = value if type(value) is int else whole_number(name, value)
    if found > LARGEST_SIZE:
        raise SizeError(f"{name} is at most {LARGEST_SIZE}, the largest size of a dim; got {found}")
    return found


def flag(name: str, value: object) -> None:
    """Raise TypeError unless an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {shown(value)}")


class Subpackage(ModuleType):
    """A folder of the package that is called like what it holds, in place of the function."""

    _instead: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError, with the function that is meant."""
        raise TypeError(f"{self.__name__} is a folder of the package: call {self._instead}")


def refuse_calls(instead: Mapping[str, str]) -> None:
    """Make calls of subpackages errors that say what to call.

    Args:
        instead: by the full name of a subpackage that was imported, the call that is meant.

    Example:
        >>> import subtensors as st
        >>> st.chunked(1)
        Traceback (most recent call last):
        ...
        TypeError: subtensors.chunked is a folder of the package: call st.chunk(x)
    """
    for name, call in instead.items():
        module = sys.modules[name]
        module.__class__ = Subpackage
        vars(module)["_instead"] = call


def missing_name(module: str, name: str, names: Collection[str], elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error about an attribute that a module lacks.

    Args:
        module: its full name.
        name: of the attribute.
        names: its public names.
        elsewhere: what to say of names that users may expect there.

    Example:
        >>> print(missing_name("m", "adamw", ["Adam", "AdamW"], {}))
        module 'm' has no attribute 'adamw'; did you mean 'AdamW'?
        >>> print(missing_name("m", "LBFGS", ["Adam"], {"LBFGS": "torch has it"}))
        module 'm' has no attribute 'LBFGS'; torch has it
    """
    known = {x.lower(): x for x in names}
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    advice = elsewhere.get(name) or (f"did you mean {known[close[0]]!r}?" if close else "")
    return AttributeError(f"module {module!r} has no attribute {name!r}{'; ' * bool(advice)}{advice}")
