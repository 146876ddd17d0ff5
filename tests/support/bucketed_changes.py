"""A case of what may change between two calls of a bucketed program, and ways to change it.

A case makes a program, changes something that the program reads (or doesn't), and says what the next call does.
`bucketed_change_cases.py` lists them, and `tests/bucketed/test_changes_between_calls.py` runs each beside the plain
program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Then(Enum):
    """What the first call after a change does."""

    RECAPTURES = "its graph is stale and captured again, with a warning"
    CAPTURES_ANOTHER = "the change is part of the key of a call, so it gets a graph of its own"
    REPLAYS = "the graph that there is answers"


class Program(SimpleNamespace):
    """A program, and what a case changes of it.

    `call` is the program and `arguments` follow x. Parameters and gradients of `net` are compared after each call.
    """

    call: Callable[..., Tensor]
    arguments: tuple[Any, ...] = ()
    net: nn.Module | None = None


Change = Callable[[Any], object]


@dataclass(frozen=True)
class Case:
    """A change between two calls.

    Args:
        name: what is changed.
        make: makes the program on a device; called twice, the results are equal.
        change: changes one of them.
        warning: why the graph is captured again, as the log says it.
        then: what the next call does.
        is_seen: whether the result of the program changes.
        times: how often it is changed.
        back: undoes the change; the first graph answers again, and the second after a second change.
        gradients: whether autograd tracks the calls.
        before, after: how many rows the calls before and after a change have.
        captures: how many graphs are captured after a change.
    """

    name: str
    make: Callable[[str], Program]
    change: Change
    warning: str = ""
    then: Then = Then.RECAPTURES
    is_seen: bool = True
    times: int = 1
    back: Change | None = None
    gradients: bool = False
    before: tuple[int, ...] = (5, 6)
    after: tuple[int, ...] = (5, 6, 5)
    captures: int = 1


def replace(path: str, new: Callable[[Any], Any]) -> Change:
    """Replace an attribute, which a dotted path names, by a function of its value."""
    way, _, last = path.rpartition(".")

    def change(p: Program) -> None:
        holder = functools.reduce(getattr, way.split("."), p)
        setattr(holder, last, new(getattr(holder, last, None)))

    return change


def put(path: str, value: Any) -> Change:
    """Assign a value to an attribute, which a dotted path names."""
    return replace(path, lambda old: value)


def double(x: Any) -> Any:
    return x * 2


def assign(path: str, make: Callable[[str], Any]) -> Change:
    """Assign what a function makes on the program's device to an attribute, which a dotted path names."""
    return lambda p: put(path, make(p.device))(p)


def double_item(path: str, key: Any) -> Change:
    """Replace an item of a list or dict, which a dotted path names, by twice its value."""

    def change(p: Program) -> None:
        items = functools.reduce(getattr, path.split("."), p)
        items[key] = items[key] * 2

    return change


def double_parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight * 2)


def double_in(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def double_out(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def double_gradient(module: nn.Module, given: Any, out: Any) -> Any:
    return (given[0] * 2,)


def cast_and_back(t: Tensor) -> Tensor:
    return (t * 1.1).float().double()


def flip(t: Tensor) -> Tensor:
    """Swap the first and last dim of a tensor of shape (2, 3, 2)."""
    return t.transpose(0, 2)


def vector(device: str, value: float = 1.0) -> Tensor:
    return torch.full((3,), value, dtype=torch.float64, device=device)


def linear(device: str, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3, dtype=torch.float64, device=device)
