"""The plan of a fused call, and the executors of its groups: Triton kernels, torch op after op, or the function itself.

Each executor runs a group of elements that are alike (device, dtypes, which tensors are 0-d, memory layout) and answers
`run(columns, numbers)`, a column being one argument's tensors in the order of the elements. What precedes every run is
in `Executor.run`; what runs is `_execute`. Triton kernels are in `triton_executor`, torch ops in `torch_executor`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import Addresses, BroadcastColumn, ColumnGuard, Columns, WrittenOverlap
from subtensors.dispatch.fused.trace import Trace
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable
from subtensors.dispatch.graphs.fused_graph import Recording, current_recording
from subtensors.dispatch.graphs.released_tensors import Release, check_resident
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.fused.launch import Grid, compile_together

logger = logging.getLogger("subtensors.fused")

Leaves = list[list[PyTree] | None]
"""For each leaf of the result, one value an element; None for a leaf that is None for all."""


class Executor:
    """Elements of one call that run in one way."""

    reason: str = ""
    """The reason not to run in a faster way; empty when there is none."""
    note: str = ""
    """A line to log once it has run: an error of the user's comes without it."""
    result_spec: optree.PyTreeSpec
    """The structure of the function's result, known once the function has been traced or run."""
    trace: Trace | None = None
    """The traced program; None where the function itself runs."""
    grid: Grid | None = None
    """The tiles that Triton kernels sweep over; None where none run."""

    device = torch.device("cpu")
    """The device whose kernels run."""

    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None = None) -> Leaves:
        """Apply the function to every element; in a recording, record that.

        Raises:
            AddressError: a tensor is released.
            NotRecordable: a recording takes launches of kernels, and this is none.
        """
        if not self.is_on_current_device():
            with torch.cuda.device(self.device):
                return self.run(columns, numbers, addresses)
        if Release.count:
            check_resident(columns)
        if (recording := current_recording()) is not None:
            return self._record(recording, columns, numbers)
        return self._execute(columns, numbers, addresses)

    def log_note(self) -> None:
        """Log the note, and drop it."""
        if self.note:
            logger.info("%s", self.note)
            self.note = ""

    def is_on_current_device(self) -> bool:
        """Return whether the executor can run without a change of device."""
        return True

    def _record(self, recording: Recording, columns: Columns, numbers: Sequence[float]) -> Leaves:
        """Give the launch to a recording."""
        raise NotRecordable(self.describe())

    def _execute(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None, /) -> Leaves:
        """Apply the function to every element, on the current device."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe what runs, in a line or more."""
        raise NotImplementedError

    def explain(self, columns: Columns) -> str:
        """Describe what runs on these tensors."""
        return self.describe()


class EagerExecutor(Executor):
    """The user's function, called on one element after the other: the reference for every other executor."""

    def __init__(self, call: Callable[[Sequence[Tensor], Sequence[float]], PyTree], reason: str) -> None:
        self.call, self.reason = call, reason

    def _execute(self, columns: Columns, numbers: Sequence[float], *_: object) -> Leaves:
        """Call the function once an element."""
        results = [self.call(list(row), numbers) for row in zip(*columns, strict=True)]
        self.result_spec = optree.tree_structure(results[0], none_is_leaf=True)
        return [list(leaf) for leaf in zip(*map(self.result_spec.flatten_up_to, results), strict=True)]

    def describe(self) -> str:
        """Describe the executor in one line."""
        return f"the function itself, element by element: {self.reason}"


def result_leaves(trace: Trace, columns: Columns, outputs: Sequence[Sequence[Tensor]]) -> Leaves:
    """The results of a traced function: for each leaf, the tensors of an output, or of the argument it returns."""
    return [
        None if leaf is None else list((columns if leaf.is_parameter else outputs)[leaf.index])
        for leaf in trace.results
    ]


@dataclass
class ExecutionPlan:
    """The groups of one call, good for every later call whose tensors are alike."""

    guards: list[ColumnGuard]
    groups: list[tuple[list[int], Executor]]
    """The indices of the elements of each group, and their executor."""
    fallback: EagerExecutor
    """The executor that runs instead, element by element, where memory that is written overlaps other memory."""
    strided: list[int]
    """The indices of the elements that are plain strided tensors, whose memory is known."""
    is_compiled: bool = False
    """True once its kernels were compiled."""

    def __post_init__(self) -> None:
        self.executor = self.groups[0][1] if len(self.groups) == 1 else None
        """The executor of all elements; None where there are several groups or no elements."""
        traces = [executor.trace for _, executor in self.groups if executor.trace is not None]
        written = {parameter for trace in traces for parameter in trace.program.stores}
        if len(traces) < len(self.groups):
            # Where the function itself runs, it may write any; alone it is the fallback.
            written = {*range(len(self.guards))} if len(self.groups) > 1 else set()
        self.overlap = WrittenOverlap(written)
        """The check whether the fallback is to run; `overlaps` where there are several groups."""

    def match(self, columns: Columns) -> Addresses | None:
        """The addresses of these columns, as far as the check read them; None when the plan does not fit."""
        addresses: Addresses = []
        for guard, column in zip(self.guards, columns, strict=True):
            if not guard.matches(column, addresses):
                return None
        return addresses

    def compile(self) -> None:
        """Compile the kernels of all groups at once, the first time."""
        if not self.is_compiled:
            self.is_compiled = True
            compile_together([executor.grid for _, executor in self.groups if executor.grid is not None])

    def overlaps(self, columns: Columns) -> bool:
        """Return whether an element that is written overlaps another one, of any group, or another argument."""
        strided = self.strided
        return self.overlap.check(columns if len(strided) == len(columns[0]) else select_rows(columns, strided))

    def run_groups(self, columns: Columns, numbers: Sequence[float]) -> Leaves:
        """Run one group after the other; their results in the order of all elements."""
        parts = [(indices, executor.run(select_rows(columns, indices), numbers)) for indices, executor in self.groups]
        specs = [executor.result_spec for _, executor in self.groups]
        if different := next((spec for spec in specs if spec != specs[0]), None):
            raise ValueError(f"a fused function returns {specs[0]} for some elements, and {different} for others")
        merged: list[list[PyTree]] = [[None] * len(columns[0]) for _ in parts[0][1]]
        for indices, leaves in parts:
            for all_values, leaf in zip(merged, leaves, strict=True):
                for index, value in zip(indices, leaf or [None] * len(indices), strict=True):
                    all_values[index] = value
        return [*merged]


def select_rows(columns: Columns, indices: list[int]) -> Columns:
    """The columns of some elements."""
    return [
        BroadcastColumn(c[: len(indices)]) if isinstance(c, BroadcastColumn) else [c[i] for i in indices]
        for c in columns
    ]
