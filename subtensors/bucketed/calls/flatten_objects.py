"""Flattening of objects that hold tensors but are no containers to torch's pytrees, by their attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.calls.object_snapshot import attributes_of


class FlattenedObject:
    """The attributes of an object, as a pytree node; unflattening it makes a new object of the same class."""

    def __init__(self, kind: type, attributes: dict[str, Any]) -> None:
        self.kind, self.attributes = kind, attributes


def _parts(x: FlattenedObject) -> tuple[list[Any], Any]:
    return list(x.attributes.values()), (x.kind, tuple(x.attributes))


def _named_parts(x: FlattenedObject) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.GetAttrKey(name), part) for name, part in x.attributes.items()], _parts(x)[1]


def _made(attributes: Iterable[Any], context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, attributes, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(FlattenedObject, _parts, _made, flatten_with_keys_fn=_named_parts)


def opened_results(result: Any, given: Collection[int]) -> Any:
    """Return a result with objects that hold tensors flattened.

    Args:
        result: any pytree.
        given: ids of the program's arguments, which are not flattened.
    """

    def is_open(x: Any, parts: list[Any]) -> bool:
        return id(x) not in given and any(isinstance(part, Tensor) for part in parts)

    return _opened(result, is_open)


def opened_arguments(arguments: Any) -> Any:
    """Return arguments with those dataclasses flattened that hold tensors, or cannot be hashed for a key.

    Example:
        >>> Options = dataclasses.make_dataclass("Options", ["scale"])
        >>> pytree.tree_leaves(opened_arguments([Options(2.0)]))
        [2.0]
    """

    def is_open(x: Any, parts: list[Any]) -> bool:
        if not dataclasses.is_dataclass(x):
            return False
        return type(x).__hash__ is None or any(isinstance(part, Tensor) for part in parts)

    return _opened(arguments, is_open)


def _opened(tree: Any, is_open: Callable[[Any, list[Any]], bool]) -> Any:
    def visit(x: Any) -> Any:
        if isinstance(x, (Tensor, torch.nn.Module, type)):
            return x
        held = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else {}
        held |= attributes_of(x)
        if not held:
            return x
        attributes = {name: pytree.tree_map(visit, value) for name, value in held.items()}
        parts = [part for value in attributes.values() for part in pytree.tree_leaves(value)]
        return FlattenedObject(type(x), attributes) if is_open(x, parts) else x

    return pytree.tree_map(visit, tree)
