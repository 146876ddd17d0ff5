"""The executor whose traced program runs as torch ops, on pieces of memory of one size.

On a CPU an op takes longer to call than to run on a small tensor, and on a large one its result leaves the cache before
the next op reads it. So where every op of a program is element by element, small tensors are joined to one, and large
ones are cut:

    columns of n tensors --join--> one tensor a column --program--> --copy back--> tensors that are written
    columns of one large tensor --cut--> a piece of each at a time --program, in place-->

Numbers per tensor, such as step counts, stay 0-d: tensors with equal numbers are joined, as most of an optimizer are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.executors import EagerExecutor, Executor, Leaves, result_leaves
from subtensors.dispatch.fused.tensor_columns import Addresses, Columns, unique_tensors, written_overlap
from subtensors.dispatch.fused.trace import Trace
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable
from subtensors.dispatch.graphs.fused_graph import current_recording
from subtensors.dispatch.torch_internals import memory
from subtensors.dispatch.torch_internals.ops import has_dispatch_mode
from subtensors.kernels.fused.launch import Prelude
from subtensors.kernels.fused.program import Shape
from subtensors.kernels.fused.torch_codegen import write_torch

PIECE = 1 << 16
"""The most elements of a piece: a few values of so many fit into the cache of a core."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchExecutor(Executor):
    """The traced program, through torch's own ops."""

    trace: Trace

    def __init__(self, trace: Trace, columns: Columns, fallback: EagerExecutor, reason: str) -> None:
        self.trace, self.fallback, self.reason = trace, fallback, reason
        self.result_spec = optree.tree_structure(trace.results, none_is_leaf=True)
        self.run_element = write_torch(trace.program)
        parameters = trace.program.parameters
        self.sized = [i for i, p in enumerate(parameters) if p.shape is Shape.PER_ELEMENT]
        self.numbers = [i for i, p in enumerate(parameters) if p.shape is Shape.PER_TENSOR]
        sizes = [t.numel() for t in columns[self.sized[0]]] if self.sized else []
        self.joined = list(_joined(sizes)) if self._is_pointwise(columns) else []
        """The elements that are joined or cut, part by part; empty where each runs alone."""

    def _is_pointwise(self, columns: Columns) -> bool:
        """Return whether the program may run on pieces of CPU tensors, or on several as one."""
        program = self.trace.program
        return (
            bool(self.sized)
            and columns[self.sized[0]][0].device.type == "cpu"
            and not program.outputs
            and not any(s.is_reduction or s.name in ("numel", "stochastic_round") for s in program.instructions)
            and all(p.shape is not Shape.PER_BLOCK and not p.expanded for p in program.parameters)
            and all(program.parameters[i].dtype.itemsize in _BITS for i in self.numbers)
        )

    @torch.no_grad()
    def run(
        self,
        columns: Columns,
        numbers: Sequence[float],
        addresses: Addresses | None = None,
        prelude: Prelude | None = None,
    ) -> Leaves:
        """Run the program on every element."""
        if prelude is not None:
            prelude.launch()
        if current_recording() is not None:
            raise NotRecordable(self.describe())
        if written_overlap(columns, self.trace.program.stores):
            return self.fallback.run(columns, numbers)
        scalars = [evaluate(numbers) for evaluate in self.trace.scalars]
        operands = scalar_operands(scalars, columns[0][0].device)
        # In a dispatch mode torch counts no writes by foreach ops, and one that stands for a capture can't be read in.
        if self.joined and not has_dispatch_mode():
            for part in self.joined:
                for indices in self._alike(columns, part):
                    self._run_joined(columns, indices, scalars, operands)
            return result_leaves(self.trace, columns, [])
        rows = [self.run_element(row, scalars, operands) for row in zip(*columns, strict=True)]
        outputs = [list(column) for column in zip(*rows, strict=True)]
        return result_leaves(self.trace, columns, outputs)

    def _alike(self, columns: Columns, part: list[int]) -> list[list[int]]:
        """Split elements into those with the same numbers per tensor, bit by bit."""
        own = [columns[i] for i in self.numbers if len(unique_tensors(columns[i])) > 1]
        if len(part) == 1 or not own:
            return [part]
        values = [torch.stack([c[i] for i in part]) for c in own]
        bits = [v.view(_BITS[v.itemsize]).tolist() for v in values]
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, key in zip(part, zip(*bits, strict=True), strict=True):
            alike.setdefault(key, []).append(index)
        return list(alike.values())

    def _run_joined(
        self,
        columns: Columns,
        indices: list[int],
        scalars: Sequence[float],
        operands: Sequence[float | Tensor],
    ) -> None:
        """Run the program on elements that have the same numbers per tensor."""
        row = [column[indices[0]] for column in columns]
        stores = self.trace.program.stores
        if len(indices) > 1:
            tensors = [[column[i] for i in indices] for column in columns]
            for i in self.sized:
                row[i] = memory.join(tensors[i])
            self.run_element(row, scalars, operands)
            for i in stores:
                if i in self.sized:
                    torch._foreach_copy_(tensors[i], memory.split(row[i], tensors[i]))
                else:
                    torch._foreach_copy_(tensors[i][1:], [row[i]] * (len(indices) - 1))
            return
        size = row[self.sized[0]].numel()
        piece = PIECE * torch.get_num_threads()
        if size <= piece or not all(row[i].is_contiguous() for i in self.sized):
            self.run_element(row, scalars, operands)
            return
        kept = {i: row[i].clone() for i in self.numbers if i in stores}
        pieces = zip(*[row[i].view(-1).split(piece) for i in self.sized], strict=True)
        for parts in pieces:
            for i, t in zip(self.sized, parts, strict=True):
                row[i] = t
            for i, t in kept.items():  # each piece starts from the old number
                row[i] = t.clone()
            self.run_element(row, scalars, operands)
        for i in kept:
            columns[i][indices[0]].copy_(row[i])

    def explain(self, columns: Columns) -> str:
        """Describe what runs: the function itself where memory that is written overlaps."""
        overlaps = written_overlap(columns, self.trace.program.stores)
        return self.fallback.describe() if overlaps else self.describe()

    def describe(self) -> str:
        """Describe the executor in one line."""
        how = "an element, joined or cut" if self.joined else "an element"
        return f"{len(self.trace.program.instructions)} torch ops {how}{self.reason and ': ' + self.reason}"


def _joined(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours of together at most `PIECE` elements; a larger tensor alone."""
    part: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if part and total + size > PIECE:
            yield part
            part, total = [], 0
        part.append(index)
        total += size
    if part:
        yield part


def scalar_operands(numbers: Sequence[float], device: torch.device) -> Sequence[float | Tensor]:
    """Dynamic scalars as operands in the place of tensors: on a CPU 0-d tensors, made once for all elements."""
    if device.type != "cpu":
        return numbers
    kinds = [torch.float64 if isinstance(n, float) else torch.int64 for n in numbers]
    return [torch.tensor(n, dtype=kind, device=device) for n, kind in zip(numbers, kinds, strict=True)]
