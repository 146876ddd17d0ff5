"""The plan of a fused call: the way in which each element runs, and guards for the later calls that it fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from subtensors.dispatch.fused.executors import EagerExecutor, Executor, Leaves, TorchExecutor
from subtensors.dispatch.fused.tensor_columns import (
    Addresses,
    BroadcastColumn,
    ColumnGuard,
    Columns,
    addresses_of,
    written_overlap,
)
from subtensors.dispatch.fused.triton_executor import TritonExecutor
from subtensors.kernels.fused.compilation import compile_together

logger = logging.getLogger("subtensors.fused")


@dataclass
class ExecutionPlan:
    """The groups of one call, good for every later call whose tensors are alike."""

    guards: list[ColumnGuard]
    groups: list[tuple[list[int], Executor]]
    """The indices of the elements of each group, and their executor."""
    mapped: EagerExecutor
    """The executor that runs instead, element by element, when several groups share memory that is written."""
    is_compiled: bool = False
    """True once its kernels were compiled."""

    def __post_init__(self) -> None:
        traces = [group.trace for _, group in self.groups if isinstance(group, TorchExecutor | TritonExecutor)]
        # Where a group runs the function itself, the tensors that it writes are not known.
        is_known = len(self.groups) == len(traces) > 1
        self._written = {parameter for trace in traces for parameter in trace.program.stores} if is_known else set()
        self._compared: tuple[list[int], bool] = [], False

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
            compile_together([group.grid for _, group in self.groups if isinstance(group, TritonExecutor)])

    def groups_overlap(self, columns: Columns) -> bool:
        """Return whether a group writes memory of another one, or an element that of another."""
        if not self._written:
            return False
        addresses = [a for column in columns for a in addresses_of(column)]
        if addresses != self._compared[0]:
            self._compared = addresses, written_overlap(columns, self._written)
            if self._compared[1]:
                logger.info("runs as %s", self.mapped.describe())
        return self._compared[1]

    def run_groups(self, columns: Columns, numbers: Sequence[float]) -> Leaves:
        """Run one group after the other; their results in the order of all elements."""
        parts = [(indices, group.run(select_rows(columns, indices), numbers)) for indices, group in self.groups]
        merged: Leaves = [None if leaf is None else [None] * len(columns[0]) for leaf in parts[0][1]]
        for indices, leaves in parts:
            for whole, leaf in zip(merged, leaves, strict=True):
                if whole is not None and leaf is not None:
                    for index, value in zip(indices, leaf, strict=True):
                        whole[index] = value
        return merged


def select_rows(columns: Columns, indices: list[int]) -> Columns:
    """The columns of some elements."""
    return [
        BroadcastColumn(c[: len(indices)]) if isinstance(c, BroadcastColumn) else [c[i] for i in indices]
        for c in columns
    ]
