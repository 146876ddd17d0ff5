"""The policy by which rows are divided into chunks, parsed from the arguments of `st.chunk`."""

from __future__ import annotations

import functools
import string

from subtensors.dispatch.chunked.row_layout import Policy
from subtensors.dispatch.ops.errors import SizeError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def policy(
    chunks: int | None, rows: int | None, memory_limit: int | str | None, accumulate: str, compile: bool
) -> Policy:
    """Check the arguments of `chunk`, and return the policy by which rows are divided."""
    given = {"chunks": chunks, "rows": rows, "memory_limit": memory_limit}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"chunk takes one of chunks, rows and memory_limit; got {', '.join(asked)}")
    limit = _bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    for name, count in {**asked, **({"memory_limit": limit} if limit is not None else {})}.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} is a whole number, got {count!r}")
        if count < 1:
            raise SizeError(f"{name} must be at least 1, got {count}")
    if accumulate not in ("exact", "fast"):
        raise ValueError(f'accumulate is "exact" or "fast", got {accumulate!r}')
    return Policy(chunks, rows, limit, accumulate == "exact", compile)


known_policy = functools.lru_cache(maxsize=64, typed=True)(policy)


def _bytes(limit: str) -> int:
    """The bytes that a text names; in steps that a compiler can trace."""
    text = limit.strip()
    number = text.rstrip(string.ascii_letters)
    unit = text[len(number) :].upper()
    number = number.rstrip()
    digits = number.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and number[-1:] != "." and unit in _UNITS):
        raise ValueError(f'memory_limit is bytes, or text such as "1GiB" or "500MB"; got {limit!r}')
    return int(float(number) * _UNITS[unit])
