"""The executor whose traced program runs as torch ops, on pieces of memory of one size.

On a CPU an op takes longer to call than to run on a small tensor, and on a large one its result leaves the cache before
the next op reads it. So where every op of a program is element by element, small tensors are joined to one, and large
ones are cut:

    columns of n tensors --join--> one tensor a column --program--> --copy back--> tensors that are written
    columns of one large tensor --cut--> a piece of each at a time --program, in place-->

Numbers per tensor, such as step counts, stay 0-d: tensors with equal numbers are joined, as most of an optimizer are.
State never changes while its column lives, so its 1-D views are kept from call to call; state that lies side by side in
memory, as that of small parameters on a CPU does, is neither joined nor copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.fused.executors import Executor, Leaves, result_leaves
from subtensors.dispatch.fused.tensor_columns import Columns, TensorColumn, is_fixed, unique_tensors
from subtensors.dispatch.fused.trace import Trace
from subtensors.dispatch.torch_internals import memory
from subtensors.dispatch.torch_internals.ops import has_dispatch_mode
from subtensors.kernels.fused.program import Shape
from subtensors.kernels.fused.torch_codegen import write_torch

PIECE = 1 << 16
"""The most elements of a piece: a few values of so many fit into the cache of a core."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchExecutor(Executor):
    """The traced program, through torch's own ops."""

    trace: Trace

    def __init__(self, trace: Trace, columns: Columns, reason: str) -> None:
        self.trace, self.result_spec, self.reason = trace, trace.result_spec, reason
        self.run_element = write_torch(trace.program)
        parameters = trace.program.parameters
        self.sized = [i for i, p in enumerate(parameters) if p.shape is Shape.PER_ELEMENT]
        self.numbers = [i for i, p in enumerate(parameters) if p.shape is Shape.PER_TENSOR]
        self.sizes = [t.numel() for t in columns[self.sized[0]]] if self.sized else []
        self.contiguous = [i for i in self.sized if all(map(Tensor.is_contiguous, columns[i]))]
        self.in_views = [i for i in self.contiguous if i in trace.program.stores]
        """The columns that are joined and written by way of 1-D views."""
        self.joined = list(joined_parts(self.sizes)) if self._is_pointwise(columns) else []
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
    def _execute(self, columns: Columns, numbers: Sequence[float], *_: object) -> Leaves:
        """Run the program on every element."""
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
        values = [torch.cat(_flat(c, part)) if (one := _as_one(c, part)) is None else one for c in own]
        bits = [v.view(_BITS[v.itemsize]) for v in values]
        if all(bool((v == v[0]).all()) for v in bits):
            return [part]
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, key in zip(part, zip(*[v.tolist() for v in bits], strict=True), strict=True):
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
            found = {i: _as_one(columns[i], indices) for i in (*self.contiguous, *self.numbers)}
            ones = {i: one for i, one in found.items() if one is not None}
            views = {i: _flat(columns[i], indices) for i in self.in_views if i not in ones}
            for i in self.sized:
                if i in ones:
                    row[i] = ones[i]
                else:
                    row[i] = torch.cat(views[i]) if i in views else memory.join([columns[i][k] for k in indices])
            self.run_element(row, scalars, operands)
            sizes = [self.sizes[k] for k in indices]
            for i in stores:
                if i in views:
                    torch.split_with_sizes_copy(row[i], sizes, out=views[i])
                    continue
                tensors = [*columns[i]] if len(indices) == len(columns[i]) else [columns[i][k] for k in indices]
                if i not in ones:
                    results = memory.split(row[i], tensors) if i in self.sized else [row[i]] * len(indices)
                    torch._foreach_copy_(tensors, results)
                    continue
                if i in self.numbers:
                    ones[i][1:].copy_(row[i])
                torch.autograd.graph.increment_version(tensors)
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

    def describe(self) -> str:
        """Describe the executor in one line."""
        how = "an element, joined or cut" if self.joined else "an element"
        return f"{len(self.trace.program.instructions)} torch ops {how}{self.reason and ': ' + self.reason}"


def joined_parts(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Return neighbours of together at most `PIECE` elements; a larger tensor alone."""
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


def _as_one(column: Sequence[Tensor], indices: list[int]) -> Tensor | None:
    """The elements of a column as one 1-D view, where it promises to be fixed and they lie side by side."""
    return column.as_one(indices) if isinstance(column, TensorColumn) else None


def _flat(column: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    """1-D views of some tensors of a column, which are contiguous."""
    if isinstance(column, TensorColumn) and is_fixed(column):
        views = column.flat_views
        return views if len(views) == len(indices) else [views[i] for i in indices]
    return [t if t.ndim == 1 else t.view(-1) for t in map(column.__getitem__, indices)]


def scalar_operands(numbers: Sequence[float], device: torch.device) -> Sequence[float | Tensor]:
    """Dynamic scalars as operands in the place of tensors: on a CPU 0-d tensors, made once for all elements."""
    if device.type != "cpu":
        return numbers
    if all(isinstance(n, float) for n in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device).unbind()
    kinds = [torch.float64 if isinstance(n, float) else torch.int64 for n in numbers]
    return [torch.tensor(n, dtype=kind, device=device) for n, kind in zip(numbers, kinds, strict=True)]
