"""Tensors in the nests that arguments and results are: tuples, lists and dicts, a few levels deep.

Torch's pytrees do the same with more generality, and take longer than the op that is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NESTS = (tuple, list, dict)
_SINGLE = frozenset(
    [type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size]
)
"""Types of arguments that are neither nests nor looked for."""


def mapped(kind: type | tuple[type, ...], function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with each value of a kind replaced.

    Args:
        kind: which values; no number, no text, no None.
        function: what takes their place.
        nest: tuples, named ones among them, lists and dicts; anything else is a value.

    Example:
        >>> mapped(bytes, len, (b"ab", [b"c", "a"], {"b": b""}))
        (2, [1, 'a'], {'b': 0})
    """
    if isinstance(nest, kind):
        return function(nest)
    if not isinstance(nest, _NESTS):
        return nest
    if isinstance(nest, dict):
        return {key: value if type(value) in _SINGLE else mapped(kind, function, value) for key, value in nest.items()}
    values = [value if type(value) in _SINGLE else mapped(kind, function, value) for value in nest]
    # Those lists that are of a compiler's graph are subclasses, which cannot be changed.
    if isinstance(nest, list):
        return values
    if type(nest) is tuple:
        return tuple(values)
    return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)


def found(kind: type | tuple[type, ...], nest: Any) -> list[Any]:
    """The values of a kind in a nest, in order; `kind` as of `mapped`.

    Example:
        >>> found(bytes, (b"ab", [b"c", "a"], {"b": b""}))
        [b'ab', b'c', b'']
    """
    if isinstance(nest, kind):
        return [nest]
    if not isinstance(nest, _NESTS):
        return []
    values: list[Any] = []
    for part in nest.values() if isinstance(nest, dict) else nest:
        if isinstance(part, kind):
            values.append(part)
        elif type(part) not in _SINGLE and isinstance(part, _NESTS):
            values += found(kind, part)
    return values
