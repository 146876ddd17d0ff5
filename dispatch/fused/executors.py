"""Executors for the elements of one fused call: Triton kernels, torch op after op, or the function itself.

Each executor runs a group of elements that are alike (device, dtypes, which tensors are 0-d, memory layout) and answers
`run(columns, numbers)`, a column being one argument's tensors in the order of the elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import Addresses, Columns, written_overlap
from subtensors.dispatch.fused.trace import Returned, Trace
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.graphs.protocols import NotRecordable
from subtensors.kernels.fused.torch_codegen import operands, write_torch

Leaves = list[list[Any] | None]
"""For each leaf of the result, one value an element; None for a leaf that is None for all."""


class Executor(ABC):
    """Elements of one call that run in one way."""

    reason: str = ""
    """The reason not to run in a faster way; empty when there is none."""
    returned: optree.PyTreeSpec
    """The pytree of the function's result, known once the function has been traced or run."""

    @abstractmethod
    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None = None) -> Leaves:
        """Apply the function to every element."""

    @abstractmethod
    def describe(self) -> str:
        """Describe what runs, in a line or more."""

    def explain(self, columns: Columns) -> str:
        """Describe what runs on these tensors; where they overlap in memory, that may be another way."""
        return self.describe()


class EagerExecutor(Executor):
    """The user's function, called on one element after the other: the reference for every other executor."""

    def __init__(self, call: Callable[[list[Any], Sequence[float]], Any], reason: str) -> None:
        self.call, self.reason = call, reason

    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None = None) -> Leaves:
        """Call the function once an element."""
        if current_recording() is not None:
            raise NotRecordable(self.describe())
        results = [self.call(list(row), numbers) for row in zip(*columns, strict=True)]
        self.returned = optree.tree_structure(results[0], none_is_leaf=True)
        return [list(leaf) for leaf in zip(*map(self.returned.flatten_up_to, results), strict=True)]

    def describe(self) -> str:
        """One line."""
        return f"the function itself, element by element: {self.reason}"


class TorchExecutor(Executor):
    """The traced program, through torch's own ops."""

    def __init__(self, trace: Trace, mapped: EagerExecutor, reason: str) -> None:
        self.trace, self.mapped, self.reason = trace, mapped, reason
        self.returned = optree.tree_structure(trace.results, none_is_leaf=True)
        self.run_element = write_torch(trace.program)

    @torch.no_grad()
    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None = None) -> Leaves:
        """Run the program once an element."""
        if current_recording() is not None:
            raise NotRecordable(self.describe())
        if written_overlap(columns, self.trace.program.stores):
            return self.mapped.run(columns, numbers)
        scalars = [evaluate(numbers) for evaluate in self.trace.scalars]
        wrapped = operands(scalars, columns[0][0].device)
        rows = [self.run_element(row, scalars, wrapped) for row in zip(*columns, strict=True)]
        outputs = [list(column) for column in zip(*rows, strict=True)]
        return leaves_of(self.trace, columns, outputs)

    def explain(self, columns: Columns) -> str:
        """Describe what runs: the function itself where memory that is written overlaps."""
        overlaps = written_overlap(columns, self.trace.program.stores)
        return self.mapped.describe() if overlaps else self.describe()

    def describe(self) -> str:
        """One line."""
        return f"{len(self.trace.program.instructions)} torch ops an element{self.reason and ': ' + self.reason}"


def leaves_of(trace: Trace, columns: Columns, outputs: Sequence[Sequence[Tensor]]) -> Leaves:
    """The results of a traced function: for each leaf, the tensors of an output, or of the argument it returns."""

    def column(leaf: Returned | None) -> list[Any] | None:
        if leaf is None:
            return None
        return list(columns[leaf.index] if leaf.is_parameter else outputs[leaf.index])

    return [column(leaf) for leaf in optree.tree_leaves(trace.results, none_is_leaf=True)]
