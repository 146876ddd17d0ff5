"""Indexing of lists: a key names an element, or a part by slice or path, or it indexes every element."""

from __future__ import annotations

from typing import Any

import optree
import torch

from subtensors.lists.tree_structure import Path, path_name


def indexes_each(key: object) -> bool:
    """Return whether a key indexes every element: it holds an Ellipsis or a tensor."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(part is Ellipsis or isinstance(part, torch.Tensor) for part in parts)


def named(spec: optree.PyTreeSpec, key: Any) -> tuple[slice, optree.PyTreeSpec]:
    """Return the leaves that a slice or path names, as a slice, and their structure, a leaf's for one element.

    Args:
        spec: the structure of a list.
        key: a slice, or a key of the outermost container, or a tuple of keys, from the outermost to the innermost.

    Raises:
        KeyError: the list has no such path; the message names the part that is missing.

    Example:
        >>> named(optree.tree_structure({"a": [0, 0], "b": 0}), ("a", 1))
        (slice(1, 2, None), PyTreeSpec(*))
        >>> named(optree.tree_structure([0, 0, 0]), slice(1, None))
        (slice(1, None, None), PyTreeSpec([*, *]))
    """
    if isinstance(key, slice):
        count = len(range(*key.indices(spec.num_leaves)))
        leaves: Any = [0] * count
        return key, optree.tree_structure(leaves)
    part, start = _under(spec, key if isinstance(key, tuple) else (key,))
    return slice(start, start + part.num_leaves), part


def _under(spec: optree.PyTreeSpec, path: Path) -> tuple[optree.PyTreeSpec, int]:
    """The structure under a path, and the index of its first leaf."""
    start = 0
    for depth, key in enumerate(path):
        entries: list[Any] = spec.entries()
        fields = getattr(spec.type, "_fields", ())
        position = fields.index(key) if key in fields else key
        if isinstance(position, int) and spec.type is not None and issubclass(spec.type, (list, tuple)):
            position = position + len(entries) if position < 0 else position
        if position not in entries:
            raise KeyError(f"no {path_name(path[: depth + 1])} in this TensorList; there: {entries}")
        index = entries.index(position)
        children = spec.children()
        start += sum(child.num_leaves for child in children[:index])
        spec = children[index]
    return spec, start
