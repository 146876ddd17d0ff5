"""The pytree structure of a list: paths and their names, what a key selects, and how two structures differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import optree
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from subtensors.arguments import shown
from subtensors.dispatch.ops.tree import PyTree

Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class Structure:
    """The structure of an unpacked list, as metadata for torch.compile that its logs can print."""

    treespec: optree.PyTreeSpec

    def __repr__(self) -> str:
        return f"Structure({self.treespec})"


def path_name(path: Path) -> str:
    """Return a path as it is written after the name of a list, `["layers", 0]`; `(root)` for the root."""
    return f"[{', '.join(map(repr, path))}]" if path else "(root)"


def first_difference(a: optree.PyTreeSpec, b: optree.PyTreeSpec, at: Path = ()) -> str | None:
    """Return the first difference between two structures, as `path: difference`; None if they are equal."""
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
        if difference := first_difference(child, children_b[key], (*at, key)):
            return difference
    return f"{path_name(at)}: {a} against {b}"


def leaf_name(spec: optree.PyTreeSpec, index: int) -> str:
    """Return the name of the path to leaf `index`."""
    return path_name(tuple(spec.paths()[index]))


def check_elements(tensors: object, count: int, list_type: type[torch.Tensor]) -> None:
    """Raise TypeError or ValueError unless these are as many tensors as a list has, none of them a list itself."""
    if not isinstance(tensors, list | tuple | list_type):
        raise TypeError(f"like takes a list of tensors, got {shown(tensors)}")
    if len(tensors) != count:
        raise ValueError(f"{count} tensors expected, one an element; got {len(tensors)}")
    for t in tensors:
        if not isinstance(t, torch.Tensor) or isinstance(t, list_type):
            raise TypeError(f"like takes a list of tensors, one of them is {shown(t)}")


def flatten_tensors(tree: PyTree, list_type: type[torch.Tensor]) -> tuple[list[torch.Tensor], optree.PyTreeSpec]:
    """Return a pytree's tensors in order and its structure.

    Raises:
        TypeError: a leaf is not one tensor; the message names its path.
        ValueError: a container holds itself.
    """
    if tree is None:
        raise TypeError("TensorList takes a pytree of tensors; got None. An empty list is TensorList([])")
    leaves: list[PyTree]
    try:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
        _refuse_none_at_a_position(leaves, spec)
        leaves, spec = optree.tree_flatten(tree)
    except RecursionError:
        raise ValueError("TensorList takes a pytree of tensors; got a container that holds itself") from None
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, immutable_list | immutable_dict):
            return flatten_tensors(_mutable(tree), list_type)
        if not isinstance(leaf, torch.Tensor):
            hint = "; give model.parameters()" if isinstance(leaf, torch.nn.Module) else ""
            raise TypeError(
                f"TensorList takes a pytree of tensors; {leaf_name(spec, index)} is of type {type(leaf).__name__}{hint}"
            )
        if isinstance(leaf, list_type):
            path = list(spec.paths()[index])
            raise TypeError(f"an element of a TensorList is one tensor; {path} is a TensorList: give its .tree()")
        if leaf.is_nested is True and leaf.layout is torch.strided:
            # Torch's guards of compiled code and of fused calls end the process when they meet one.
            raise TypeError(
                f"TensorList takes tensors of one shape each; {leaf_name(spec, index)} is a nested one without "
                "layout=torch.jagged: give its parts, t.unbind()"
            )
    return leaves, spec


def _refuse_none_at_a_position(leaves: Sequence[object], spec: optree.PyTreeSpec) -> None:
    """Raise TypeError for a None in a list or a tuple, which holds no tensor: later positions would be one off.

    A None under a name, as a layer without bias has it, is a part without tensors.
    """
    for index, leaf in enumerate(leaves):
        if leaf is None and _under(spec, tuple(spec.paths()[index])[:-1])[0].type in (list, tuple):
            raise TypeError(
                f"TensorList takes a pytree of tensors; {leaf_name(spec, index)} is None: leave it out, in all lists "
                "that go together"
            )


def _mutable(tree: PyTree) -> PyTree:
    """Replace the immutable lists and dicts of an fx graph in a pytree by plain ones."""

    def mutable(leaf: PyTree) -> PyTree:
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


def indexes_each(key: object) -> bool:
    """Return whether a key indexes every element: it holds an Ellipsis or a tensor."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(part is Ellipsis or isinstance(part, torch.Tensor) for part in parts)


def select_leaves(spec: optree.PyTreeSpec, key: object) -> tuple[slice, optree.PyTreeSpec]:
    """Return the leaves that a slice or path selects, as a slice, and their structure, a leaf's for one element.

    Raises:
        KeyError: the list has no such path; the message names the part that is missing.

    Example:
        >>> select_leaves(optree.tree_structure({"a": [0, 0], "b": 0}), ("a", 1))
        (slice(1, 2, None), PyTreeSpec(*))
        >>> select_leaves(optree.tree_structure([0, 0, 0]), slice(1, None))
        (slice(1, None, None), PyTreeSpec([*, *]))
    """
    if isinstance(key, slice):
        count = len(range(*key.indices(spec.num_leaves)))
        leaves: PyTree = [0] * count
        return key, optree.tree_structure(leaves)
    part, start = _under(spec, key if isinstance(key, tuple) else (key,))
    return slice(start, start + part.num_leaves), part


def _under(spec: optree.PyTreeSpec, path: Path) -> tuple[optree.PyTreeSpec, int]:
    """Return the structure under a path, and the index of its first leaf."""
    start = 0
    for depth, key in enumerate(path):
        entries: list[Hashable] = spec.entries()
        fields = getattr(spec.type, "_fields", ())
        if not isinstance(key, Hashable):
            raise KeyError(f"a TensorList has positions, slices, paths and tensors as keys, not {shown(key)}")
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
