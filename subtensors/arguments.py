"""Checks of public functions' arguments. Each error names the argument, what it takes, and the value."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import SupportsIndex

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
