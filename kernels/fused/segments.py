"""Cutting a program into kernels: one sweep over the elements between reductions.

Segments run in the order T0 E0 T1 E1 ..., where Tk computes numbers per tensor (one lane a tensor) and Ek elements and
blocks (one tile at a time), each after k rounds of reductions. A value that several segments need is recomputed from
memory in each of them: arithmetic is free and memory traffic is not. A store may overwrite a tensor that a later
segment reads (`_Overwritten`). Then the store is postponed to that segment or, for a number per tensor, the old value
is kept in a slot of the workspace.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from subtensors.kernels.fused.program import Instruction, Program, Shape


def _time(round_: int, shape: Shape) -> int:
    """The position of Tk or Ek in T0 E0 T1 E1 ..."""
    return 2 * round_ + (shape is not Shape.PER_TENSOR)


@dataclass
class Segment:
    """One kernel: what it reads, computes in order, and writes."""

    shape: Shape
    round: int
    steps: list[int] = field(default_factory=list)
    """Values in the order in which they are loaded or computed."""
    memory: dict[int, int] = field(default_factory=dict)
    """Value -> the parameter whose memory holds it."""
    slots: dict[int, int] = field(default_factory=dict)
    """Value -> the slot of the workspace that holds it."""
    stores: dict[int, int] = field(default_factory=dict)
    """Parameter -> value written to its memory."""
    outputs: dict[int, int] = field(default_factory=dict)
    """Output number -> value."""
    keeps: dict[int, int] = field(default_factory=dict)
    """Slot -> value (number per tensor) written to the workspace."""
    reductions: dict[int, int] = field(default_factory=dict)
    """Slot -> the reduction instruction that this segment completes."""

    @property
    def writes(self) -> bool:
        """Return whether the segment writes anything."""
        return bool(self.stores or self.outputs or self.keeps or self.reductions)


class _Overwritten(Exception):
    """A value is overwritten before a segment reads it; what the planner noted avoids that in the next attempt."""


# A number per tensor is recomputed in every tile unless it takes one of these ops.
_COSTLY = frozenset("pow exp exp2 expm1 log log10 log1p log2 sin cos tan tanh sinh cosh erf erfc erfinv lgamma".split())


@dataclass
class _Planner:
    program: Program
    rounds: dict[int, int] = field(default_factory=dict)
    postponed: dict[int, int] = field(default_factory=dict)
    tensor_rounds: set[int] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index in range(len(self.program.parameters) + len(self.program.instructions)):
            value = self.program.value(index)
            reads = value.reads() if isinstance(value, Instruction) else []
            before = max((self.rounds[r] for r in reads), default=0)
            self.rounds[index] = before + (isinstance(value, Instruction) and value.is_reduction)
            if isinstance(value, Instruction) and value.shape is Shape.PER_TENSOR and value.name in _COSTLY:
                self.tensor_rounds.add(self.rounds[index])
        stored, returned = self.program.stores, self.program.outputs
        self.last = max((self.rounds[v] for v in (*stored.values(), *returned)), default=0)
        per_tensor = [v for p, v in stored.items() if self.program.parameters[p].shape is Shape.PER_TENSOR]
        per_tensor += [v for v in returned if self.program.value(v).shape is Shape.PER_TENSOR]
        self.tensor_rounds.update(self.rounds[v] for v in per_tensor)

    def plan(self) -> list[Segment]:
        while True:
            with suppress(_Overwritten):
                return self._attempt()

    def _attempt(self) -> list[Segment]:
        self.slots = {}
        segments = [Segment(e, r) for r in range(self.last + 1) for e in (Shape.PER_TENSOR, Shape.PER_ELEMENT)]
        for parameter, value in self.program.stores.items():
            segments[self._store_time(parameter)].stores[parameter] = value
        for number, value in enumerate(self.program.outputs):
            segments[_time(self.rounds[value], self.program.value(value).shape)].outputs[number] = value
        # Later segments make earlier ones keep or reduce values, so plan from the last to the first.
        for segment in reversed(segments):
            self._fill(segments, segment)
        return [s for s in segments if s.writes]

    def _store_time(self, parameter: int) -> int:
        round_ = max(self.rounds[self.program.stores[parameter]], self.postponed.get(parameter, 0))
        return _time(round_, self.program.parameters[parameter].shape)

    def _fill(self, segments: list[Segment], segment: Segment) -> None:
        for wanted in [*segment.stores.values(), *segment.outputs.values(), *segment.keeps.values()]:
            self._obtain(segments, segment, wanted)
        for reduction in segment.reductions.values():
            instruction = self.program.value(reduction)
            assert isinstance(instruction, Instruction)
            for read in instruction.reads():
                self._obtain(segments, segment, read)
            segment.steps.append(reduction)

    def _obtain(self, segments: list[Segment], segment: Segment, index: int) -> None:
        """Make value `index` available in `segment`: from memory, from a slot, or by computing it."""
        if index in segment.steps:
            return
        value = self.program.value(index)
        home = self._home(index, segment)
        # Keep a value only if no memory holds it; one that is never stored may have no segment that can keep it.
        kept = self._kept_in(index, segment) if home is None else None
        if home is not None:
            segment.memory[index] = home
        elif kept is not None:
            slot = self.slots.setdefault(index, len(self.slots))
            segment.slots[index] = slot
            keeper = segments[kept]
            (keeper.keeps if keeper.shape is Shape.PER_TENSOR else keeper.reductions)[slot] = index
        elif isinstance(value, Instruction):
            for read in value.reads():
                self._obtain(segments, segment, read)
        elif _time(segment.round, value.shape) == _time(segment.round, segment.shape):
            self.postponed[index] = segment.round
            raise _Overwritten
        else:
            self.tensor_rounds.add(self._store_time(index) // 2)
            raise _Overwritten
        segment.steps.append(index)

    def _home(self, index: int, segment: Segment) -> int | None:
        """The parameter whose memory holds this value when `segment` reads it; None without one."""
        now = _time(segment.round, segment.shape)
        if index < len(self.program.parameters):
            return index if index not in self.program.stores or self._store_time(index) >= now else None
        shape = self.program.value(index).shape
        for parameter, value in self.program.stores.items():
            if value == index and self._store_time(parameter) < now:
                return parameter if self.program.parameters[parameter].shape is shape else None
        return None

    def _kept_in(self, index: int, segment: Segment) -> int | None:
        """The position of the earlier segment that keeps this number per tensor in a slot; None without one."""
        value = self.program.value(index)
        if value.shape is not Shape.PER_TENSOR:
            return None
        if isinstance(value, Instruction) and value.is_reduction:
            return _time(self.rounds[index] - 1, Shape.PER_ELEMENT)
        if segment.shape is Shape.PER_TENSOR:
            return None
        made = self.rounds[index] if isinstance(value, Instruction) else self._store_time(index) // 2
        return _time(made, Shape.PER_TENSOR) if made in self.tensor_rounds and made <= segment.round else None


def plan_segments(program: Program) -> list[Segment]:
    """The kernels of a program, in the order they run."""
    return _Planner(program).plan()


def slot_count(segments: Iterable[Segment]) -> int:
    """Return the number of slots per tensor that pass numbers between the segments."""
    return 1 + max((slot for s in segments for slot in (*s.keeps, *s.reductions)), default=-1)
