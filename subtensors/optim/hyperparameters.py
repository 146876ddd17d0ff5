"""The values that hyperparameters may have: declared once a class, checked wherever a parameter group takes them.

    Like(torch.optim.Adam)       torch's constructor decides, so that both packages always agree
    Ranges(eps="(0, inf]")       ranges by name; those that have one name everywhere have one range (`COMMON`)
    Ranges.none()                an optimizer of the user's own

Beside these, a hyperparameter is a number if the class says so, by the default or the annotation in its constructor, or
by the annotation in `update`. Numbers are never NaN, which torch's classes let pass here and there.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

Range = str | tuple[str, ...]
"""The range of a number, or of each of several."""

COMMON: dict[str, Range] = {
    "lr": "[0, inf]",
    "eps": "[0, inf]",
    "weight_decay": "[0, inf]",
    "betas": "[0, 1)",
    "momentum": "[0, 1)",
}
"""The ranges of hyperparameters that many optimizers have; of several numbers, each is in it."""

Values = dict[str, Any]
"""Hyperparameters by name."""


class Accepted(Protocol):
    """The hyperparameters that a class accepts."""

    counts_are_fixed: bool
    """Whether a hyperparameter of several numbers is of as many as its default."""

    def complete(self, values: Values) -> Values:
        """Return these hyperparameters, and the defaults of those that are missing; raise where one is not accepted."""
        ...


class Ranges:
    """Ranges of hyperparameters.

    Args:
        ranges: the range of each name, as for `check_range`; these come before `COMMON`.

    Example:
        >>> Ranges(beta="[0, 1]").complete({"beta": 1.5})
        Traceback (most recent call last):
        ...
        ValueError: Invalid beta: 1.5; expected a number in [0, 1]
    """

    counts_are_fixed = True

    def __init__(self, **ranges: Range) -> None:
        self.ranges: dict[str, Range] = COMMON | ranges

    @classmethod
    def none(cls) -> Self:
        """No ranges: every number is accepted."""
        accepted = cls()
        accepted.ranges, accepted.counts_are_fixed = {}, False
        return accepted

    def complete(self, values: Values) -> Values:
        """Return these values.

        Raises:
            ValueError: one is out of its range.
        """
        for name in self.ranges.keys() & values.keys():
            check_range(name, values[name], self.ranges[name])
        return dict(values)


class Like:
    """The hyperparameters that the constructor of one of torch's classes accepts.

    Args:
        cls: the class.
        ranges: ranges of what it doesn't check.

    Example:
        >>> Like(torch.optim.SGD).complete({"lr": 0.5})["momentum"]
        0
    """

    counts_are_fixed = True

    def __init__(self, cls: type[torch.optim.Optimizer], **ranges: Range) -> None:
        self.make: Callable[..., torch.optim.Optimizer] = cls
        self.known = inspect.signature(cls).parameters.keys() - {"params"}
        self.ranges = ranges

    def complete(self, values: Values) -> Values:
        """Return these values, and torch's defaults for those that are missing.

        Raises:
            ValueError: one is out of range, as torch says it.
        """
        for name in self.ranges.keys() & values.keys():
            check_range(name, values[name], self.ranges[name])
        peer = self.make([torch.empty(0, 0)], **{name: x for name, x in values.items() if name in self.known})
        return {**values, **peer.defaults}


def hyperparameters(arguments: Values) -> Values:
    """The hyperparameters among the `locals()` at the start of a constructor.

    Example:
        >>> hyperparameters({"self": None, "params": [], "lr": 0.5, "options": {}})
        {'lr': 0.5}
    """
    return {name: x for name, x in arguments.items() if name not in ("self", "params", "options", "__class__")}


def number_counts(cls: type, update: Callable[..., None]) -> dict[str, int]:
    """The hyperparameters that are numbers, and how many: more than 1 for a tuple of them.

    Args:
        cls: the class of an optimizer.
        update: its update.
    """
    counts: dict[str, int] = {}
    # The constructor of a subclass may hand on `**kwargs` to the one that names them.
    constructors = [vars(owner)["__init__"] for owner in cls.__mro__ if "__init__" in vars(owner)]
    for function in (*constructors, update):
        try:
            parameters, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
        except (NameError, TypeError, ValueError):  # names for type checkers only; a function of C
            continue
        for name, parameter in parameters.items():
            if count := _count(parameter.default) or _count_of_type(hints.get(name)):
                counts.setdefault(name, count)
    return counts


def checked_values(values: Values, counts: Mapping[str, int], accepted: Accepted) -> Values:
    """Check hyperparameters, and return them with the defaults of those that are missing.

    Args:
        values: hyperparameters by name.
        counts: which are numbers (`number_counts`); None is left to the class.
        accepted: what else the class says.

    Raises:
        TypeError: a value is not a number, or a tuple of them.
        ValueError: NaN, a tensor of several elements, another count of numbers, or what the class refuses.
    """
    check_types(counts, values)
    for name, value in values.items():
        numbers = _numbers(value)
        count = counts.get(name, 1)
        if accepted.counts_are_fixed and count > 1 and len(numbers) != count:
            raise ValueError(f"Invalid {name}: {value!r}; expected {count} numbers")
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor) and name in counts and number.numel() != 1:
                place = f"[{index}]" if isinstance(value, tuple | list) else ""
                raise ValueError(f"Tensor {name}{place} must be 1-element")
        if any(map(_is_nan, numbers)):
            raise ValueError(f"Invalid {name}: {value!r}; expected a number, and nan is none")
    return accepted.complete(values)


def check_types(counts: Mapping[str, int], values: Values) -> None:
    """Raise TypeError where a hyperparameter is not the number that it should be; NaN is one here."""
    for name, count in counts.items():
        value = values.get(name)
        are_numbers = all(x is None or isinstance(x, Real | Tensor) for x in _numbers(value))
        if not are_numbers or (isinstance(value, tuple | list) and count == 1):
            raise TypeError(f"Invalid {name}: {value!r}; expected {_number(count)}")


def check_range(name: str, value: object, allowed: Range) -> None:
    """Refuse a value that is not in its range.

    Args:
        name: of the hyperparameter.
        value: a number or several, a tensor of one element, or None.
        allowed: an interval such as `[0, 1)`, a literal, or alternatives: `None or (0, inf]`; or one for each number.

    Raises:
        ValueError: with the name, the value and the range.
    """
    numbers = _numbers(value)
    ranges = allowed if isinstance(allowed, tuple) else (allowed,) * len(numbers)
    if not all(any(x.holds(number) for x in _alternatives(own)) for number, own in zip(numbers, ranges, strict=True)):
        expected = [" or ".join(x.describe() for x in _alternatives(own)) for own in dict.fromkeys(ranges)]
        raise ValueError(f"Invalid {name}: {value!r}; expected {_number(len(numbers))} in {' and '.join(expected)}")


class _Interval(NamedTuple):
    text: str
    low: float
    high: float

    def holds(self, value: object) -> bool:
        if not isinstance(value, Real | Tensor):
            return False
        number = float(value)
        is_above = self.low <= number if self.text[0] == "[" else self.low < number
        return is_above and (number <= self.high if self.text[-1] == "]" else number < self.high)

    def describe(self) -> str:
        return self.text


class _Literal(NamedTuple):
    value: object

    def holds(self, value: object) -> bool:
        return value is self.value or (not isinstance(value, Tensor) and value == self.value)

    def describe(self) -> str:
        return repr(self.value)


@cache
def _alternatives(allowed: str) -> list[_Interval | _Literal]:
    alternatives: list[_Interval | _Literal] = []
    for text in allowed.split(" or "):
        if text[0] in "[(":
            low, high = text[1:-1].split(", ")
            alternatives.append(_Interval(text, float(low), float(high)))
        else:
            alternatives.append(_Literal(ast.literal_eval(text)))
    return alternatives


def _number(count: int) -> str:
    return "a number" if count == 1 else f"{count} numbers"


def _numbers(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _is_nan(number: object) -> bool:
    is_number = number.numel() == 1 if isinstance(number, Tensor) else isinstance(number, Real)
    return is_number and bool(number != number)


def _count(default: object) -> int:
    """The number of numbers in a default; 0 if it is anything else."""
    numbers = [x for x in _numbers(default) if x is not None]
    are_numbers = bool(numbers) and all(isinstance(x, Real) and not isinstance(x, bool) for x in numbers)
    return len(_numbers(default)) if are_numbers else 0


def _count_of_type(hint: object) -> int:
    """1 if a type is that of a number, which may also be a tensor or None; else 0."""
    members = set(typing.get_args(hint) or [hint])
    return int(bool(members & {int, float}) and members <= {int, float, Tensor, NoneType})
