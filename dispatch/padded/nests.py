"""Tensors in the nests that arguments and results are: tuples, lists and dicts, a few levels deep.

Torch's pytrees do the same with more generality, and take longer than the op that is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SINGLE = frozenset([type(None), bool, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format])
"""Types of arguments that are neither nests nor looked for."""


def mapped(kind: type | tuple[type, ...], function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with each value of a kind replaced.

    Args:
        kind: which values; no number but ints, no text, no None.
        function: what takes their place.
        nest: tuples, named ones among them, lists and dicts; anything else is a value.

    Example:
        >>> mapped(int, lambda i: -i, (1, [2, "a"], {"b": 3}))
        (-1, [-2, 'a'], {'b': -3})
    """
    if isinstance(nest, kind):
        return function(nest)
    if isinstance(nest, tuple):
        values = [value if type(value) in _SINGLE else mapped(kind, function, value) for value in nest]
        if type(nest) is tuple:
            return tuple(values)
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    # Those of a compiler's graph are subclasses, which cannot be changed.
    if isinstance(nest, list):
        return [value if type(value) in _SINGLE else mapped(kind, function, value) for value in nest]
    if isinstance(nest, dict):
        return {key: mapped(kind, function, value) for key, value in nest.items()}
    return nest


def found(kind: type | tuple[type, ...], nest: Any) -> list[Any]:
    """The values of a kind in a nest, in order.

    Example:
        >>> found(int, (1, [2, "a"], {"b": 3}))
        [1, 2, 3]
    """
    if isinstance(nest, kind):
        return [nest]
    if isinstance(nest, tuple | list):
        return [value for part in nest for value in found(kind, part)]
    if isinstance(nest, dict):
        return [value for part in nest.values() for value in found(kind, part)]
    return []
