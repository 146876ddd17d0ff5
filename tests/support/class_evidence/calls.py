"""One recorded call of an op, to be run again on copies and on related inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from subtensors.dispatch.torch_internals.ops import schema_of

Tensors = list[torch.Tensor]


def holds_values(t: torch.Tensor) -> bool:
    """Are its elements numbers that may be averaged, rather than truths or positions?"""
    return t.is_floating_point() or t.is_complex()


def copy_with_storage(t: torch.Tensor) -> torch.Tensor:
    """A detached copy; of a part of a larger storage, the same part of a copy of all of it."""
    t = t.detach()
    stored = t.untyped_storage().nbytes() // t.element_size()
    if stored == t.numel() or t.is_complex() or t.is_neg():
        return t.clone()
    return t.as_strided((stored,), (1,), 0).clone().as_strided(t.shape, t.stride(), t.storage_offset())


@dataclass(frozen=True)
class Call:
    """One call of an op, with its arguments as they were before it ran."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Tensors:
        """Every tensor argument, those in lists too."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def values(self) -> Tensors:
        """The floating-point and complex tensor arguments that are not empty."""
        return [t for t in self.tensors() if holds_values(t) and t.numel() > 0]

    def has_index_operand(self) -> bool:
        """Whether some tensor argument holds integers beside others that hold values."""
        return bool(self.values()) and any(not holds_values(t) and t.dtype != torch.bool for t in self.tensors())

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call with every tensor argument changed."""
        args, kwargs = tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs))
        return Call(self.op, args, kwargs)

    def replacing(self, old: torch.Tensor, new: torch.Tensor) -> Call:
        """The same call with one tensor argument changed for another."""
        return self.with_tensors(lambda t: new if t is old else t)

    def with_argument(self, name: str, value: Any) -> Call:
        """The same call with this argument set, where the op has it."""
        position = next((i for i, a in enumerate(schema_of(self.op).arguments) if a.name == name), None)
        if position is None:
            return self
        if position < len(self.args):
            return Call(self.op, (*self.args[:position], value, *self.args[position + 1 :]), self.kwargs)
        return Call(self.op, self.args, {**self.kwargs, name: value})

    def run(self) -> Tensors:
        """The tensors it returns, and then those it writes to, on copies of its arguments."""
        return self.run_on_copies()[1]

    def run_on_copies(self) -> tuple[Tensors, Tensors]:
        """The copies that the op was given, and its outputs."""
        copied = self.with_tensors(copy_with_storage)
        outputs = [t for t in tree_leaves(copied.op(*copied.args, **copied.kwargs)) if isinstance(t, torch.Tensor)]
        for argument, value in zip(schema_of(self.op).arguments, copied.arguments().values(), strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                outputs += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        return copied.tensors(), outputs

    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults filled in."""
        named = {}
        for position, argument in enumerate(schema_of(self.op).arguments):
            given = self.args[position] if position < len(self.args) else argument.default_value
            named[argument.name] = self.kwargs.get(argument.name, given)
        return named
