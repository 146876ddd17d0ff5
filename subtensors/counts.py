"""Counts as text: of bytes, such as "2GiB", and of things, with their noun in the singular or the plural."""

from __future__ import annotations

import string

from subtensors.dispatch.ops.errors import SizeError

_UNITS = {"": 1, **{f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGT")}}
_DECIMAL = {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
_IN_CAPITALS = {unit.upper(): size for unit, size in {**_UNITS, **_DECIMAL, "B": 1}.items()}


def parse_bytes(name: str, size: int | str) -> int:
    """Return the number of bytes of a size.

    Args:
        name: the argument's name, for the error.
        size: a number of bytes above 0, or text such as "2GiB" (2 << 30 bytes) or "2GB" (2e9 bytes).

    Raises:
        SizeError: `size` is neither.

    >>> parse_bytes("reserve", "1.5KiB"), parse_bytes("reserve", 7), parse_bytes("reserve", "2GB")
    (1536, 7, 2000000000)
    """
    text = str(size).strip()  # in steps that a compiler can trace: no regular expression
    number = text.rstrip(string.ascii_letters)
    unit = text[len(number) :].upper()
    number = number.rstrip()
    digits = number.replace(".", "", 1)
    is_size = digits.isascii() and digits.isdigit() and number[-1:] != "." and unit in _IN_CAPITALS
    count = int(float(number) * _IN_CAPITALS[unit]) if is_size else 0
    if count <= 0:
        raise SizeError(f'{name} must be a number of bytes above 0, or text such as "2GiB"; got {size!r}')
    return count


def format_bytes(size: int) -> str:
    """Return a number of bytes as text, in the largest unit of which it is at least one.

    >>> format_bytes(1536), format_bytes(0), format_bytes(64 << 30)
    ('1.5 KiB', '0 B', '64 GiB')
    """
    unit = max((u for u in _UNITS if _UNITS[u] <= max(size, 1)), key=lambda u: _UNITS[u])
    return f"{size / _UNITS[unit]:.4g} {unit or 'B'}"


def counted(count: int, noun: str) -> str:
    """Return a count before its noun.

    >>> counted(1, "call"), counted(0, "call"), counted(2, "launch")
    ('1 call', '0 calls', '2 launches')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"
