"""The step of an optimizer: for each parameter group its batches, and for each batch one fused call.

gradients of the groups -> batches, as of the last step unless something changed -> [norm of all gradients]
    -> for each batch: function(params, gradients, masters, state entries, loss scale, hyperparameters)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import FusedCall, interprets_kernels
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs.dynamic_scalars import current_scalars
from subtensors.dispatch.torch_internals import dynamo, ops
from subtensors.kernels.runtime.gc_pause import gc_paused
from subtensors.optim.accumulation import Group
from subtensors.optim.batches import Batch, BatchKind, GroupBatches, column_of, indices_without_gradient
from subtensors.optim.dtensor import Sharding, sharding_of
from subtensors.optim.gradient_norm import GradientNorm
from subtensors.optim.hyperparameters import check_types
from subtensors.optim.low_bit_state import check_sharded_dtypes, low_bit_dtype
from subtensors.optim.options import IN_STEP, PASSES, ParamGroup
from subtensors.optim.state import AVERAGE, MASTER, StateFactory, SteppedOptimizer, needed_entries
from subtensors.optim.traced_update import SUM_OF_SQUARES, StepValues, single_tensor_step

Step = TypeVar("Step", bound=Callable[..., object])

# Mapped in C over each group, in every step.
_grad = attrgetter("grad")


def with_hooks(step: Step) -> Step:
    """Wrap a step so that it runs its hooks and shows in profiles, at no cost while there are neither.

    `torch.optim.Optimizer` wraps the step of every class in a profiler range and in the calls of its hooks. For an
    optimizer with few parameters those take longer than the rest of the step.
    """
    observed = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        if ops.has_step_observers(self):
            return observed(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]
    dynamo.call_eagerly(hooked, "a step runs its own kernels, which there is nothing to make faster of")
    return hooked  # type: ignore[return-value]


def accumulates(groups: Sequence[Group]) -> bool:
    """Return whether some calls of `step` only count a pass over gradients: see `accumulation`."""
    return groups[0].get("accumulate", 1) != 1 or PASSES in groups[0]


class StepFunction(Protocol):
    """The function that a step calls with the columns of a batch: a `FusedFunction`, or a `ListStep`."""

    def run(self, call: FusedCall) -> object:
        """Update the parameters of a batch."""

    def read_values(self) -> tuple[object, ...]:
        """The values that the math reads besides its arguments, such as globals, in a form that can be compared."""


class UpdatedOptimizer(SteppedOptimizer, Protocol):
    """An optimizer with what updates its parameters: all in a step, or each in the backward."""

    is_replayable: ClassVar[bool]
    _fusion: ClassVar[StepFunction]
    _updater: Updater
    _parts: dict[Tensor, Updater]


class Updater:
    """The part of an optimizer that updates its parameters, with the batches that it keeps from step to step.

    Its methods are given the optimizer, and it keeps no reference to it, so that an optimizer is freed without a
    garbage collection.
    """

    def __init__(self, cls: type[SteppedOptimizer], function: StepFunction) -> None:
        self.declaration, self.function = cls._declaration, function
        self.is_fused = isinstance(function, FusedFunction)
        """True if the update of a batch is one fused call."""
        self.norm = GradientNorm()
        self.groups: dict[int, GroupBatches] = {}
        """The batches of each group, by its index."""
        self._cls = cls
        self._stamp: object = None
        """The stamp of the state that the batches were made of."""
        self._shard_functions: dict[Sharding, FusedFunction] = {}
        """For steps of shards that depend on each other."""

    def update_all(self, optimizer: SteppedOptimizer, groups: list[Group] | None = None) -> None:
        """Update every parameter that has a gradient, now or in the graph that is being captured.

        Args:
            optimizer: the optimizer.
            groups: the groups to update, if they are not those of the optimizer.
        """
        groups = optimizer.param_groups if groups is None else groups
        gradients = self.gradients(groups)
        batches = [self.batches(optimizer, groups, index, grads) for index, grads in enumerate(gradients)]
        dynamic = current_scalars()
        try:
            if any(group.get("max_norm") is not None for group in groups):
                pairs = [(b, b.gradients(grads)) for own, grads in zip(batches, gradients, strict=True) for b in own]
                self.norm.take(pairs)
            for index, group in enumerate(groups):
                if dynamic is not None:
                    dynamic.source = id(optimizer), index
                for batch in batches[index]:
                    self._update_batch(optimizer, group, batch, gradients[index])
        except RuntimeError:
            for grads in gradients:
                self.refuse_sparse(grads)
            raise
        if dynamic is not None:
            dynamic.source = None

    def gradients(self, groups: list[Group]) -> list[TensorColumn]:
        """The gradients of each group, None for a parameter without one."""
        columns = []
        for index, group in enumerate(groups):
            known = self.groups.get(index)
            # Mostly one batch is the whole group, and its gradients have the layout of its parameters.
            like = known.batches[0].full_group if known is not None and known.batches else None
            columns.append(TensorColumn(map(_grad, group["params"]), like=like))
        return columns

    def batches(self, optimizer: SteppedOptimizer, groups: list[Group], index: int, grads: TensorColumn) -> list[Batch]:
        """The batches of one of these groups for these gradients; state that a parameter lacks is created."""
        if optimizer.state.version.stamp is not self._stamp or len(self.groups) > len(groups):
            self.forget()
        group = groups[index]
        params = group["params"]
        known = self.groups.get(index)
        has_values = known is not None and known.has_values(group)
        if not has_values:
            place = f" in param_groups[{index}]"
            check_types(self.declaration.number_counts, group, place, self.declaration.never_none)
        if (
            known is not None
            and (has_values or known.accept(group, needed_entries(optimizer, group)))
            and known.is_current(params, grads)
        ):
            return known.batches
        self.refuse_sparse(grads)
        with gc_paused():
            entries = needed_entries(optimizer, group)
            kinds = optimizer._split_kinds(self._kinds(optimizer, group, grads, entries), params)
            batches = [self._batch(optimizer, group, kind, indices) for kind, indices in kinds]
        self.groups[index] = GroupBatches(group, indices_without_gradient(grads), entries, batches)
        self._stamp = optimizer.state.version.stamp
        return batches

    def forget(self) -> None:
        """Drop the batches of all groups; traced and compiled functions stay."""
        self.groups.clear()

    def refuse_sparse(self, grads: TensorColumn) -> None:
        """Raise RuntimeError if a gradient of a group is sparse."""
        present: list[Tensor | None] = [*grads]
        for i, g in enumerate(present):
            if g is not None and g.layout is not torch.strided:
                raise RuntimeError(
                    f"{self._cls.__name__} updates dense gradients, and parameter {i} of its group has one of layout "
                    f"{g.layout}: make it dense (Embedding(sparse=False)), or give it to torch.optim.SparseAdam"
                )

    def values(self, group: ParamGroup, device: torch.device) -> StepValues:
        """The group's hyperparameters, and the options that a step reads, as the fused call takes them."""
        values: StepValues = {}
        for name in IN_STEP:
            if group.get(name) is not None:
                values[name] = _as_argument(group[name], device)
        if "max_norm" in values:
            values[SUM_OF_SQUARES] = self.norm.sum_of_squares(device)
        for name in self.declaration.hyperparameters:
            if name in group:
                value = group[name]
                if type(value) is not float:
                    if isinstance(value, bool) and name in self.declaration.number_counts:
                        value = float(value)
                    value = _as_argument(value, device)
                if type(value) is float and value == 0 and name in self.declaration.optional:
                    value = None
                values[name] = value
        return values

    def shard_mode(self, optimizer: SteppedOptimizer, group: ParamGroup, device: torch.device) -> tuple[bool, bool]:
        """Return whether a sharded step can run on local shards, and whether it then sums over processes."""
        if not isinstance(self.function, FusedFunction):
            return False, False
        p = torch.ones(2, device="cpu")
        needed, factory = needed_entries(optimizer, group), StateFactory(optimizer)
        entries = [
            TensorColumn([factory.initial_value(p, e, group)]) if e in needed else None
            for e in (*self.declaration.entries, AVERAGE)
        ]
        column, values = TensorColumn([p]), self.values(group, p.device)
        arguments = (column, column, None, tuple(entries), None, None, False, values)
        if not self.function.reduces(*arguments):
            return True, False
        has_kernels = device.type == "cuda" or interprets_kernels()
        return (has_kernels and self.function.takes_parts(*arguments),) * 2

    def _update_batch(self, optimizer: SteppedOptimizer, group: ParamGroup, batch: Batch, grads: TensorColumn) -> None:
        """Update the parameters of a batch."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        options = [
            scale,
            found_inf,
            group.get("maximize"),
            len(group),
            *map(group.get, self.declaration.option_names),
        ]
        gradients = batch.gradients(grads)
        # Where they are packed, holding them saves nothing.
        if not batch.holds_parameters and getattr(optimizer._capture, "packed", None) is None:
            batch.hold_parameters()
        call = batch.repeated_call(options, gradients) or batch.new_call(
            options,
            gradients,
            None if scale is None else _as_argument(scale, batch.kind.device),
            None if found_inf is None else _as_argument(found_inf, batch.kind.device),
            bool(group.get("maximize")),
            self.values(group, batch.kind.device),
        )
        function = self.function if not batch.reduces_shards else self._shard_function(batch.kind.sharding)
        function.run(call)
        if batch.sees_shards:
            # The step wrote the local shards; autograd must be told that the DTensors were written.
            torch.autograd.graph.increment_version(batch.params)

    def _shard_function(self, sharding: Sharding | None) -> FusedFunction:
        """The step function for shards that depend on each other."""
        assert sharding is not None
        if sharding not in self._shard_functions:
            step = single_tensor_step(self._cls)
            self._shard_functions[sharding] = FusedFunction(step, exchange=sharding.all_reduce)
        return self._shard_functions[sharding]

    def _kinds(
        self, optimizer: SteppedOptimizer, group: Group, grads: TensorColumn, needed: tuple[str, ...]
    ) -> dict[BatchKind, list[int]]:
        """Create the state that parameters with a gradient lack, and group their positions by kind."""
        params: list[Tensor] = group["params"]
        present = [i for i, g in enumerate(grads) if g is not None]
        entries = StateFactory(optimizer).create_all([params[i] for i in present], group, needed)
        kinds: dict[BatchKind, list[int]] = {}
        for i, own in zip(present, entries, strict=True):
            p = params[i]
            dtypes = tuple([low_bit_dtype(entry, p, group, self.declaration.low_bit) for entry in own])
            kinds.setdefault(BatchKind(p.device, p.is_complex(), sharding_of(p), own, dtypes), []).append(i)
        return kinds

    def _batch(self, optimizer: SteppedOptimizer, group: Group, kind: BatchKind, indices: list[int]) -> Batch:
        """The batch of these parameters of the group, which are of one kind."""
        sees_shards = reduces_shards = False
        if kind.sharding is not None:
            sees_shards, reduces_shards = self.shard_mode(optimizer, group, kind.device)
            check_sharded_dtypes(kind.dtypes, sees_shards, kind.sharding.is_replicated)
        params: list[Tensor] = group["params"]
        own = [params[i] for i in indices]
        # Only where there are entries: reading the state of a parameter would make an empty one.
        states = [optimizer.state[p] for p in own] if kind.entries else []
        columns = {
            name: column_of(states, name, dtype, sees_shards)
            for name, dtype in zip(kind.entries, kind.dtypes, strict=True)
        }
        master = columns.get(MASTER)
        assert master is None or isinstance(master, TensorColumn)
        return Batch(
            None if indices == [*range(len(params))] else indices,
            kind,
            TensorColumn(own, keeps_layout=not kind.is_complex and kind.sharding is None),
            master,
            tuple([columns.get(entry) for entry in (*self.declaration.entries, AVERAGE)]),
            sees_shards,
            reduces_shards,
            states,
        )


def _as_argument(value: Any, device: torch.device) -> Any:
    """A value as the fused call takes it: a number as a float, a tensor of one element without dimensions."""
    if isinstance(value, Tensor):
        value = value.reshape(())
        # One on the CPU is handed over by value; one on a device is read there.
        return value if value.device.type == "cpu" else value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return tuple([_as_argument(v, device) for v in value])
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
