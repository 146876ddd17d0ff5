"""The state of an optimizer: what a class declares, and the tensors that are made of the declaration.

State is made in the first step. One fill a tensor would take most of it over thousands of parameters (Adam makes three
tensors a parameter), so like parameters get theirs together: each tensor has its own memory, and one call fills all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from subtensors.arguments import shown
from subtensors.dispatch.fused.torch_executor import joined_parts
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.optim.accumulation import Group
from subtensors.optim.batches import BatchKind
from subtensors.optim.dtensor import free_gathered_weights
from subtensors.optim.hyperparameters import OPTIONS, Accepted, number_counts
from subtensors.optim.low_bit_state import convert_entry, low_bit_dtype
from subtensors.optim.options import IN_STEP, ParamGroup
from subtensors.optim.traced_update import SUM_OF_SQUARES
from subtensors.optim.versions import States
from subtensors.static.arena import Arena
from subtensors.static.static_tensor import static_in_place

MASTER = "master_param"
AVERAGE = "ema"

EMPTY_CACHE_BYTES = 64 << 20
"""The least bytes of new state for which torch's cache is emptied first."""

ENTRIES: set[str] = set()
"""The names of the state entries of all classes."""

Initializer = Callable[[Tensor], Tensor]
"""Makes the initial value of a state entry from its parameter, or from the float32 master."""


class SteppedOptimizer(Protocol):
    """The attributes and methods of an optimizer that its parts read; its class says by them what its state is."""

    optional: ClassVar[Collection[str]]
    low_bit: ClassVar[Mapping[str, bool]]
    _initializers: ClassVar[Mapping[str, Initializer]]
    _accepted: ClassVar[Accepted | None]
    _declaration: ClassVar[Declaration]

    param_groups: list[Group]
    state: States
    _arena: Arena | None

    @property
    def _capture(self) -> object: ...

    @property
    def update(self) -> Callable[..., None]:
        """The math of one tensor."""

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """Return whether the parameters of this group have this entry."""

    def applies_to(self, entry: str, p: Tensor, group: ParamGroup) -> bool:
        """Return whether this parameter has an entry that its group needs."""

    def init_state(self, entry: str, p: Tensor, group: ParamGroup) -> Tensor:
        """The initial value of an entry."""

    def _split_kinds(
        self, kinds: dict[BatchKind, list[int]], params: list[Tensor]
    ) -> Iterable[tuple[BatchKind, list[int]]]: ...


class Declaration:
    """The state entries and hyperparameters of an optimizer class, read from its `state` and `update`.

    Raises:
        TypeError: `update` doesn't start with self, p and g, takes another entry than `state` declares, or takes the
            name of an option.
    """

    def __init__(self, cls: type[SteppedOptimizer], base: type[SteppedOptimizer]) -> None:
        function: Callable[..., None] = cls.update  # type: ignore[assignment]  # a function of the class, unbound
        signature = list(inspect.signature(function).parameters.values())
        if [s.kind for s in signature[:3]] != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3:
            raise TypeError(f"{cls.__name__}.update takes self, p and g first")
        rest = signature[3:]
        hyperparameters = [s for s in rest if s.kind is inspect.Parameter.KEYWORD_ONLY]
        self.entries = tuple(s.name for s in rest if s not in hyperparameters)
        """The state entries that `update` takes, in its order."""
        ENTRIES.update(self.entries)
        self.hyperparameters = tuple(s.name for s in hyperparameters)
        OPTIONS.update(self.hyperparameters)
        self.number_counts = number_counts(cls, function)
        """The hyperparameters that are numbers, and of how many each is."""
        # An `update` of a user's own may take any value.
        arguments = inspect.signature(cls).parameters if cls._accepted is not None else {}
        defaults = {name: argument.default for name, argument in arguments.items()}
        self.never_none = {
            name for name, x in defaults.items() if None not in (x if isinstance(x, tuple | list) else (x,))
        }
        """The hyperparameters that may not be None, as neither their default nor a number in it is."""
        self.flags = {name for name, x in defaults.items() if isinstance(x, bool)}
        """The hyperparameters that the class takes as on or off."""
        self.required = frozenset(s.name for s in hyperparameters if s.default is inspect.Parameter.empty)
        """The hyperparameters without a default in `update`."""
        self.option_names = (*self.hyperparameters, *IN_STEP)
        """The hyperparameters, and the options that a step is given beside them."""
        self.optional, self.low_bit, self.initializers = cls.optional, cls.low_bit, cls._initializers
        self.has_init_hook = cls.init_state is not base.init_state
        self.has_applies_hook = cls.applies_to is not base.applies_to
        if taken := {*self.hyperparameters, *self.entries} & {*IN_STEP, "accumulate", SUM_OF_SQUARES}:
            raise TypeError(f"{cls.__name__}.update takes {sorted(taken)}, the name of an option of every optimizer")
        if set(self.entries) - {"step"} != set(self.initializers) - {"step"}:
            raise TypeError(
                f"{cls.__name__}.update takes the state entries {sorted(self.entries)} (its arguments between g and "
                f"the keyword-only ones), and {cls.__name__}.state declares {sorted(self.initializers)}; "
                "hyperparameters come after a `*`"
            )


def checked_initializers(name: str, state: object) -> dict[str, Initializer]:
    """The `state` of an optimizer class of this name; raise TypeError if it is no dict of functions."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}.state is a dict, such as dict(m=torch.zeros_like); got {shown(state)}")
    for entry, initial in state.items():
        if not callable(initial):
            raise TypeError(
                f"{name}.state gives for each entry a function of its parameter, such as torch.zeros_like; "
                f"got {shown(initial)} for {entry!r}"
            )
    return dict(state)


def needed_entries(optimizer: SteppedOptimizer, group: ParamGroup) -> tuple[str, ...]:
    """The state entries that the parameters of a group have."""
    needed = tuple([entry for entry in optimizer._declaration.entries if optimizer.needs_state(entry, group)])
    return needed if group.get("ema") is None else (*needed, AVERAGE)


class StateFactory:
    """Creates the state of an optimizer's parameters.

    It is made where state is to be created, and not kept: it refers to the optimizer, which should not wait for a
    garbage collection to be freed. State that is apart is beside the optimizer's own, in memory of its own.
    """

    def __init__(self, optimizer: SteppedOptimizer, is_apart: bool = False) -> None:
        self.optimizer, self.declaration = optimizer, optimizer._declaration
        self.is_apart, self.state = is_apart, States() if is_apart else optimizer.state
        self.arena = None if is_apart else optimizer._arena
        self.is_static = not is_apart and optimizer._capture is not None  # as a graph's addresses have to be

    def entries_of(self, p: Tensor, needed: tuple[str, ...], group: ParamGroup) -> tuple[str, ...]:
        """The entries that a parameter has: its master if it has one, and the needed ones that apply to it."""
        if self.declaration.has_applies_hook:
            needed = tuple([e for e in needed if e == AVERAGE or self.optimizer.applies_to(e, p, group)])
        has_master = group.get("master_weights") and arithmetic_dtype(p.dtype) != p.dtype
        return (MASTER, *needed) if has_master else needed

    def create_all(
        self, params: Sequence[Tensor], group: ParamGroup, needed: tuple[str, ...] | None = None
    ) -> list[tuple[str, ...]]:
        """Create the state entries that parameters of a group lack, together for like parameters without any state.

        Args:
            params: get state in this order.
            group: theirs.
            needed: the group's `needed_entries`, if they are known.

        Returns:
            The entries that each parameter has.
        """
        needed = needed_entries(self.optimizer, group) if needed is None else needed
        entries = [self.entries_of(p, needed, group) for p in params]
        # State in fewer bits, or in an arena, is made one by one, so that there is never twice the memory.
        is_plain = group.get("state_dtype") is None and self.arena is None
        alike: dict[tuple[tuple[str, ...], torch.device, torch.dtype], list[int]] = {}
        for i, (p, own) in enumerate(zip(params, entries, strict=True)):
            if is_plain and own and p not in self.state and can_init_together(p):
                alike.setdefault((own, p.device, p.dtype), []).append(i)
        made: list[dict[str, Tensor] | None] = [None] * len(params)
        for (own, _, _), indices in alike.items():
            together = [params[i] for i in indices]
            if not self.is_apart:
                make_room(together, len(own))
            columns = [self._initial_values(together, name, group) for name in own]
            if self.is_static:
                columns = [list(map(static_in_place, column)) for column in columns]
            for i, *values in zip(indices, *columns, strict=True):
                made[i] = dict(zip(own, values, strict=True))
        for p, own, state in zip(params, entries, made, strict=True):
            if state is not None:
                self.state[p] = state
            else:
                self.create(p, own, group)
        return entries

    def create(self, p: Tensor, entries: tuple[str, ...], group: ParamGroup) -> None:
        """Create those of these state entries that the parameter lacks."""
        if not entries:
            return  # reading the state would make an empty one
        state = self.state[p]
        # A count that joins older state of the math: steps were taken, and their number is not known.
        is_new = state.keys() <= {MASTER, AVERAGE}
        for name in entries:
            if state.get(name) is None:
                state[name] = self.initial_value(p, name, group)
                if name == "step" and not is_new:
                    state[name].fill_(1)
            convert_entry(state, name, low_bit_dtype(name, p, group, self.declaration.low_bit))
        for name, value in [*state.items()]:
            if (placed := self._place(value)) is not value:
                state[name] = placed

    def initial_value(self, p: Tensor, name: str, group: ParamGroup) -> Tensor:
        """The value of state entry `name` of this parameter before its first step."""
        if name == "step" and name not in self.declaration.initializers:
            return torch.zeros((), device=p.device, dtype=torch.float32)
        p, wide = p.detach(), arithmetic_dtype(p.dtype)
        if name == AVERAGE:
            return p.to(wide, copy=True)
        p = p.to(wide) if group.get("master_weights") else p
        return p if name == MASTER else self.optimizer.init_state(name, p, group)

    def _initial_values(self, params: list[Tensor], name: str, group: ParamGroup) -> list[Tensor]:
        """The initial values of one entry for each of these parameters, which share a device and dtype."""
        initializer = self.declaration.initializers.get(name)
        if name == "step" and initializer is None:
            count = torch.empty((), dtype=torch.float32, device=params[0].device)
            return init_together([count] * len(params), count.dtype, are_copies=False)
        is_known = initializer in (torch.zeros_like, torch.clone) and not self.declaration.has_init_hook
        if not is_known and name not in (MASTER, AVERAGE):
            return [self.initial_value(p, name, group) for p in params]
        dtype = params[0].dtype
        dtype = arithmetic_dtype(dtype) if group.get("master_weights") or name == AVERAGE else dtype
        return init_together(params, dtype, are_copies=initializer is not torch.zeros_like)

    def _place(self, entry: Tensor) -> Tensor:
        """Move a state entry into the arena, or make it static where it is; return it unchanged if neither is due."""
        if self.arena is None:
            return static_in_place(entry) if self.is_static else entry
        if entry in self.arena:
            return entry
        if entry.device != self.arena.device:
            raise ValueError(
                f"the arena is on {self.arena.device}, and the parameter whose state it is for on {entry.device}"
            )
        return self.arena.static(entry)


_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def can_init_together(p: Tensor) -> bool:
    """Return whether torch's foreach calls can fill this parameter's state together with others'."""
    return type(p) in PLAIN_TYPES and p.dtype in _DTYPES and p.layout is torch.strided


def make_room(params: Sequence[Tensor], entries: int) -> None:
    """Empty torch's CUDA cache before a large initialization.

    State lives as long as the model. In the blocks that the first backward left in the cache, it would break up
    segments that the next backward, or a graph's memory, needs as one.
    """
    nbytes = entries * sum(p.nbytes for p in params)
    if params[0].device.type == "cuda" and nbytes >= EMPTY_CACHE_BYTES:
        capture.empty_cache()


def init_together(params: Sequence[Tensor], dtype: torch.dtype, are_copies: bool) -> list[Tensor]:
    """A tensor of each parameter's size and strides, zero or a copy; the parameters share a device and dtype."""
    made = _side_by_side(params, dtype) if params[0].device.type == "cpu" else []
    made = made or [torch.empty_like(p, dtype=dtype) for p in params]
    if are_copies:
        torch._foreach_copy_(made, [p.detach() for p in params])
    else:
        torch._foreach_zero_(made)
    return made


def _side_by_side(params: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors like contiguous CPU parameters, those that a step joins side by side in memory; else none.

    Each has a storage of its own all the same, so that what is saved of one holds no other.
    """
    if not all(map(Tensor.is_contiguous, params)):
        return []
    made: list[Tensor] = []
    for part in joined_parts(list(map(Tensor.numel, params))):
        shapes = [params[i].shape for i in part]
        counts = list(map(math.prod, shapes))
        # Not a tensor's `numpy()`, which a graph around the first step takes for a read of values on the host.
        buffer, end = np.empty(sum(counts) * dtype.itemsize, np.uint8), 0
        for shape, count in zip(shapes, counts, strict=True):
            if not count:
                made.append(torch.empty(shape, dtype=dtype))
                continue
            # By `data`, for autograd it is no view.
            made.append(torch.frombuffer(buffer, dtype=dtype, count=count, offset=end).view(shape).data)
            end += count * dtype.itemsize
    return made


@contextmanager
def swapped_averages(state: Mapping[Tensor, Mapping[str, Tensor]]) -> Iterator[None]:
    """A context in which parameters hold the averages in their state; on exit each gets its old value back.

    Raises:
        ValueError: no parameter has an average.
    """
    averages = {p: entries[AVERAGE] for p, entries in state.items() if AVERAGE in entries}
    if not averages:
        raise ValueError("no parameter has an average: make the optimizer with ema=0.999, say, and take a step")
    trained = {p: p.detach().clone() for p in averages}
    try:
        _write(averages)
        yield
    finally:
        _write(trained)


@torch.no_grad()
def _write(values: Mapping[Tensor, Tensor]) -> None:
    """Write values into parameters."""
    for p, value in values.items():
        p.copy_(value)
    free_gathered_weights([*values])
