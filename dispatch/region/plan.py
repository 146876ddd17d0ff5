"""What one pass over the chunks computes: its ops in order, what it reads, and how many rows a chunk has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from subtensors.dispatch.region.axis import Axis, Layout
from subtensors.dispatch.region.graph import Cut, Node, Span, Value

BUDGET = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Bytes for a chunk's values where nothing was asked for."""

FEWEST_ROWS = 256
"""A chunk this short is still a good matrix product; memory alone makes it shorter."""


@dataclass
class Input:
    """A tensor that a pass reads: each chunk its part of it, or all of it.

    Args:
        value: the value.
        layout: which part a chunk reads; None for all.
    """

    value: Value
    layout: Layout | None


@dataclass
class Step:
    """One op of a pass, ready to be called.

    Args:
        node: the op.
        leaves: its arguments, flat, values and per-chunk arguments among them.
        spec: the nest they came from.
        last: places in `leaves` of values that no later step reads.
    """

    node: Node
    leaves: list[Any]
    spec: Any
    last: list[int] = field(default_factory=list)


class Plan:
    """One pass over the chunks of an axis, for some partial values.

    Args:
        outputs: the partials; all of one axis.
    """

    def __init__(self, outputs: Sequence[Value]) -> None:
        self.outputs = list(outputs)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.program: list[Any] | None = None
        """The steps with runs of them compiled, where that was asked for and the pass has run."""
        self._done: set[int] = set()
        for output in outputs:
            assert output.node is not None
            self._visit(output.node)
        node = self.outputs[0].node
        assert node is not None
        assert node.axis is not None
        self.axis: Axis = node.axis.root
        self._find_last_uses()
        self.spans: list[Span] = self.axis.spans(self._rows)

    def _visit(self, last: Node) -> None:
        # Depth first without recursion: a region may hold thousands of ops.
        stack: list[tuple[Node, bool]] = [(last, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in self._done:
                continue
            if ready:
                self._done.add(id(node))
                arguments: Any = (node.args, node.kwargs)
                leaves: list[Any]
                leaves, spec = optree.tree_flatten(arguments, none_is_leaf=True)
                self.steps.append(Step(node, [self._slot(x) for x in leaves], spec))
                continue
            stack.append((node, True))
            for x in node.operands():
                if isinstance(x, Value) and x.layout is not None and x.tensor is None and x.node is not None:
                    stack.append((x.node, False))

    def _slot(self, x: Any) -> Any:
        if isinstance(x, Cut):
            return self._input(x.value, x.layout)
        if isinstance(x, Value) and (x.layout is None or x.tensor is not None):
            return self._input(x, x.layout)
        return x

    def _input(self, value: Value, layout: Layout | None) -> Input:
        for known in self.inputs:
            same = known.value is value or (value.tensor is not None and known.value.tensor is value.tensor)
            if same and _same(known.layout, layout):
                return known
        self.inputs.append(Input(value, layout))
        return self.inputs[-1]

    def _find_last_uses(self) -> None:
        kept = {id(v) for v in self.outputs}
        seen: set[int] = set()
        for step in reversed(self.steps):
            for place, x in enumerate(step.leaves):
                if isinstance(x, Value) and id(x) not in seen and id(x) not in kept:
                    seen.add(id(x))
                    step.last.append(place)

    @property
    def grad(self) -> bool:
        """Does a gradient flow through any of its results?"""
        return any(v.needs_grad for v in self.outputs)

    @property
    def row_bytes(self) -> int:
        """Bytes that the results of all its ops take for one row."""
        total = 0
        for step in self.steps:
            views = isinstance(step.node.op, torch._ops.OpOverload) and step.node.op.is_view
            for value in step.node.outputs:
                if value.layout is not None and not views and step.node.name != "reshape":
                    total += value.meta.numel() * value.meta.element_size()
        return total // max(self.axis.size, 1)

    def _rows(self, limit: int | None) -> int:
        """How many rows of values, and where they are differentiated of their gradients, fit in some bytes."""
        row = max(self.row_bytes * (2 if self.grad else 1), 1)
        if limit is not None:
            return max(limit // row, 1)
        device = self.outputs[0].device
        budget = BUDGET.get(device.type, BUDGET["cpu"])
        if device.type == "cuda" and torch.cuda.is_available():
            budget = min(budget, torch.cuda.mem_get_info(device)[0] // 2)
        return max(budget // row, FEWEST_ROWS)

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
            parts.append(f"  {step.node.name} -> {', '.join(_described(v) for v in step.node.outputs)}")
        return "\n".join(parts)


def _same(a: Layout | None, b: Layout | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dim == b.dim and a.like(b)


def _described(value: Value) -> str:
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
