"""The location where a program finds a value beside its arguments, so that it can be read again later."""

from __future__ import annotations

from typing import Any, NamedTuple

CELL = object()
"""The key of the contents of a closure cell."""


class Location(NamedTuple):
    """The location of a value: a key of a dict or list, or a cell of a closure.

    Args:
        holder: the dict, list or cell.
        key: the key in it, `CELL` for a cell.
        is_attribute: whether the dict holds the attributes of an object.
    """

    holder: Any
    key: Any
    is_attribute: bool = False

    @property
    def name(self) -> str:
        """The name of the location, as messages give it."""
        return self.key if isinstance(self.key, str) else "a part of the program"

    def now(self) -> Any:
        """Return the value there now; None if there is none."""
        try:
            return self.holder.cell_contents if self.key is CELL else self.holder[self.key]
        except (ValueError, LookupError):
            return None
