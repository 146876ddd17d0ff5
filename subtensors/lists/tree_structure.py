"""Utilities for pytrees of tensors: names of paths, the first difference, the first leaf that is no tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of an unpacked list, as metadata for torch.compile that its logs can print."""

    treespec: optree.PyTreeSpec

    def __repr__(self) -> str:
        return f"Structure({self.treespec})"


def path_name(path: Path) -> str:
    """The path as it would be written after the name of a list, `["layers", 0]`; the root is `(root)`."""
    return f"[{', '.join(map(repr, path))}]" if path else "(root)"


def first_difference(a: optree.PyTreeSpec, b: optree.PyTreeSpec, at: Path = ()) -> str | None:
    """The first difference between two structures, as `path: difference`; None if they are the same."""
    if a == b:
        return None
    if a.is_leaf() or b.is_leaf() or a.type is not b.type:
        return f"{path_name(at)}: {_kind(a)} against {_kind(b)}"
    keys_a, keys_b = a.entries(), b.entries()
    for key in keys_a:
        if key not in keys_b:
            return f"{path_name((*at, key))}: missing on the right"
    for key in keys_b:
        if key not in keys_a:
            return f"{path_name((*at, key))}: missing on the left"
    children_b = dict(zip(keys_b, b.children(), strict=True))
    for key, child in zip(keys_a, a.children(), strict=True):
        if found := first_difference(child, children_b[key], (*at, key)):
            return found
    return f"{path_name(at)}: {a} against {b}"


def leaf_name(spec: optree.PyTreeSpec, index: int) -> str:
    """The name of the path to leaf `index`."""
    return path_name(tuple(spec.paths()[index]))


def flatten_tensors(tree: Any) -> tuple[list[torch.Tensor], optree.PyTreeSpec]:
    """Return a pytree's tensors in order and its structure; a TypeError names the first leaf that is no tensor."""
    leaves: list[Any]
    leaves, spec = optree.tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, immutable_list | immutable_dict):
            return flatten_tensors(_mutable(tree))
        if not isinstance(leaf, torch.Tensor):
            hint = "; give model.parameters()" if isinstance(leaf, torch.nn.Module) else ""
            raise TypeError(
                f"TensorList takes a pytree of tensors; {leaf_name(spec, index)} is of type {type(leaf).__name__}{hint}"
            )
    return leaves, spec


def _mutable(tree: Any) -> Any:
    """Replace the immutable lists and dicts of an fx graph in a pytree by plain ones."""

    def mutable(leaf: Any) -> Any:
        if isinstance(leaf, immutable_list):
            return [_mutable(child) for child in leaf]
        if isinstance(leaf, immutable_dict):
            return {key: _mutable(child) for key, child in leaf.items()}
        return leaf

    return optree.tree_map(mutable, tree)


def _kind(spec: optree.PyTreeSpec) -> str:
    if spec.type is None:
        return "a tensor" if spec.is_leaf() else "None"
    return f"{spec.type.__name__} of {spec.num_children}"
