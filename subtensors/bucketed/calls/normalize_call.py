"""The normal form of a call: equal calls share a bucket, however their arguments are named and ordered."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.calls.cache_key import has_parts, parts_of
from subtensors.bucketed.calls.call_spec import flatten, unflatten
from subtensors.bucketed.calls.flatten_objects import opened_arguments
from subtensors.bucketed.calls.object_snapshot import ObjectSnapshot
from subtensors.dispatch.ops.errors import RuleError

T = TypeVar("T")


@dataclass(frozen=True)
class CallFormat:
    """The form in which a call gives its arguments: by position or by name, and in which order.

    Args:
        order: for each leaf, in the order of the parameters, its index among those of `flatten`; None if the same.
        key: equal for calls that differ in nothing but their form.
        spec, count, names: the structure that `flatten` found, the number of positional arguments, the others' names.
    """

    order: tuple[int, ...] | None
    key: Any
    spec: Any
    count: int
    names: tuple[str, ...]

    @staticmethod
    def of(parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> CallFormat:
        """Return the form of a call.

        Args:
            parameters: the names of the parameters that can be given by position.
            args, kwargs: the call's arguments.
            spec: the structure that `flatten` found.

        Example:
            >>> CallFormat.of(["x", "y"], (), {"y": 1, "x": 2}, None).order
            (1, 0)
        """
        names = [*parameters[: len(args)], *range(len(parameters), len(args)), *kwargs]
        given = [*args, *kwargs.values()]
        structures = [None if spec is None else pytree.tree_structure(opened_arguments(x)) for x in given]
        counts = [1 if structure is None else structure.num_leaves for structure in structures]
        ends = list(itertools.accumulate(counts))

        def rank(i: int) -> tuple[int, str]:
            """Return a sort key: first the parameters in their order, then others by name."""
            name = names[i]
            if isinstance(name, int):
                return name, ""
            return (parameters.index(name), "") if name in parameters else (len(names) + len(parameters), name)

        ranked = sorted(range(len(names)), key=rank)
        order = tuple(leaf for i in ranked for leaf in range(ends[i] - counts[i], ends[i]))
        key = tuple((names[i], structures[i]) for i in ranked)
        return CallFormat(None if order == tuple(range(len(order))) else order, key, spec, len(args), tuple(kwargs))

    def ordered(self, leaves: list[T]) -> list[T]:
        """Return the leaves that `flatten` found, in the order of the parameters."""
        return leaves if self.order is None else [leaves[i] for i in self.order]

    def call(self, program: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call a program in this form.

        Args:
            program: the program.
            leaves: the leaves of the arguments, in the order of the parameters.

        Raises:
            RuleError: it wrote to an object among the arguments (which is restored) or to a container of the caller's,
                or it returns an iterator or an object that hides tensors.
        """
        if self.order is not None:
            leaves = [leaf for _, leaf in sorted(zip(self.order, leaves, strict=True), key=lambda pair: pair[0])]
        args, kwargs = unflatten(leaves, self.spec, self.count, self.names)
        objects = ObjectSnapshot(x.__self__ if isinstance(x, types.MethodType) else x for x in leaves if has_parts(x))
        try:
            result = program(*args, **kwargs)
        except BaseException:  # the caller may then run the program in another way
            objects.put_back()
            raise
        if written := objects.put_back():
            raise RuleError(f"it writes to an argument, a {written}, which a graph holds as a constant")
        if self.spec is not None:
            now, spec = flatten(args, kwargs)
            if spec != self.spec or not all(map(is_, now, leaves)):
                raise RuleError("it writes to a container among its arguments, of which it has a copy")
        if once := next((x for x in pytree.tree_leaves(result) if isinstance(x, Iterator)), None):
            raise RuleError(f"it returns a {type(once).__name__}, which gives its values once: return a list")
        if hidden := next((x for x in pytree.tree_leaves(result) if _hides_tensors(x)), None):
            raise RuleError(f"it returns a {type(hidden).__name__} with tensors in it: return a container")
        return result


def _hides_tensors(x: Any) -> bool:
    """Return whether a leaf of a result holds tensors that cannot be replaced by others."""
    if isinstance(x, functools.partial):
        return any(isinstance(part, Tensor) for part in pytree.tree_leaves((x.args, x.keywords)))
    if isinstance(x, types.FunctionType):
        return any(isinstance(value, Tensor) for _, value in parts_of(x))
    return isinstance(x, (set, frozenset)) and any(isinstance(part, Tensor) for part in x)


AS_GIVEN = CallFormat(None, None, None, 0, ())
"""The form that reorders nothing, for calls whose form does not matter."""
