"""Detection of names that are added to the attributes and small containers that a program reads, after its capture.

Code may ask whether a name exists (`getattr(self, "scale", 1)`), or find an object's name before that of its class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Holder(NamedTuple):
    """The attributes of an object, or a container.

    Args:
        held: a dict or list.
        is_object: whether these are attributes; then only names that occur in the program's code count.
    """

    held: Any
    is_object: bool


class NewAttributes:
    """A snapshot of the keys of some holders, to be compared with their later keys.

    Args:
        holders: distinct ones.
        names: the names in the code of the program.

    Example:
        >>> found = NewAttributes([Holder(held := {"scale": 2}, True)], {"scale", "shift"})
        >>> held["other"] = 1
        >>> found.first()
        ''
        >>> held["shift"] = 1
        >>> found.first()
        'shift'
    """

    def __init__(self, holders: Iterable[Holder], names: Collection[str]) -> None:
        self._holders, self._names = list(holders), names
        self._held = [holder.held for holder in self._holders]
        self._look()

    def _look(self) -> None:
        self._sizes = list(map(len, self._held))
        self._keys = [frozenset(held) if isinstance(held, dict) else None for held in self._held]

    def first(self) -> str:
        """Return the name of the first key that was added or removed; "" if there is none."""
        if list(map(len, self._held)) == self._sizes:
            return ""
        for holder, size, keys in zip(self._holders, self._sizes, self._keys, strict=True):
            if len(holder.held) != size:
                if keys is None:
                    return "a list of the program"
                others = keys.symmetric_difference(holder.held)
                if counted := [key for key in others if not holder.is_object or key in self._names]:
                    return str(counted[0])
        self._look()
        return ""

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """A context in which the program runs: what it adds itself does not count as new."""
        before = list(map(len, self._held))
        try:
            yield
        finally:
            if list(map(len, self._held)) != before:
                self._look()
