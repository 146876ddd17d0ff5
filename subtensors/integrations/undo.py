"""Attributes that are replaced, and restored when a change is taken back."""

from __future__ import annotations

from contextlib import ExitStack


def keep(owner: object, name: str, undo: ExitStack) -> None:
    """Make `undo` restore an attribute of an object, or delete it if there is none now."""
    attributes = vars(owner)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
