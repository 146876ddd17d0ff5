"""Calls of public functions with some arguments replaced, drawn by hypothesis, and what is wrong with how they end."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from entry_points import ENTRY_POINTS
from hypothesis import strategies as some
from oracle import complaint
from wrong_values import VALUES

SECONDS = 20
"""A call that takes longer is taken to hang."""


class Hangs(BaseException):
    """A call that has not ended after some seconds."""


@dataclass(frozen=True)
class Value:
    """How to make a value: each call gets one of its own.

    Args:
        kind: "named" for one of `VALUES`, "exact" for what is given, or the container that the parts are in.
        parts: its name, the value itself, or the parts of the container.
    """

    kind: str
    parts: Any

    def make(self) -> object:
        """Make the value."""
        if self.kind == "named":
            return VALUES[self.parts]()
        if self.kind == "exact":
            return self.parts
        if self.kind == "dict":
            return {key: part.make() for key, part in self.parts}
        made = [part.make() for part in self.parts]
        return tuple(made) if self.kind == "tuple" else made

    def __repr__(self) -> str:
        return f"<{self.parts}>" if self.kind == "named" else f"{self.kind}({self.parts!r})"


def values() -> some.SearchStrategy[Value]:
    """Draw values: those with a name, numbers and texts of any kind, and small containers of them."""
    single = some.sampled_from(sorted(VALUES)).map(lambda name: Value("named", name)) | some.one_of(
        some.integers(), some.floats(), some.text(max_size=4), some.booleans(), some.none()
    ).map(lambda value: Value("exact", value))
    keys = some.integers(-3, 3) | some.sampled_from(["x", "mask", "params", "lr"])
    return some.recursive(
        single,
        lambda part: some.one_of(
            some.lists(part, max_size=3).map(lambda parts: Value("list", tuple(parts))),
            some.lists(part, max_size=3).map(lambda parts: Value("tuple", tuple(parts))),
            some.dictionaries(keys, part, max_size=2).map(lambda parts: Value("dict", tuple(parts.items()))),
        ),
        max_leaves=4,
    )


@some.composite
def calls(draw: some.DrawFn) -> tuple[str, dict[str, Value]]:
    """Draw an entry point, and what some of its arguments are replaced by."""
    name = draw(some.sampled_from(sorted(ENTRY_POINTS)))
    point = ENTRY_POINTS[name]
    replaced = draw(some.lists(some.sampled_from([*point.right(), *point.others]), min_size=1, max_size=3, unique=True))
    return name, {argument: draw(values()) for argument in replaced}


def outcome(name: str, replaced: Mapping[str, Value]) -> str:
    """Make a call, and return what is wrong with its error; "" if nothing is, or there was none."""
    point = ENTRY_POINTS[name]

    def arguments() -> dict[str, Any]:
        return {**point.right(), **{argument: value.make() for argument, value in replaced.items()}}

    def plain() -> object:
        assert point.plain is not None
        return point.plain(**arguments())

    with _quiet():
        given = arguments()
        try:
            with _within(SECONDS):
                point.call(**given)
        except (Exception, Hangs) as error:
            if isinstance(error, Hangs):
                return f"{name}({dict(replaced)}): hangs"
            if found := complaint(error, plain if point.plain else None):
                return f"{name}({dict(replaced)}): {found}: {type(error).__name__}: {str(error)[:300]}"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without warnings and logs, which a fuzzed call may give, in the default state of torch's generator."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """A context that raises `Hangs` after some seconds."""

    def raise_hangs(number: int, frame: FrameType | None) -> NoReturn:
        raise Hangs

    before = signal.signal(signal.SIGALRM, raise_hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
