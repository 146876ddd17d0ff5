"""The values that hyperparameters may have: declared once a class, checked wherever a parameter group takes them.

    Accepted(torch.optim.Adam)   torch's constructor decides, so that both packages always agree
    Accepted(eps="(0, inf]")     ranges by name; those that have one name everywhere have one range (`COMMON`)
    None                         an optimizer of the user's own

Beside these, a hyperparameter is a number if the class says so, by the default or the annotation in its constructor, or
by the annotation in `update`. Numbers are never NaN, which torch's classes let pass here and there.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from types import MethodType, NoneType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from subtensors.arguments import shown
from subtensors.lists.tensor_list import TensorList

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

COUNTERPARTS: dict[type[torch.optim.Optimizer], Callable[..., Any]] = {}
"""The classes here that torch.optim has, too, by torch's."""

OPTIONS: set[str] = set()
"""The names of the hyperparameters of all classes, and of the arguments of torch's."""

Values = dict[str, Any]
"""Hyperparameters by name."""

Given = TypeVar("Given")


class Accepted:
    """The hyperparameters that an optimizer class accepts.

    Args:
        peer: the class of torch.optim that has the same hyperparameters, if there is one; its constructor decides.
        ranges: the range of each name, as for `check_range`; without a peer these come before `COMMON`.

    Example:
        >>> Accepted(beta="[0, 1]").complete({"beta": 1.5})
        Traceback (most recent call last):
        ...
        ValueError: Invalid beta: 1.5; expected a number in [0, 1]
        >>> Accepted(torch.optim.SGD).complete({"lr": 0.5})["momentum"]
        0
    """

    def __init__(self, peer: type[torch.optim.Optimizer] | None = None, **ranges: Range) -> None:
        self.peer, self.ranges = peer, ranges if peer else COMMON | ranges

    def __set_name__(self, owner: type, name: str) -> None:
        if self.peer is not None:
            COUNTERPARTS[self.peer] = owner
            OPTIONS.update(inspect.signature(cast(Callable[..., object], self.peer)).parameters)

    def complete(self, values: Values) -> Values:
        """Return these values, and torch's defaults for those that are missing."""
        for name in self.ranges.keys() & values.keys():
            check_range(name, values[name], self.ranges[name])
        if self.peer is None:
            return dict(values)
        make: Callable[..., torch.optim.Optimizer] = self.peer
        known = inspect.signature(make).parameters
        return values | make([torch.empty(0, 0)], **{name: x for name, x in values.items() if name in known}).defaults


def filled_options(peer: type[torch.optim.Optimizer]) -> frozenset[str]:
    """The options that torch's class fills in where it loads a group without them: those that it once had not."""
    group: Values = {"params": []}
    peer.__new__(peer).__setstate__({"state": {}, "param_groups": [group], "defaults": {}})
    return frozenset(group) - {"params"}


def hyperparameters(arguments: Values) -> Values:
    """The hyperparameters among the `locals()` at the start of a constructor.

    Example:
        >>> hyperparameters({"self": None, "params": [], "lr": 0.5, "options": {}})
        {'lr': 0.5}
    """
    return {name: x for name, x in arguments.items() if name not in ("self", "params", "options", "__class__")}


def number_counts(cls: type, update: Callable[..., None]) -> dict[str, int]:
    """The hyperparameters that are numbers, and how many: more than 1 for a tuple of them."""
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


def checked_values(values: Values, counts: Mapping[str, int], accepted: Accepted | None) -> Values:
    """Check hyperparameters, and return them with the defaults of those that are missing.

    Raises:
        TypeError: a value is not a number, or a tuple of them.
        ValueError: NaN, a tensor of several elements, another count of numbers, or what the class refuses.
    """
    check_types(counts, values)
    for name, value in values.items():
        numbers = _numbers(value)
        count = counts.get(name, 1)
        if accepted is not None and count > 1 and len(numbers) != count:
            raise ValueError(f"Invalid {name}: {shown(value)}; expected {count} numbers")
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor) and name in counts and number.numel() != 1:
                place = f"[{index}]" if isinstance(value, tuple | list) else ""
                raise ValueError(f"Tensor {name}{place} must be 1-element")
        if any(map(_is_nan, numbers)):
            raise ValueError(f"Invalid {name}: {shown(value)}; expected a number, and nan is none")
    return dict(values) if accepted is None else accepted.complete(values)


def check_types(
    counts: Mapping[str, int], values: Values, place: str = "", never_none: Collection[str] = frozenset()
) -> None:
    """Raise TypeError where a hyperparameter is not the number that it should be; NaN is one here."""
    for name, count in counts.items():
        value = values.get(name)
        if type(value) is float and count == 1:
            continue
        is_wrong = isinstance(value, tuple | list) and count == 1
        for x in _numbers(value):
            is_wrong |= name in never_none if x is None else not isinstance(x, Real | Tensor)
        if is_wrong:
            raise TypeError(f"Invalid {name}: {shown(value)}{place}; expected {_number(count)}")


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
    if not all(any(_holds(x, n) for x in own.split(" or ")) for n, own in zip(numbers, ranges, strict=True)):
        raise ValueError(
            f"Invalid {name}: {shown(value)}; expected {_number(len(numbers))} in {' and '.join(dict.fromkeys(ranges))}"
        )


def _holds(allowed: str, value: object) -> bool:
    """Return whether a value is in an interval, or is a literal."""
    if allowed[0] not in "[(":
        literal = ast.literal_eval(allowed)
        return value is literal or (isinstance(value, Real | str) and value == literal)
    if isinstance(value, Tensor) and value.numel() != 1:
        return False
    low, high = map(float, allowed[1:-1].split(", "))
    if not isinstance(value, Real | Tensor) or not low <= (number := float(value)) <= high:
        return False
    return (allowed[0] == "[" or number != low) and (allowed[-1] == "]" or number != high)


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


def parameters_in(params: Given) -> Given | list[Tensor]:
    """Return an optimizer's first argument; of a TensorList, which torch would take for one parameter, its elements.

    Raises:
        TypeError: it is a module, or a method of one, instead of the parameters.
    """
    if isinstance(params, MethodType):
        raise TypeError(
            f"an optimizer takes parameters, got the method {params.__name__} of a {type(params.__self__).__name__}: "
            f"call it, model.{params.__name__}()"
        )
    if isinstance(params, nn.Module):
        raise TypeError(f"an optimizer takes parameters, got a {type(params).__name__}: give its model.parameters()")
    return params.tensors if isinstance(params, TensorList) else params
