"""Dimension maps: what an op does to dims, said once for every tensor type.

A type that knows something about a dim (it is padded, it is chunked, it has a name) must know what each op makes of
that dim. That is a fact about the op, not about the type:

    op                       operands          result     combined
    x.transpose(0, 1)        a b c             b a c      -            the dims are carried along
    x.sum(1)                 a b c             a c        b            reduced: the order along b doesn't matter
    x @ y                    a b, b c          a c        b            contracted: sums of products along b
    x.softmax(1)             a b c             a b c      b            mixed: a position along b depends on the others
    torch.gather(x, 1, i)    a b, a _          a _        b

So each dim of each operand has a label, operands that share a label share the dim (its sizes are equal, or 1), and a
`DimMap` lists the labels of the results. Along a label that is not combined the op is *parallel*: any choice of
positions along it, of all operands, gives the same choice of the results. Tests check that on the values of every op.

A tensor type is an interpreter of these maps. What it knows about a parallel dim it carries along, by a rule that it
registers for `DimMap`. Only a call that combines a dim of the type's own needs words of the type's own: rules that are
registered with `across=True`.

    @dim_rule(aten.transpose.int)
    def transpose(x: Operand, dim0: int, dim1: int) -> DimMap: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.torch_internals.ops import schema_of

Label = Hashable
Labels = tuple[Label, ...]
"""The label of each dim. In a result, None is a dim of its own, and a last Ellipsis is any number of those."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., PyTree])
MapFunction = Callable[..., "DimMap"]


class Operand(Protocol):
    """The part of a tensor that a dimension map may depend on."""

    @property
    def shape(self) -> torch.Size:
        """The sizes."""

    @property
    def ndim(self) -> int:
        """The number of dims."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""


class DimMap(NamedTuple):
    """The dims of one call.

    Args:
        operands: the labels of each tensor among the arguments, in order.
        results: the labels of each result; a single entry stands for all results.
        combined: the labels along which positions are reduced, contracted or mixed: all others are parallel.
        moves: whether every element of the results is an element of an operand.
        sizes: the name of the argument that lists the sizes of the result, if there is one.
        partial: whether the op raises an error for some values of an operand.
        added: of a product, the index of an operand that is added to it.
        shape: of a reshape, the sizes of the result: along combined dims, too, its elements are in the same order.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    combined: frozenset[Label] = frozenset()
    moves: bool = False
    sizes: str = ""
    partial: bool = False
    added: int | None = None
    shape: tuple[int, ...] | None = None

    def of_result(self, index: int) -> Labels:
        """Return the labels of a result."""
        return self.results[index if len(self.results) > 1 else 0]


def labels_of(x: Operand) -> tuple[int, ...]:
    """Return the labels of a single operand: the numbers of its dims."""
    return tuple(range(x.ndim))


def normalized(dim: int, ndim: int) -> int:
    """Return a dim counted from the front; a tensor without dims is taken as one with a single dim."""
    return dim + max(ndim, 1) if dim < 0 else dim


def listed(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Return the dims that an argument names, counted from the front; None and an empty list name all."""
    if dims is None:
        return list(range(ndim))
    if isinstance(dims, int):
        return [normalized(dims, ndim)] if ndim else []
    return [normalized(d, ndim) for d in dims] if len(dims) and ndim else list(range(ndim))


def carried(
    x: Operand, result: Iterable[Label], combined: Iterable[int] = (), moves: bool = True, sizes: str = ""
) -> DimMap:
    """Return the map of an op with one operand; dims that the result lacks are combined."""
    own, labels = labels_of(x), tuple(result)
    return DimMap((own,), (labels,), frozenset(combined) | (frozenset(own) - set(labels)), moves, sizes)


_MAPS: dict[OpOverload | OpOverloadPacket | OpClass, MapFunction] = {}


def dim_rule(*keys: OpOverload | OpOverloadPacket | OpClass) -> Callable[[FunctionT], FunctionT]:
    """Register the decorated function as the dimension map of some overloads, ops or classes of ops.

    Its parameters are arguments of the op, by name; those that an overload lacks need a default. A parameter `operands`
    is a list of all tensors among the arguments.

    Raises:
        ValueError: one of them has a map already.
    """

    def add(function: FunctionT) -> FunctionT:
        for key in keys:
            if key in _MAPS:
                raise ValueError(f"{key} has the dimension map {_MAPS[key].__name__} already")
            _MAPS[key] = function
        return function

    return add


def is_map(key: object) -> TypeGuard[MapFunction]:
    """Return whether this is a function that gives some ops their dimension map."""
    return any(key is function for function in _MAPS.values())


def map_function(op: OpOverload) -> MapFunction | None:
    """Return the function that gives the dimension map of an op: of the overload, the op or its class."""
    return next((_MAPS[key] for key in (op, op.overloadpacket, op_class(op)) if key in _MAPS), None)


def dim_map(op: OpOverload, arguments: Mapping[str, PyTree], operands: Sequence[Operand]) -> DimMap:
    """Return the dimension map of a call.

    Args:
        op: an overload that has a map.
        arguments: its arguments by name.
        operands: the tensors among them, in order.

    Example:
        >>> aten, x = torch.ops.aten, torch.ones(2, 3)
        >>> dim_map(aten.transpose.int, {"self": x, "dim0": 0, "dim1": 1}, [x]).results
        ((1, 0),)
    """
    return _bound_map(op)(arguments, operands)


@functools.cache
def _bound_map(op: OpOverload) -> Callable[[Mapping[str, PyTree], Sequence[Operand]], DimMap]:
    function = map_function(op)
    assert function is not None, f"{op} has no dimension map"
    taken = argument_names(function, op)
    takes_all = "operands" in inspect.signature(function).parameters

    def bound(arguments: Mapping[str, PyTree], operands: Sequence[Operand]) -> DimMap:
        named = {name: arguments[given] for name, given in taken if given in arguments}
        found: DimMap = function(**named, operands=operands) if takes_all else function(**named)
        return found

    return bound


_SYNONYMS = {
    "x": ("self", "input", "A", "condition"),
    "dim": ("dims", "dimension"),
    "size": ("shape",),
    "padding": ("pad",),
}
"""Names that overloads have for the same argument."""


def argument_names(function: Callable[..., PyTree], op: OpOverload, skipped: int = 0) -> list[tuple[str, str]]:
    """Return the arguments of an op that a function takes by name: its parameter, and the name in the schema.

    Args:
        function: its parameters are named as arguments of the op, or by a synonym of them; `operands` is all tensors.
        op: the overload.
        skipped: how many first parameters are no arguments of the op.

    Raises:
        TypeError: a parameter without a default is no argument of the op.
    """
    given = {a.name for a in schema_of(op).arguments}
    found: list[tuple[str, str]] = []
    for parameter in [*inspect.signature(function).parameters.values()][skipped:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "operands":
            continue
        name = next((n for n in (parameter.name, *_SYNONYMS.get(parameter.name, ())) if n in given), None)
        if name is not None:
            found.append((parameter.name, name))
        elif parameter.default is parameter.empty:
            raise TypeError(f"{function.__name__} takes {parameter.name}, which {op} lacks")
    return found
