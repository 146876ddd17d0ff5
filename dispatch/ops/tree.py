"""Small pytrees: the arguments and results of ops, which are searched and mapped several times per op.

The recursion here, which looks for values of a kind, is about twice as fast as optree's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

PyTree: TypeAlias = Any
"""Tensors and other values in tuples, lists and dicts, or a single one of them."""

Args: TypeAlias = tuple[PyTree, ...]
"""The positional arguments of a call."""

Kwargs: TypeAlias = dict[str, PyTree]
"""The keyword arguments of a call."""

_CONTAINERS = (tuple, list, dict)

_LEAVES = frozenset(
    [type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size]
)
"""Types of arguments that `tree_map_only` and `tree_find` neither descend into nor match."""


def tree_map_only(kind: type | tuple[type, ...], function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Return the pytree with each value of a kind replaced.

    Args:
        kind: the types of the values to replace; no number, no text, no None.
        function: called with each of them, returns its replacement.
        tree: tuples (named ones, too), lists and dicts; anything else is a value.

    Example:
        >>> tree_map_only(bytes, len, (b"ab", [b"c", "a"], {"b": b""}))
        (2, [1, 'a'], {'b': 0})
    """
    if isinstance(tree, kind):
        return function(tree)
    if not isinstance(tree, _CONTAINERS):
        return tree
    if isinstance(tree, dict):
        return {
            key: value if type(value) in _LEAVES else tree_map_only(kind, function, value)
            for key, value in tree.items()
        }
    values = [value if type(value) in _LEAVES else tree_map_only(kind, function, value) for value in tree]
    # The lists of a compiler's graph are instances of a subclass that cannot be changed.
    if isinstance(tree, list):
        return values
    if type(tree) is tuple:
        return tuple(values)
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def tree_find(kind: type | tuple[type, ...], tree: PyTree) -> list[PyTree]:
    """Return the values of a kind in a pytree, in order; `kind` as in `tree_map_only`.

    Example:
        >>> tree_find(bytes, (b"ab", [b"c", "a"], {"b": b""}))
        [b'ab', b'c', b'']
    """
    if isinstance(tree, kind):
        return [tree]
    if not isinstance(tree, _CONTAINERS):
        return []
    values: list[PyTree] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, kind):
            values.append(part)
        elif type(part) not in _LEAVES and isinstance(part, _CONTAINERS):
            values += tree_find(kind, part)
    return values


def map_arguments(tree: PyTree, function: Callable[[PyTree], PyTree]) -> PyTree:
    """Return the arguments of a call with each leaf replaced, the bounds of slices and the sizes of shapes included.

    Example:
        >>> map_arguments((torch.Size([2]), [slice(1, None)]), str)
        (('2',), [slice('1', 'None', 'None')])
    """
    if isinstance(tree, slice):
        return slice(*(map_arguments(bound, function) for bound in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, dict):
        return {name: map_arguments(x, function) for name, x in tree.items()}
    if isinstance(tree, tuple | list):
        values = [map_arguments(x, function) for x in tree]
        return values if isinstance(tree, list) else tuple(values)
    return function(tree)


def tree_has(kind: type, tree: PyTree) -> bool:
    """Return whether a value of a kind is in a pytree, the bounds of slices included.

    Example:
        >>> tree_has(bytes, (1, [slice(b"a", None)]))
        True
    """
    if isinstance(tree, slice):
        return isinstance(tree.start, kind) or isinstance(tree.stop, kind)
    if isinstance(tree, tuple | list):
        return any(tree_has(kind, part) for part in tree)
    if isinstance(tree, dict):
        return any(tree_has(kind, part) for part in tree.values())
    return isinstance(tree, kind)
