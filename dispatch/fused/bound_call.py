"""A fused call as tensors, dynamic scalars and static values, and the launch that it ended in.

An optimizer step makes the same fused call as the step before, with new gradients and numbers. Its lists are the same
objects, and by the promises of their holders (`tensor_columns.TensorColumn`) only the addresses of parameters and
gradients, and the layout of matrices there, can have changed. So after a call that ended in one launch, the next call
of the same signature compares only these (`CachedLaunch`), and skips the other checks of `FusedFunction`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import (
    Addresses,
    BroadcastColumn,
    ColumnGuard,
    Columns,
    TensorColumn,
    is_fixed,
)
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.guards import AddressSnapshot
from subtensors.dispatch.graphs.released_tensors import Release
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.kernels.runtime.launcher import current_stream

if TYPE_CHECKING:
    from subtensors.dispatch.fused.triton_executor import PointerTable, TritonExecutor

cpu_kernels: ContextVar[bool] = ContextVar("cpu_kernels", default=False)
"""Set to run kernels on CPU tensors too, in Triton's interpreter, to test them without a GPU."""


interprets_kernels = cpu_kernels.get
"""Return whether kernels run on CPU tensors."""


class CallSignature:
    """The facts common to calls whose arguments have the same pytree and the same types."""

    def __init__(self, spec: optree.PyTreeSpec, types: Sequence[type]) -> None:
        self.spec = spec
        kinds = [_kind(t) for t in types]
        self.tensors = [i for i, kind in enumerate(kinds) if kind is Tensor]
        """The positions of the leaves that are tensors or lists of them."""
        self.numbers = [i for i, kind in enumerate(kinds) if kind is float or kind is int]
        """The positions of the leaves that are dynamic scalars."""
        self.statics = [i for i, kind in enumerate(kinds) if kind is None]
        """The positions of the leaves that are static: constants of the trace."""
        self.number_types: list[type[float] | type[int]] = [kind for kind in kinds if kind is float or kind is int]
        self.has_python_numbers = all(
            issubclass(types[i], kind) for i, kind in zip(self.numbers, self.number_types, strict=True)
        )
        """True when the numbers are Python's own rather than, say, numpy's."""
        self.first_list = next((i for i, t in enumerate(types) if issubclass(t, TensorColumn)), None)


def _kind(leaf_type: type) -> type[Tensor] | type[float] | type[int] | None:
    """The kind of an argument of this type: a tensor, a dynamic scalar, or a static value (None)."""
    if issubclass(leaf_type, TensorColumn | Tensor):
        return Tensor
    if issubclass(leaf_type, bool | str | torch.dtype | torch.device | None):
        return None
    if issubclass(leaf_type, Integral):
        return int
    if issubclass(leaf_type, Real):
        return float
    raise TypeError(
        f"an argument of fused math is a list of tensors, a tensor, a number, a bool, a str or None; "
        f"got {leaf_type.__name__}; many tensors are one argument as st.TensorList(...)"
    )


_signatures: dict[tuple[optree.PyTreeSpec, tuple[type, ...]], CallSignature] = {}


class FusedCall:
    """One call: the leaves of its arguments, and the key under which its traces and plans are cached.

    Tensors, numbers and static values may sit in tuples, lists and dicts; another argument raises TypeError.
    """

    __slots__ = ("count", "key", "launches", "leaves", "signature", "statics")

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        tree: PyTree = (args, kwargs)
        leaves: list[PyTree]
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
        types = tuple(map(type, leaves))
        signature = _signatures.get((spec, types))
        if signature is None:
            signature = _signatures[spec, types] = CallSignature(spec, types)
        self.leaves, self.signature = leaves, signature
        self.launches: list[CachedLaunch] = []
        """The last call's launch, if it may be repeated; shared with the calls that `with_list` makes from this one."""
        self.count: int | None = None if signature.first_list is None else len(leaves[signature.first_list])
        """The number of elements of the lists; None when there is no list."""
        self.statics: tuple[object, ...] = (signature, *[leaves[i] for i in signature.statics])
        """The part of the arguments that decides how the math is traced."""
        self.key: tuple[object, ...] = (self.statics, modes())
        """Everything that decides how the math is traced: the static values and the modes of torch."""

    def with_list(self, position: int, tensors: TensorColumn) -> FusedCall:
        """The same call with another list, in the current modes of torch."""
        call = object.__new__(FusedCall)
        call.signature, call.count, call.statics = self.signature, self.count, self.statics
        call.launches = self.launches
        call.leaves = list(self.leaves)
        call.leaves[position] = tensors
        call.key = (self.statics, modes())
        return call

    def arguments(self) -> tuple[Args, Kwargs]:
        """The arguments of the call, unflattened."""
        return self.signature.spec.unflatten(self.leaves)  # type: ignore[return-value]  # of (args, kwargs)

    def numbers(self) -> list[float]:
        """The dynamic scalars."""
        signature = self.signature
        if signature.has_python_numbers:
            return [self.leaves[i] for i in signature.numbers]
        return [kind(self.leaves[i]) for i, kind in zip(signature.numbers, signature.number_types, strict=True)]

    def columns(self, name: str) -> Columns:
        """One list of tensors an argument, all of one length.

        Raises:
            TypeError: there is no tensor among the arguments.
            ValueError: lists of different lengths.
        """
        if not self.signature.tensors:
            raise TypeError(f"{name} needs a tensor or a list of tensors among its arguments")
        columns: list[Sequence[Tensor]] = []
        for position in self.signature.tensors:
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
        bare = copy.copy(self)
        bare.launches, bare.leaves = [], list(self.leaves)
        for position in (*self.signature.tensors, *self.signature.numbers):
            bare.leaves[position] = None
        return bare

    def replace(self, tensors: Sequence[object], numbers: Sequence[object]) -> tuple[Args, Kwargs]:
        """Arguments for the function, with these in the places of the tensors and numbers."""
        leaves = list(self.leaves)
        positions = (*self.signature.tensors, *self.signature.numbers)
        for position, value in zip(positions, (*tensors, *numbers), strict=True):
            leaves[position] = value
        return self.signature.spec.unflatten(leaves)  # type: ignore[return-value]  # of (args, kwargs)


def modes() -> tuple[object, ...]:
    """The modes of torch that change what a function of tensors does."""
    cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    casts = (cpu and torch.get_autocast_dtype("cpu"), cuda and torch.get_autocast_dtype("cuda"))
    return torch.is_grad_enabled(), torch.get_default_dtype(), cpu_kernels.get(), casts, is_transforming()


@dataclass(frozen=True)
class CachedLaunch:
    """The launch that a call ended in."""

    key: tuple[object, ...]
    """The key of the call."""
    edition: object
    """The edition of the function's kernels; stale once they were tuned."""
    guards: list[tuple[int, AddressSnapshot]]
    """The leaves whose addresses may change, and the guards on them."""
    executor: TritonExecutor
    table: PointerTable

    def repeat(self, call: FusedCall, edition: object, columns: Columns) -> bool:
        """Repeat the launch if the call is the same except for its numbers; return False where it may differ."""
        executor = self.executor
        if (
            call.key != self.key
            or edition is not self.edition
            or Release.count
            or current_recording() is not None
            or not executor.is_on_current_device()
            or executor.is_capturing()
            or (stream := current_stream(executor.device)) != self.table.stream
        ):
            return False
        leaves = call.leaves
        for position, guard in self.guards:
            if not guard.matches(leaves[position]):
                return False
        executor.launch(self.table, columns, call.numbers(), stream, is_capturing=False)
        return True


def keep_launch(
    call: FusedCall,
    edition: object,
    columns: Columns,
    addresses: Addresses,
    guards: Sequence[ColumnGuard],
    executor: TritonExecutor,
) -> None:
    """Keep the launch of a call that this executor alone has run, if the next call may repeat it."""
    call.launches.clear()
    table = executor.repeatable_table(columns, addresses)
    if table is None or current_recording() is not None:
        return
    compared = []
    for position, column, guard in zip(call.signature.tensors, columns, guards, strict=True):
        if not is_fixed(column):
            snapshot = guard.known_addresses(column)
            if snapshot is None:
                return
            compared.append((position, snapshot))
    call.launches.append(CachedLaunch(call.key, edition, compared, executor, table))
