"""Guards of the Python values that graphs hold as constants: plain values that a program reads, and module hooks.

A value that the program itself writes while it runs, such as a count of its calls, is not guarded: it changes with
every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from subtensors.bucketed.state.locations import Location

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Kinds of values that Python code computes with, or decides by."""


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module holds its hooks."""


def is_plain(x: Any) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    return type(x) in PLAIN or (type(x) is tuple and all(map(is_plain, x)))


class Constants:
    """A snapshot of plain values and hooks, to be compared with their later values.

    Args:
        values: the locations where the program finds plain values, each with its value.
        modules: the modules whose hooks it runs.

    Example:
        >>> options = {"scale": 2.0}
        >>> found = Constants([(Location(options, "scale"), 2.0)], [])
        >>> options["scale"] = 3.0
        >>> found.first_other()
        'scale'
    """

    def __init__(self, values: Iterable[tuple[Location, Any]], modules: Sequence[nn.Module]) -> None:
        self._hooks = [getattr(m, kind) for m in modules for kind in HOOKS]
        self._hooked = self._hooks_now()
        self._watch(values)

    def _watch(self, values: Iterable[tuple[Location, Any]]) -> None:
        pairs = list(values)
        self._places, self._values = [place for place, _ in pairs], [value for _, value in pairs]
        names: dict[int, tuple[dict[Any, Any], list[Any]]] = {}
        for place in self._places:
            if type(place.holder) is dict:
                names.setdefault(id(place.holder), (place.holder, []))[1].append(place.key)
        self._dicts = [(itemgetter(*keys), held) for held, keys in names.values()]
        self._rest = [place for place in self._places if type(place.holder) is not dict]
        # A value that changed before this snapshot must not pass for the recorded one.
        self._seen = self._glance() if _are_equal(self._now(), self._values) else None

    def _glance(self) -> Any:
        """Return all values, read dict by dict in half the time of one by one; None if a name is gone."""
        try:
            return [get(held) for get, held in self._dicts], [place.now() for place in self._rest]
        except KeyError:
            return None

    def _now(self) -> list[Any]:
        return [place.now() for place in self._places]

    def _hooks_now(self) -> list[Any]:
        """Return the ids of the hooks, which are unique."""
        return list(chain.from_iterable(self._hooks)) if any(self._hooks) else []

    def first_other(self) -> str:
        """Return the name of the first value that changed, or "a hook of a module"; "" if nothing changed."""
        if self._hooks_now() != self._hooked:
            return "a hook of a module"
        if self._seen is not None and _are_equal(self._glance(), self._seen):
            return ""
        found = zip(self._places, self._now(), self._values, strict=True)
        return next((place.name for place, now, before in found if not _are_equal(now, before)), "")

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """A context in which the program runs: values that it changes itself are watched no longer."""
        hooks, before = self._hooks_now(), self._now()
        try:
            yield
        finally:
            if (hooked := self._hooks_now()) != hooks:
                self._hooked = hooked
            if not _are_equal(after := self._now(), before):
                stayed = [_are_equal(a, b) for a, b in zip(after, before, strict=True)]
                self._watch(compress(list(zip(self._places, self._values, strict=True)), stayed))


def _are_equal(now: Any, before: Any) -> bool:
    """Return whether two values are equal; False if comparing raises, as it may where a tensor took a value's place."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError, TypeError):
        return False
