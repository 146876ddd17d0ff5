"""The dynamic scalars of a parameter group, and the signature of its other options that decides a captured step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

if TYPE_CHECKING:
    from subtensors.optim.optimizer import Optimizer


def options_of(group: dict[str, Any]) -> list[Any]:
    """The options of a group: all its values but the parameters."""
    return [value for name, value in group.items() if name != "params"]


def are_numbers(now: Any, before: Any) -> bool:
    """Return whether two values are the same object, or differ only as dynamic scalars do.

    A number that was 0 or becomes 0 counts as different, since the step may leave a 0 out of the math.
    """
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(type(n) is float for n in (*now, *before))
    return type(now) is type(before) is float and now != 0 != before


def number_paths(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> list[tuple[Any, ...]]:
    """The paths of a group's dynamic scalars, in the order in which the step takes them."""
    values: Any = optimizer._values(group, device)
    paths = optree.tree_paths(values, none_is_leaf=True)
    leaves = optree.tree_leaves(values, none_is_leaf=True)
    return [path for path, leaf in zip(paths, leaves, strict=True) if type(leaf) in (float, int)]


def another(value: Any) -> Any:
    """A copy of a float that is a new object, also inside a tuple; other values unchanged."""
    if type(value) is tuple:
        return tuple([another(v) for v in value])
    return value * 1.0 if type(value) is float else value


def number_at(group: dict[str, Any], path: tuple[Any, ...]) -> float:
    """The number at a path of a group, as a float."""
    value = group[path[0]]
    return float(value if len(path) == 1 else value[path[1]])


def step_signature(
    optimizer: Optimizer, group: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], list[float], list[float]]:
    """Split a group's options into a signature that decides the launches, dynamic scalars, and CPU scalars."""
    numbers: list[float] = []
    hosts: list[float] = []
    signature: list[Any] = [(name, value) for name, value in group.items() if type(value) in (bool, str, type(None))]
    values: Any = optimizer._values(group, device)
    leaves: list[Any]
    leaves, spec = optree.tree_flatten(values, none_is_leaf=True)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" != device.type:
            signature.append((Tensor, leaf.dtype))
            hosts.append(float(leaf.item()))
        elif isinstance(leaf, Tensor):
            signature.append((leaf.data_ptr(), leaf.dtype, leaf.device))
        elif type(leaf) is float or type(leaf) is int:
            signature.append(type(leaf))
            numbers.append(leaf)
        else:
            signature.append(leaf)
    return (spec, *signature), numbers, hosts
