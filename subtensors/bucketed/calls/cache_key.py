"""The parts of identity-keyed arguments that may change later, and so belong to the graph's key."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.object_snapshot import BY_IDENTITY, attributes_of, is_by_identity
from subtensors.bucketed.state.constant_guards import is_plain
from subtensors.bucketed.state.tensor_snapshot import held_of

CODE = (types.FunctionType, types.MethodType, functools.partial)
"""Callables that hold values: in a closure, in the object of a method, or as arguments of a partial."""

_DEPTH = 2
"""Steps from the argument: values in the containers and objects that it holds count, and nothing beyond."""
_FEW = 100
"""A container with more parts than this is data."""
_MANY = 10_000
"""The search for tensors in arguments ends after this many parts."""


def has_parts(x: Any) -> bool:
    """Return whether an argument has parts that may change while its identity stays the same."""
    is_slotted = type(x).__hash__ is BY_IDENTITY and hasattr(type(x), "__slots__")
    return isinstance(x, CODE) or is_by_identity(x) or is_slotted


def object_key(x: Any) -> tuple[Any, ...]:
    """Return the plain values, functions and tensors that an object holds, or a function reads, with their paths.

    >>> options = type("Options", (), {})()
    >>> options.scale, options.shifts = 2, [1.0, 3.0]
    >>> object_key(options)
    ((('scale',), 2), (('shifts', 0), 1.0), (('shifts', 1), 3.0))
    """
    return tuple(_keys(x, (), _DEPTH))


def _keys(x: Any, at: tuple[Any, ...], depth: int) -> Iterator[Any]:
    for name, value in parts_of(x):
        if isinstance(value, Tensor):
            yield (*at, name), id(value), value.requires_grad, held_of(value)
        elif is_plain(value) or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            yield (*at, name), value
        elif depth > 1 and (isinstance(value, (list, tuple, dict)) or has_parts(value)):
            yield from _keys(value, (*at, name), depth - 1)


def callers_tensors(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a program may read and write in place through these arguments.

    Args:
        leaves: the leaves of the arguments, without those that are copied.

    Example:
        >>> cache = type("Cache", (), {})()
        >>> cache.layers = [{"count": torch.zeros(2)}]
        >>> [*callers_tensors([cache, 3])]
        [tensor([0., 0.])]
    """
    todo = [x for x in leaves if isinstance(x, Tensor) or has_parts(x)]
    seen = set(map(id, todo))
    while todo and len(seen) < _MANY:
        part = todo.pop()
        if isinstance(part, Tensor):
            yield part
        elif not isinstance(part, (type, types.ModuleType)):
            new = {id(value): value for _, value in parts_of(part, _MANY) if id(value) not in seen}
            seen |= new.keys()
            todo += new.values()


def parts_of(x: Any, most: int = _FEW) -> Iterator[tuple[Any, Any]]:
    """Yield the parts that an object, a container or a callable holds directly, each after its name.

    Args:
        x: the object.
        most: the maximum size of a container; a larger one is data, and yields nothing.
    """
    if isinstance(x, (list, tuple, dict)):
        if len(x) <= most:
            yield from x.items() if isinstance(x, dict) else enumerate(x)
        return
    if isinstance(x, types.FunctionType):
        yield from ((i, cell.cell_contents) for i, cell in enumerate(x.__closure__ or ()) if _is_full(cell))
    elif isinstance(x, types.MethodType):
        yield from (("self", x.__self__), ("function", x.__func__))
        return
    elif isinstance(x, functools.partial):
        yield from (("function", x.func), ("arguments", x.args), ("named", x.keywords))
    elif isinstance(x, torch.nn.Module):
        yield "training", tuple([module.training for module in x.modules()])
        yield from (*x.named_parameters(), *x.named_buffers())
    yield from attributes_of(x).items()


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
