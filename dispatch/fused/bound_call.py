"""A fused call taken apart: tensors, live numbers, and the static values that decide how the math is traced."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.launch_cache import LaunchCache
from subtensors.dispatch.fused.tensor_columns import BroadcastColumn, Columns, TensorColumn
from subtensors.dispatch.torch_internals.dispatcher import is_transforming

cpu_kernels: ContextVar[bool] = ContextVar("cpu_kernels", default=False)
"""Set to run kernels on CPU tensors too: Triton interprets them there, slowly, to test that they are right."""


def interprets_kernels() -> bool:
    """Return whether kernels run on CPU tensors."""
    return cpu_kernels.get()


class Form:
    """The facts common to calls whose arguments have the same pytree and the same types."""

    def __init__(self, spec: Any, types: Sequence[type]) -> None:
        self.spec = spec
        kinds = [_kind(t) for t in types]
        self.tensors = [i for i, kind in enumerate(kinds) if kind is Tensor]
        """The positions of the leaves that are tensors or lists of them."""
        self.numbers = [i for i, kind in enumerate(kinds) if kind in (float, int)]
        """The positions of the leaves that are live numbers."""
        self.statics = [i for i, kind in enumerate(kinds) if kind is None]
        """The positions of the leaves that are static: constants of the trace."""
        self.number_types: list[type[float] | type[int]] = [kinds[i] for i in self.numbers]
        self.are_pythons = all(issubclass(types[i], kinds[i]) for i in self.numbers)
        """True when the numbers are Python's own rather than, say, numpy's."""
        self.first_list = next((i for i, t in enumerate(types) if issubclass(t, TensorColumn)), None)


def _kind(leaf_type: type) -> Any:
    if issubclass(leaf_type, TensorColumn | Tensor):
        return Tensor
    if issubclass(leaf_type, bool | str | torch.dtype | torch.device | None):
        return None
    for number, kind in ((Integral, int), (Real, float)):
        if issubclass(leaf_type, number):
            return kind
    raise TypeError(
        f"an argument of fused maths is a list of tensors, a tensor, a number, a bool, a str or None; "
        f"got {leaf_type.__name__}"
    )


_forms: dict[tuple[Any, tuple[type, ...]], Form] = {}


class FusedCall:
    """One call: the leaves of its arguments, and what kind of call it is.

    Args:
        args: positional arguments; tensors, numbers and static values may sit in tuples, lists and dicts.
        kwargs: keyword arguments.

    Raises:
        TypeError: an argument of another kind.
    """

    __slots__ = ("count", "form", "key", "last", "leaves", "statics")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nest: Any = (args, kwargs)
        leaves: list[Any]
        leaves, spec = optree.tree_flatten(nest, none_is_leaf=True)
        types = tuple(map(type, leaves))
        form = _forms.get((spec, types))
        if form is None:
            form = _forms[spec, types] = Form(spec, types)
        self.leaves, self.form = leaves, form
        self.last = LaunchCache()
        """Shared with the calls that `again` makes from this one."""
        self.count: int | None = None if form.first_list is None else len(leaves[form.first_list])
        """The number of elements of the lists; None when there is no list."""
        self.statics: tuple[Any, ...] = (form, *[leaves[i] for i in form.statics])
        """The part of the arguments that decides how the math is traced."""
        self.key: tuple[Any, ...] = (self.statics, modes())
        """All that decides how the math is traced: the static values and the modes of torch."""

    def again(self, position: int, tensors: TensorColumn) -> FusedCall:
        """The same call with another list, in the modes of torch now in force.

        Args:
            position: the leaf that the list takes the place of.
            tensors: as many as there were.
        """
        call = object.__new__(FusedCall)
        call.form, call.count, call.statics, call.last = self.form, self.count, self.statics, self.last
        call.leaves = list(self.leaves)
        call.leaves[position] = tensors
        call.key = (self.statics, modes())
        return call

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that were taken apart."""
        return self.form.spec.unflatten(self.leaves)  # type: ignore[no-any-return]

    def numbers(self) -> list[float]:
        """The live numbers."""
        if self.form.are_pythons:
            return [self.leaves[i] for i in self.form.numbers]
        return [kind(self.leaves[i]) for i, kind in zip(self.form.numbers, self.form.number_types, strict=True)]

    def columns(self, name: str) -> Columns:
        """One list of tensors an argument, all of one length.

        Args:
            name: the function's, for errors.

        Raises:
            TypeError: there is no tensor among the arguments.
            ValueError: lists of different lengths.
        """
        if not self.form.tensors:
            raise TypeError(f"{name} needs a tensor or a list of tensors among its arguments")
        columns: list[Sequence[Tensor]] = []
        for position in self.form.tensors:
            leaf = self.leaves[position]
            if isinstance(leaf, TensorColumn):
                if len(leaf) != self.count:
                    raise ValueError(f"{name}: lists of {self.count} and of {len(leaf)} tensors do not match")
                columns.append(leaf)
            else:
                columns.append([leaf] if self.count is None else BroadcastColumn([leaf] * self.count))
        return columns

    def without_values(self) -> FusedCall:
        """The same call with None in place of tensors and numbers, so that a plan may keep it."""
        bare = object.__new__(FusedCall)
        bare.form, bare.key, bare.count, bare.statics = self.form, self.key, self.count, self.statics
        bare.last = LaunchCache()
        bare.leaves = list(self.leaves)
        for position in (*self.form.tensors, *self.form.numbers):
            bare.leaves[position] = None
        return bare

    def place(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the function, with these in the places of the tensors and numbers."""
        leaves = list(self.leaves)
        for position, value in zip((*self.form.tensors, *self.form.numbers), (*tensors, *numbers), strict=True):
            leaves[position] = value
        return self.form.spec.unflatten(leaves)  # type: ignore[no-any-return]


def modes() -> tuple[Any, ...]:
    """The modes of torch that change what a function of tensors does."""
    cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    casts = (cpu and torch.get_autocast_dtype("cpu"), cuda and torch.get_autocast_dtype("cuda"))
    return torch.is_grad_enabled(), torch.get_default_dtype(), cpu_kernels.get(), casts, is_transforming()
