"""Counts as text, with their noun in the singular or the plural."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count before its noun.

    >>> counted(1, "call"), counted(0, "call"), counted(2, "launch")
    ('1 call', '0 calls', '2 launches')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"
