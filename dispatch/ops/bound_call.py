"""One call of an op, with its arguments by name: what the rules of a tensor type get."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from torch._ops import OpOverload

from subtensors.dispatch.ops.dims import DimMap, Operand, argument_names, dim_map
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find
from subtensors.dispatch.torch_internals.ops import schema_of

ValueT = TypeVar("ValueT", bound=Operand)


class BoundCall(Generic[ValueT]):
    """One call of an overload, its arguments by name.

    Args:
        op: the overload.
        args, kwargs: its arguments, with values of the type in place of tensors.
        kind: the class of these values.

    Example:
        >>> import torch
        >>> call = BoundCall(torch.ops.aten.transpose.int, (torch.ones(2, 3), 0), {"dim1": 1}, torch.Tensor)
        >>> call["dim1"], "dim2" in call, call.dims().results
        (1, False, ((1, 0),))
    """

    def __init__(self, op: OpOverload, args: Sequence[PyTree], kwargs: Kwargs, kind: type[ValueT]) -> None:
        self.op, self._kind = op, kind
        names, defaults, self._positional = _parameters(op)
        self.arguments: Kwargs = dict(zip(names, args, strict=False))
        """Every argument, defaults included, in the order of the schema."""
        for name in names[len(args) :]:
            if name in kwargs:
                self.arguments[name] = kwargs[name]
            elif name in defaults:
                self.arguments[name] = defaults[name]
            else:
                raise TypeError(f"{op} needs {name}")
        self.values: list[ValueT] = _find(kind, self.arguments)
        """The tensors among the arguments."""
        self.found: DimMap | None = None
        """Its dimension map, once that is known."""

    def __getitem__(self, name: str) -> PyTree:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def get(self, name: str, default: PyTree = None) -> PyTree:
        """Return an argument, or a default where the overload has no argument of this name."""
        return self.arguments.get(name, default)

    def replace(self, name: str, value: PyTree) -> None:
        """Set an argument to another value."""
        self.arguments[name] = value
        self.values, self.found = _find(self._kind, self.arguments), None

    def split(self, arguments: Mapping[str, PyTree]) -> tuple[Args, Kwargs]:
        """Return arguments by name as those with a position, and the others."""
        values = tuple(arguments.values())
        return values[: self._positional], dict(
            zip([*arguments][self._positional :], values[self._positional :], strict=True)
        )

    def dims(self) -> DimMap:
        """Return the dimension map of the call."""
        if self.found is None:
            self.found = dim_map(self.op, self.arguments, self.values)
        return self.found


def _find(kind: type[ValueT], arguments: Kwargs) -> list[ValueT]:
    """Return the values of a kind among arguments, of which most are no containers."""
    found: list[ValueT] = []
    for x in arguments.values():
        if isinstance(x, kind):
            found.append(x)
        elif isinstance(x, tuple | list | dict):
            found += tree_find(kind, x)
    return found


@functools.cache
def _parameters(op: OpOverload) -> tuple[list[str], Kwargs, int]:
    """The names of an op's arguments, the defaults of those that have one, and how many of them have a position."""
    arguments = schema_of(op).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return [a.name for a in arguments], defaults, sum(not a.kwarg_only for a in arguments)


def by_name(rule: Callable[..., PyTree], op: OpOverload) -> Callable[[PyTree], PyTree]:
    """Return a function of a bound call that gives a rule the arguments of the op that it names after the call."""
    taken = argument_names(rule, op, skipped=1)
    if not taken:
        return rule

    def bound(call: PyTree) -> PyTree:
        arguments: Kwargs = call.arguments
        return rule(call, **{parameter: arguments[name] for parameter, name in taken})

    return functools.update_wrapper(bound, rule)
