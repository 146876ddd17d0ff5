"""The format of a call: equal calls share a bucket, however their arguments are named and ordered.

Runs of the program happen here too, since a run must be given its arguments in the caller's format.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import TypeAlias, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from subtensors.bucketed.calls.call_key import Structure, flatten, has_parts, parts_of, unflatten
from subtensors.bucketed.calls.python_objects import ObjectSnapshot, flatten_argument_objects
from subtensors.bucketed.state.program_state import State
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree

T = TypeVar("T")

FormatKey: TypeAlias = tuple[tuple[str | int, Structure], ...]

inside_program: ContextVar[bool] = ContextVar("inside a bucketed program", default=False)
"""True while a bucketed program runs: calls that it makes of another one are a part of it."""


@dataclass(frozen=True)
class CallFormat:
    """The form in which a call gives its arguments: by position or by name, and in which order.

    Args:
        order: for each leaf, in the order of the parameters, its index among those of `flatten`; None if the same.
        key: equal for calls that differ in nothing but their form.
        structure, count, names: what `flatten` found, the number of positional arguments, the others' names.
    """

    order: tuple[int, ...] | None
    key: FormatKey
    structure: Structure
    count: int
    names: tuple[str, ...]

    @staticmethod
    def of(parameters: Sequence[str], args: Args, kwargs: Kwargs, structure: Structure) -> CallFormat:
        """Return the form of a call.

        Args:
            parameters: the names of the parameters that can be given by position.
            args, kwargs: the call's arguments.
            structure: the structure that `flatten` found.

        Example:
            >>> CallFormat.of(["x", "y"], (), {"y": 1, "x": 2}, None).order
            (1, 0)
        """
        names = [*parameters[: len(args)], *range(len(parameters), len(args)), *kwargs]
        given = [*args, *kwargs.values()]
        structures = [None if structure is None else pytree.tree_structure(flatten_argument_objects(x)) for x in given]
        counts = [1 if own is None else own.num_leaves for own in structures]
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
        return CallFormat(
            None if order == tuple(range(len(order))) else order, key, structure, len(args), tuple(kwargs)
        )

    def ordered(self, leaves: list[T]) -> list[T]:
        """Return the leaves that `flatten` found, in the order of the parameters."""
        return leaves if self.order is None else [leaves[i] for i in self.order]

    def program_on_leaves(self, program: Callable[..., PyTree], state: State) -> Callable[[Sequence[PyTree]], PyTree]:
        """Return a function that runs the program on the leaves of its arguments, in the order of the parameters.

        It raises a RuleError if the program wrote to an object among the arguments (which is restored) or to a
        container of the caller's, or if it returns an iterator or an object that hides tensors.
        """

        def run(leaves: Sequence[PyTree]) -> PyTree:
            token = inside_program.set(True)
            try:
                with state.guard.during_run():
                    return self._run(program, leaves)
            finally:
                inside_program.reset(token)

        return run

    def _run(self, program: Callable[..., PyTree], leaves: Sequence[PyTree]) -> PyTree:
        if self.order is not None:
            leaves = [leaf for _, leaf in sorted(zip(self.order, leaves, strict=True), key=lambda pair: pair[0])]
        args, kwargs = unflatten(leaves, self.structure, self.count, self.names)
        objects = ObjectSnapshot([x.__self__ if isinstance(x, types.MethodType) else x for x in leaves if has_parts(x)])
        try:
            result = program(*args, **kwargs)
        except BaseException:  # the caller may then run the program in another way
            objects.restore()
            raise
        if written := objects.restore():
            raise RuleError(f"it writes to an argument, a {written}, which a graph holds as a constant")
        if self.structure is not None:
            now, structure = flatten(args, kwargs)
            if structure != self.structure or not all(map(is_, now, leaves)):
                raise RuleError("it writes to a container among its arguments, of which it has a copy")
        for x in pytree.tree_leaves(result):
            if isinstance(x, Iterator):
                raise RuleError(f"it returns a {type(x).__name__}, which gives its values once: return a list")
            if _hides_tensors(x):
                raise RuleError(f"it returns a {type(x).__name__} with tensors in it: return a container")
        return result


def _hides_tensors(x: object) -> bool:
    """Return whether a leaf of a result holds tensors that cannot be replaced by others."""
    if isinstance(x, functools.partial):
        return any(isinstance(part, Tensor) for part in pytree.tree_leaves((x.args, x.keywords)))
    if isinstance(x, types.FunctionType):
        return any(isinstance(value, Tensor) for _, value in parts_of(x))
    return isinstance(x, (set, frozenset)) and any(isinstance(part, Tensor) for part in x)


AS_GIVEN = CallFormat(None, (), None, 0, ())
"""The form that reorders nothing, for calls whose form does not matter."""
