"""A place where a program finds something beside its arguments: it is looked at again later."""

from __future__ import annotations

from typing import Any, NamedTuple

CELL = object()
"""The key of what a cell of a closure holds."""


class Location(NamedTuple):
    """Where something stands: under a key of a dict or list, or in a cell of a closure.

    Args:
        holder: the dict, list or cell.
        key: there.
        is_attribute: is the dict that of an object's attributes?
    """

    holder: Any
    key: Any
    is_attribute: bool = False

    @property
    def name(self) -> str:
        """In words."""
        return self.key if isinstance(self.key, str) else "a part of the program"

    def now(self) -> Any:
        """What stands there; None where nothing does."""
        try:
            return self.holder.cell_contents if self.key is CELL else self.holder[self.key]
        except (ValueError, LookupError):
            return None
