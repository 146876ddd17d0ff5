"""The lists that a parameter group hands to the fused call, kept from step to step while they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import FusedCall
from subtensors.dispatch.fused.tensor_columns import BlockScales, TensorColumn
from subtensors.dispatch.graphs.released_tensors import check_resident
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.torch_internals import memory
from subtensors.optim.dtensor import LocalShards, Sharding, shard
from subtensors.optim.low_bit_state import SCALES, Quantized, StochasticallyRounded
from subtensors.static.static_tensor import StaticAddressTensor


@dataclass
class Batch:
    """Parameters of a group that one fused call updates: of one device, all with masters or all without."""

    indices: list[int] | None
    """Their positions in the group; None if they are the whole group."""
    device: torch.device
    is_complex: bool
    params: TensorColumn
    master: TensorColumn | None
    entries: tuple[TensorColumn | Quantized | StochasticallyRounded | None, ...]
    """One column a state entry that `update` takes, and last one for the averages; None where these parameters have
    no such entry."""
    sharding: Sharding | None = None
    """The sharding of the parameters over processes; None if they are not DTensors."""
    sees_shards: bool = False
    """True if the step runs on the local shards; otherwise it sees DTensors."""
    adds_up: bool = False
    """True if the step of a shard depends on sums over the whole tensor."""

    def __post_init__(self) -> None:
        # Asking every tensor where its memory is would cost more than the rest of the step. What moves memory under a
        # tensor that stays (an offload through `.data`) moves all of the state, so the first of each column tells.
        # What is static refuses to be moved.
        self._columns = self.columns()
        movable = [[t for t in column if not isinstance(t, StaticAddressTensor)] for column in self._columns]
        self._firsts = [column[0] for column in movable if column]
        self._places = [t.data_ptr() for t in self._firsts]
        self.has_plain_gradients = not self.is_complex and all(_has_plain_gradient(p) for p in self.params)
        self.shards = LocalShards(self.params) if self.sees_shards else None
        self._last: tuple[list[Any], FusedCall] | None = None
        self._views: list[Tensor] | None = None

    @property
    def holds_parameters(self) -> bool:
        """Return whether `hold_parameters` was called."""
        return self._views is not None

    def hold_parameters(self) -> None:
        """Keep views that hold each parameter in C++, which makes checking all of them cheaper (`holding_views`)."""
        # Where modules swap their parameters for others, nobody else may hold them.
        is_held = self.has_plain_gradients and not torch.__future__.get_swap_module_params_on_conversion()
        self._views = memory.holding_views(self.params) if is_held else []

    def columns(self) -> list[TensorColumn]:
        """The lists that state is kept in."""
        kept = [column for column in (self.master, *self.entries) if column is not None]
        return [part for column in kept for part in (column if isinstance(column, tuple) else (column,))]

    def has_moved(self) -> bool:
        """Return whether the state's memory has changed address; raise AddressError if it is released."""
        check_resident(self._columns, "a step")
        return [t.data_ptr() for t in self._firsts] != self._places

    @property
    def whole(self) -> TensorColumn | None:
        """The parameters, when they are all of the group and gradients are laid out as they are."""
        return self.params if self.indices is None and self.has_plain_gradients else None

    def gradients(self, grads: TensorColumn) -> TensorColumn:
        """Select the gradients of this batch's parameters from those of the group."""
        if grads.holder is self.params:
            return grads
        own = grads if self.indices is None else [grads[i] for i in self.indices]
        if self.shards is not None:
            if self.shards.have_changed():
                self._last = None
            parts = self.shards.of_gradients(own)
            return as_real(map(Tensor.resolve_conj, parts)) if self.is_complex else parts
        if self.is_complex:
            return as_real(map(Tensor.resolve_conj, own))
        return TensorColumn(own, like=self.params if self.has_plain_gradients else None)

    def call(self, options: list[Any], gradients: TensorColumn, *arguments: Any) -> FusedCall:
        """The fused call of a step.

        Args:
            options: what the arguments were made of, by which they are known again.
            gradients: of these parameters.
            arguments: what follows the state.
        """
        params = self.params if self.shards is None else self.shards.own
        params = as_real(params) if self.is_complex else params
        call = FusedCall((params, gradients, self.master, self.entries, *arguments), {})
        if self._last is not None and self._last[1].key == call.key:
            call.launches = self._last[1].launches  # the same lists, with other numbers
        # A template for the steps that follow, without the gradients: those must not live until the next one.
        is_template = not self.is_complex and all(map(is_immutable, options))
        self._last = (options, call.with_list(GRADIENTS, TensorColumn())) if is_template else None
        return call

    def call_again(self, options: list[Any], gradients: TensorColumn) -> FusedCall | None:
        """The last call with these gradients; None when the options are not the very same objects."""
        if self._last is None or not all(map(is_, options, self._last[0])):
            return None
        return self._last[1].with_list(GRADIENTS, gradients)


GRADIENTS = 1
"""The position of the gradients among the arguments of the call."""


def is_immutable(option: Any) -> bool:
    """Return whether an option is immutable, so that the same object always has the same value."""
    if type(option) is tuple:
        return all(map(is_immutable, option))
    return option is None or type(option) in (bool, int, float, str, torch.dtype)


def _has_plain_gradient(p: Tensor) -> bool:
    """Return whether torch guarantees that the gradient has the parameter's dtype."""
    return type(p) in PLAIN_TYPES and getattr(p, "grad_dtype", p.dtype) == p.dtype


@dataclass
class GroupBatches:
    """The batches of one parameter group, and what they were made for."""

    params: list[Tensor]
    missing: list[int]
    """The parameters without a gradient."""
    entries: tuple[str, ...]
    form: tuple[Any, ...]
    """`kept_form` of the group."""
    batches: list[Batch]

    def __post_init__(self) -> None:
        self._single = [i for i, p in enumerate(self.params) if p.numel() == 1]
        self._single_params = [self.params[i] for i in self._single]

    def is_current(
        self, params: list[Tensor], grads: Sequence[Tensor | None], entries: tuple[str, ...], form: tuple[Any, ...]
    ) -> bool:
        """Return whether the batches fit a step with these parameters, gradients and state entries."""
        return (
            entries == self.entries
            and form == self.form
            and self.has_params(params)
            and missing(grads) == self.missing
            and not any(map(Batch.has_moved, self.batches))
        )

    def has_params(self, params: list[Tensor]) -> bool:
        """Return whether these are the same parameter objects that the batches were made for."""
        # Lists compare by identity first, in C. Where two tensors are not the same, `==` compares them: those of one
        # element may be equal, so they are looked at before; of others torch refuses to say.
        if len(params) != len(self.params):
            return False
        try:
            return all(map(is_, map(params.__getitem__, self._single), self._single_params)) and params == self.params
        except RuntimeError:
            return False


def missing(grads: Sequence[Tensor | None]) -> list[int]:
    """The positions of the parameters without a gradient."""
    # The first pass is all there is in most steps, and has nothing to count.
    return [i for i, g in enumerate(grads) if g is None] if [g for g in grads if g is None] else []


def as_real(tensors: Iterable[Tensor], is_fixed: bool = False) -> TensorColumn:
    """Complex tensors as pairs of reals, sharing memory; others as they are."""
    return TensorColumn([torch.view_as_real(t) if t.is_complex() else t for t in tensors], is_fixed=is_fixed)


def kept_form(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options of a group that say in which dtypes its state is kept."""
    return bool(group.get("master_weights")), group.get("state_dtype")


def column_of(states: Sequence[Mapping[str, Any]], entry: str, form: torch.dtype | None, sees_shards: bool) -> Any:
    """One entry of several parameters' states, kept in one form, as a step is given it."""
    kept = [state[entry] for state in states]
    column = as_real(map(shard, kept) if sees_shards else kept, is_fixed=True)
    if form == torch.bfloat16:
        return StochasticallyRounded(column)
    if form is None:
        return column
    return Quantized(column, BlockScales([state[entry + SCALES] for state in states], is_fixed=True))
