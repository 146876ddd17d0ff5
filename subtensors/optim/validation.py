"""Checking the arguments of an optimizer: by torch.optim's class of the same name where there is one."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def torch_defaults(cls: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> dict[str, Any]:
    """The defaults of torch's class for these arguments, which it has checked.

    Torch's own class checks the values and names the options, so that both always agree.

    Args:
        cls: a class of torch.optim.
        arguments: the `locals()` of a constructor that takes what `cls` takes; what `cls` doesn't know is left out.

    Returns:
        The hyperparameters of a group.

    Raises:
        ValueError: a value is out of range, as `cls` says it.

    Example:
        >>> torch_defaults(torch.optim.SGD, {"lr": 0.5, "self": None})["lr"]
        0.5
    """
    known = inspect.signature(cls).parameters.keys() - {"params"}
    peer: Any = cls([torch.empty(0, 0)], **{name: value for name, value in arguments.items() if name in known})
    return dict(peer.defaults)


def check_not_negative(**values: Any) -> None:
    """Refuse a number below 0, or none.

    Raises:
        ValueError: with the name of the argument and its value.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"Invalid {name}: {value}; expected 0 or more")


def check_fractions(count: int, **values: Any) -> None:
    """Refuse what is not `count` numbers that are 0 or more and less than 1.

    Raises:
        ValueError: with the name of the argument and its value.
    """
    for name, value in values.items():
        numbers = (value,) if count == 1 else value
        if len(numbers) != count or not all(0 <= number < 1 for number in numbers):
            wanted = "a number" if count == 1 else f"{count} numbers"
            raise ValueError(f"Invalid {name}: {value}; expected {wanted} in [0, 1)")
