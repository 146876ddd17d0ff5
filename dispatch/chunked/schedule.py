"""The schedule of one pass over the chunks: its ops in order, its inputs, and the rows of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from subtensors.dispatch.chunked.lazy_graph import LazyNode, LazyValue, RowSlice, Span
from subtensors.dispatch.chunked.row_layout import ChunkAxis, RowLayout

BUDGET = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Bytes for a chunk's values where nothing was asked for."""

FEWEST_ROWS = 256
"""A chunk this short is still a good matrix product; memory alone makes it shorter."""


@dataclass
class Input:
    """A tensor that a pass reads: each chunk its part of it, or all of it.

    Args:
        value: its description.
        layout: which part a chunk reads; None for all.
    """

    value: LazyValue
    layout: RowLayout | None


@dataclass
class ScheduledStep:
    """One op of a pass, ready to be called.

    Args:
        op: what is called.
        name: of it.
        grad: whether it is differentiated.
        rows: of which a chunk must have some to give a part.
        leaves: its arguments, flat, descriptions of values and per-chunk arguments among them.
        spec: the pytree they came from.
        outputs: descriptions of its results; None for a result that nobody reads.
        last: places in `leaves` of values that no later step reads.
    """

    op: Callable[..., Any]
    name: str
    grad: bool
    rows: RowLayout | None
    leaves: list[Any]
    spec: Any
    outputs: list[LazyValue | None]
    last: list[int] = field(default_factory=list)


class ChunkSchedule:
    """One pass over the chunks of an axis, for some partial values.

    Autograd keeps it alive as long as a result. So it holds descriptions of values; the values themselves, which hold
    tensors, are in `asked` and `reads` until `let_go`.

    Args:
        outputs: the partials; all of one axis.
    """

    def __init__(self, outputs: Sequence[LazyValue]) -> None:
        self.asked = list(outputs)
        self.reads: list[LazyValue] = []
        self._bare: dict[int, LazyValue] = {}
        self.outputs = [self._described(v) for v in outputs]
        self.inputs: list[Input] = []
        self.steps: list[ScheduledStep] = []
        self.program: list[Any] | None = None
        """The steps with runs of them compiled, where that was asked for and the pass has run."""
        self._done: set[int] = set()
        for output in outputs:
            assert output.node is not None
            self._visit(output.node)
        node = self.asked[0].node
        assert node is not None
        assert node.axis is not None
        self.axis: ChunkAxis = node.axis.root
        self._find_last_uses()
        self._bare.clear()
        self._done.clear()
        self.spans: list[Span] = self.axis.spans(self._rows, self._asked_rows())

    def let_go(self) -> None:
        """Drop the values, and with them the tensors that they keep alive."""
        self.asked, self.reads = [], []

    def _described(self, value: LazyValue) -> LazyValue:
        if id(value) not in self._bare:
            self._bare[id(value)] = value.bare()
        return self._bare[id(value)]

    def _visit(self, last: LazyNode) -> None:
        # Depth first without recursion: a region may hold thousands of ops.
        stack: list[tuple[LazyNode, bool]] = [(last, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in self._done:
                continue
            if ready:
                self._done.add(id(node))
                arguments: Any = (node.args, node.kwargs)
                leaves: list[Any]
                leaves, spec = optree.tree_flatten(arguments, none_is_leaf=True)
                slots = [self._slot(x) for x in leaves]
                made = [None if v is None else self._described(v) for v in node.outputs]
                self.steps.append(ScheduledStep(node.op, node.name, node.grad, node.rows, slots, spec, made))
                continue
            stack.append((node, True))
            for x in node.operands():
                if isinstance(x, LazyValue) and x.layout is not None and x.tensor is None and x.node is not None:
                    stack.append((x.node, False))

    def _slot(self, x: Any) -> Any:
        if isinstance(x, RowSlice):
            return self._input(x.value, x.layout)
        if isinstance(x, LazyValue) and (x.layout is None or x.tensor is not None):
            return self._input(x, x.layout)
        return self._described(x) if isinstance(x, LazyValue) else x

    def _input(self, value: LazyValue, layout: RowLayout | None) -> Input:
        for known, read in zip(self.inputs, self.reads, strict=True):
            same = read is value or (value.tensor is not None and read.tensor is value.tensor)
            if same and _same(known.layout, layout):
                return known
        self.reads.append(value)
        self.inputs.append(Input(self._described(value), layout))
        return self.inputs[-1]

    def _find_last_uses(self) -> None:
        kept = {id(v) for v in self.outputs}
        seen: set[int] = set()
        for step in reversed(self.steps):
            for place, x in enumerate(step.leaves):
                if isinstance(x, LazyValue) and id(x) not in seen and id(x) not in kept:
                    seen.add(id(x))
                    step.last.append(place)

    @property
    def grad(self) -> bool:
        """Return whether any of its results requires grad."""
        return any(v.needs_grad for v in self.outputs)

    @property
    def row_bytes(self) -> int:
        """Bytes that the results of all its ops take for one row."""
        total = 0
        for step in self.steps:
            views = isinstance(step.op, torch._ops.OpOverload) and step.op.is_view
            for value in step.outputs:
                if value is not None and value.layout is not None and not views and step.name != "reshape":
                    total += value.meta.numel() * value.meta.element_size()
        return total // max(self.axis.size, 1)

    def _rows(self, limit: int | None) -> int:
        """The number of rows whose values, and gradients if any, fit in `limit` bytes (None: in a default budget)."""
        row = max(self.row_bytes * (2 if self.grad else 1), 1)
        if limit is not None:
            return max(limit // row, 1)
        device = self.outputs[0].device
        budget = BUDGET.get(device.type, BUDGET["cpu"])
        if device.type == "cuda" and torch.cuda.is_available():
            budget = min(budget, torch.cuda.mem_get_info(device)[0] // 2)
        return max(budget // row, FEWEST_ROWS)

    def _asked_rows(self) -> Span:
        """The rows that the results depend on: those that slices left."""
        spans = []
        for value in self.asked:
            assert value.node is not None
            layouts = [x.layout for x in value.node.operands() if x.layout is not None]
            spans += [layout.rows for layout in layouts] or [(0, self.axis.size)]
        return min(first for first, _ in spans), max(behind for _, behind in spans)

    def describe(self) -> str:
        """The pass in lines: chunks, bytes, reads and ops."""
        rows = self.spans[0][1] - self.spans[0][0]
        chunk = rows * self.row_bytes * (2 if self.grad else 1)
        parts = [f"{len(self.spans)} chunks of {rows} of {self.axis.size} rows, {in_bytes(chunk)} a chunk"]
        for read in self.inputs:
            how = "whole" if read.layout is None else "by rows"
            sums = ", its gradient summed" if read.layout is None and read.value.needs_grad else ""
            parts.append(f"  reads {how} {_described(read.value)}{sums}")
        for step in self.steps:
            parts.append(f"  {step.name} -> {', '.join(_described(v) for v in step.outputs if v is not None)}")
        return "\n".join(parts)


def _same(a: RowLayout | None, b: RowLayout | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dim == b.dim and a.like(b)


def _described(value: LazyValue) -> str:
    joined = "" if value.join is None else f" ({value.join.value} over chunks)"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{joined}"


def in_bytes(count: int) -> str:
    """A number of bytes, for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
