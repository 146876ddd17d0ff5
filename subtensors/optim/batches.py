"""The batches of a parameter group: the columns of tensors that a fused call takes, kept from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import FusedCall
from subtensors.dispatch.fused.tensor_columns import BlockScales, TensorColumn
from subtensors.dispatch.graphs.guards import are_same, is_plain
from subtensors.dispatch.graphs.released_tensors import Release, check_resident
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals import memory
from subtensors.optim.dtensor import LocalShards, Sharding, placed_like, shard
from subtensors.optim.low_bit_state import SCALES, Quantized, StochasticallyRounded
from subtensors.optim.options import ParamGroup
from subtensors.optim.versions import Entry

StateColumn = TensorColumn | Quantized[TensorColumn] | StochasticallyRounded[TensorColumn]


class BatchKind(NamedTuple):
    """The facts that all parameters of a batch have in common."""

    device: torch.device
    is_complex: bool
    sharding: Sharding | None
    """The sharding of the parameters over processes; None if they are not DTensors."""
    entries: tuple[str, ...]
    """The names of their state entries."""
    dtypes: tuple[torch.dtype | None, ...]
    """The `low_bit_dtype` of each entry."""


GRADIENTS = 1
"""The position of the gradients among the arguments of the call."""


@dataclass
class Batch:
    """Parameters of a group that one fused call updates: of one device, all with masters or all without."""

    indices: list[int] | None
    """Their positions in the group; None if they are the whole group."""
    kind: BatchKind
    params: TensorColumn
    master: TensorColumn | None
    entries: tuple[StateColumn | None, ...]
    """One column a state entry that `update` takes, and last one for the averages; None where these parameters have
    no such entry."""
    sees_shards: bool
    """True if the step runs on the local shards; otherwise it sees DTensors."""
    reduces_shards: bool
    """True if the step of a shard depends on sums over the full tensor."""
    states: Sequence[Entry]
    """The state of each parameter; empty where they have no entries."""

    def __post_init__(self) -> None:
        # Reading the address of every tensor would cost more than the rest of the step. What moves memory under a
        # tensor that stays (an offload through `.data`), transposes it there or casts it does so to all of them; so one
        # parameter tells, the one whose second largest dim is the largest: numbers and vectors can't be transposed.
        self._columns = self.columns()
        breadths = [(sorted(p.shape)[-2:-1], p.numel()) for p in self.params]
        probe = breadths.index(max(breadths))
        self._probe = self.params[probe]
        # Not of the columns: those of complex state hold views of it.
        state = self.states[probe].values() if self.states else ()
        self._probes = [shard(t) for t in state if isinstance(t, Tensor)]
        self._layouts = self._probe_layouts()
        self.has_plain_gradients = not self.kind.is_complex and all(_has_plain_gradient(p) for p in self.params)
        self.full_group = self.params if self.indices is None and self.has_plain_gradients else None
        """The parameters, if they are the whole group and gradients have their layout; else None."""
        self.shards = LocalShards(self.params) if self.sees_shards else None
        self.holds_parameters = False
        """True once `hold_parameters` was called."""
        self._views: list[Tensor] = []
        self._last_options: list[object] = []
        self._last_call: FusedCall | None = None
        """The call of the last step without its gradients, if `_last_options` decides all of the rest."""

    def hold_parameters(self) -> None:
        """Keep views that hold each parameter in C++, which makes checking all of them cheaper (`keep_alive_views`)."""
        # Where modules swap their parameters for others, nobody else may hold them.
        can_hold = self.has_plain_gradients and not torch.__future__.get_swap_module_params_on_conversion()
        self._views = memory.keep_alive_views(self.params) if can_hold else []
        self.holds_parameters = True

    def columns(self) -> list[TensorColumn]:
        """The columns of the state, those of scales included."""
        present = [column for column in (self.master, *self.entries) if column is not None]
        return [part for column in present for part in (column if isinstance(column, tuple) else (column,))]

    def is_stale(self) -> bool:
        """Return whether parameters were cast, or state has other addresses or strides.

        Raises:
            AddressError: the state's memory is released.
        """
        if Release.count:
            check_resident(self._columns, "a step")
        return self._probe_layouts() != self._layouts

    def _probe_layouts(self) -> list[object]:
        return [self._probe.dtype, *[(t.data_ptr(), t.stride()) for t in self._probes]]

    def gradients(self, grads: TensorColumn) -> TensorColumn:
        """Select the gradients of this batch's parameters from those of the group."""
        if grads.holder is self.params:
            return grads
        own: Sequence[Tensor] = grads if self.indices is None else [grads[i] for i in self.indices]
        if self.shards is not None:
            if self.shards.have_changed():
                self._last_call = None
            parts = self.shards.of_gradients(own)
            return as_real(map(Tensor.resolve_conj, parts)) if self.kind.is_complex else parts
        if self.kind.sharding is not None:
            own = placed_like(own, self.params)
        if self.kind.is_complex:
            return as_real(map(Tensor.resolve_conj, own))
        return TensorColumn(own, like=self.params if self.has_plain_gradients else None)

    def new_call(self, options: list[object], gradients: TensorColumn, *arguments: object) -> FusedCall:
        """The fused call of a step."""
        params = self.params if self.shards is None else self.shards.own
        params = as_real(params) if self.kind.is_complex else params
        call = FusedCall((params, gradients, self.master, self.entries, *arguments), {})
        if self._last_call is not None and self._last_call.key == call.key:
            call.launches = self._last_call.launches  # the same columns, with other numbers
        # A template for the steps that follow, without the gradients: those must not live until the next one.
        is_template = not self.kind.is_complex and all(map(is_plain, options))
        self._last_call = call.with_list(GRADIENTS, TensorColumn()) if is_template else None
        self._last_options = options
        return call

    def repeated_call(self, options: list[object], gradients: TensorColumn) -> FusedCall | None:
        """The last call with these gradients; None if the options are not the very same objects."""
        if self._last_call is None or not all(map(is_, options, self._last_options)):
            return None
        return self._last_call.with_list(GRADIENTS, gradients)


def _has_plain_gradient(p: Tensor) -> bool:
    """Return whether torch guarantees that the gradient has the parameter's dtype."""
    return type(p) in PLAIN_TYPES and getattr(p, "grad_dtype", p.dtype) == p.dtype


class GroupBatches:
    """The batches of one parameter group, and the facts that they depend on."""

    def __init__(
        self, group: dict[str, Any], without_gradient: list[int], entries: tuple[str, ...], batches: list[Batch]
    ) -> None:
        self.params: list[Tensor] = list(group["params"])
        self.without_gradient, self.entries, self.batches = without_gradient, entries, batches
        self._storage = _storage_options(group)
        self.values: list[object] = []
        """The group's values when they were last accepted; empty if one is mutable, and may change unseen."""
        self._scalars = [i for i, p in enumerate(self.params) if p.numel() == 1]
        self._scalar_params = [self.params[i] for i in self._scalars]
        self.accept(group, entries)

    def has_values(self, group: ParamGroup) -> bool:
        """Return whether the values of the group are the very objects that were last accepted."""
        return are_same(group.values(), self.values)

    def accept(self, group: ParamGroup, entries: tuple[str, ...]) -> bool:
        """Return whether the group still has the state of these batches, and remember its values if it does."""
        if entries != self.entries or _storage_options(group) != self._storage:
            return False
        # The same object is the same value only if it is immutable.
        is_known = all(is_plain(value) for name, value in group.items() if name != "params")
        self.values = list(group.values()) if is_known else []
        return True

    def is_current(self, params: list[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Return whether the batches fit a step with these parameters and gradients."""
        return (
            self.has_params(params)
            and indices_without_gradient(grads) == self.without_gradient
            and not any(map(Batch.is_stale, self.batches))
        )

    def has_params(self, params: list[Tensor]) -> bool:
        """Return whether these are the same parameter objects that the batches were made for."""
        # Lists compare by identity first, in C. Where two tensors are not the same, `==` compares them: those of one
        # element may be equal, so they are compared before; for others torch refuses to say.
        if len(params) != len(self.params):
            return False
        try:
            return all(map(is_, map(params.__getitem__, self._scalars), self._scalar_params)) and params == self.params
        except RuntimeError:
            return False


def indices_without_gradient(grads: Sequence[Tensor | None]) -> list[int]:
    """The positions of the parameters without a gradient."""
    # In most steps the first pass finds nothing to count, and is all there is.
    return [i for i, g in enumerate(grads) if g is None] if [g for g in grads if g is None] else []


def as_real(tensors: Iterable[Tensor], is_fixed: bool = False) -> TensorColumn:
    """A column with complex tensors as pairs of reals, sharing memory, and others unchanged."""
    return TensorColumn([torch.view_as_real(t) if t.is_complex() else t for t in tensors], is_fixed=is_fixed)


def column_of(states: Sequence[Entry], entry: str, dtype: torch.dtype | None, sees_shards: bool) -> StateColumn:
    """One entry of several parameters' states as the argument of a step."""
    tensors = [state[entry] for state in states]
    column = as_real(map(shard, tensors) if sees_shards else tensors, is_fixed=True)
    if dtype == torch.bfloat16:
        return StochasticallyRounded(column)
    if dtype is None:
        return column
    return Quantized(column, BlockScales([state[entry + SCALES] for state in states], is_fixed=True))


def _storage_options(group: ParamGroup) -> tuple[object, ...]:
    """The options of a group that decide the dtypes of its state."""
    return bool(group.get("master_weights")), group.get("state_dtype")
