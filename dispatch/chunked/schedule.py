"""The schedule of one pass over the chunks: its ops in order, its inputs, and the rows of a chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import optree
import torch
from optree import PyTreeSpec
from torch import Tensor

from subtensors.dispatch.chunked.affine import JOINTLY_LINEAR
from subtensors.dispatch.chunked.lazy_graph import (
    CHUNK_INDEPENDENT_VIEWS,
    LazyValue,
    RowSlice,
    Span,
    computation,
    identity,
)
from subtensors.dispatch.chunked.row_layout import ChunkAxis, RowLayout, check_limit
from subtensors.dispatch.ops.tree import PyTree, tree_find
from subtensors.kernels.cross_entropy.compensated_sum import PIECE_BYTES
from subtensors.kernels.cross_entropy.logits_block import REFERENCE_SHARE, reference_bytes

DEFAULT_CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
"""The bytes for a chunk's values where the user set no limit."""

COMPENSATED_SIZE = 4
"""The largest element, in bytes, whose exact sum over chunks takes two more bytes."""

MIN_ROWS = 256
"""The fewest rows of a chunk without a limit: still an efficient matrix product."""


@dataclass
class Input:
    """A tensor that a pass reads: each chunk its part of it, or all of it.

    Args:
        value: its description.
        layout: the layout by which each chunk reads its own rows; None where it reads all.
        rides: whether only results without a gradient depend on it: backward doesn't read it.
        has_gradient: whether a gradient comes back to it.
    """

    value: LazyValue
    layout: RowLayout | None
    rides: bool = True
    has_gradient: bool = False


@dataclass
class ScheduledStep:
    """One op of a pass, or several that were compiled, ready to be called.

    Args:
        op: the function that is called.
        name: its name.
        grad: whether it is differentiated.
        rows: the layout of rows without which a chunk has no part; None: every chunk has one.
        leaves: its arguments, flat, with descriptions of values and per-chunk arguments.
        spec: the pytree of the arguments.
        outputs: descriptions of its results; None for a result that no op reads.
        last_uses: values that no later step reads.
        without_value: whether no gradient reads its results: they are results of the pass, or go into sums of those.
        rides: whether only results without a gradient depend on it.
    """

    op: Callable[..., PyTree]
    name: str
    grad: bool
    rows: RowLayout | None
    leaves: list[PyTree]
    spec: PyTreeSpec
    outputs: list[LazyValue | None]
    last_uses: list[LazyValue] = field(default_factory=list)
    without_value: bool = False
    rides: bool = True


class ChunkSchedule:
    """One pass over the chunks of an axis, for some partial values.

    Autograd keeps it alive as long as a result. So it holds descriptions of values; the values themselves, which hold
    tensors, are in `requested` and `reads` until `release_values`.

    Args:
        outputs: the partials, all of one axis.
        rides: more of them, which are computed with the others, and not differentiated.
    """

    def __init__(self, outputs: Sequence[LazyValue], rides: Sequence[LazyValue] = ()) -> None:
        self.requested = [*outputs, *rides]
        self.differentiated = [value.needs_grad for value in outputs] + [False] * len(rides)
        """For each result, whether it has a gradient."""
        self.reads: list[LazyValue] = []
        self._descriptions: dict[int, LazyValue] = {}
        self.outputs = [self._description(v) for v in self.requested]
        self.inputs: list[Input] = []
        self.steps: list[ScheduledStep] = []
        self.program: Sequence[ScheduledStep] | None = None
        """The steps with runs of them compiled, once the pass has run, where the policy says so."""
        self._schedule_ops()
        self.axis = axis_of(self.requested[0])
        self._find_last_uses()
        self._find_unread()
        self._descriptions.clear()
        self._window = self._requested_rows()

    @functools.cached_property
    def spans(self) -> list[Span]:
        """The chunks. Raises LimitError where the rows of one take more than the limit."""
        return self.axis.spans(self._rows, self._window)

    def release_values(self) -> None:
        """Release the values, and with them the tensors that they keep alive."""
        self.requested, self.reads = [], []

    def _description(self, value: LazyValue) -> LazyValue:
        if id(value) not in self._descriptions:
            self._descriptions[id(value)] = value.description()
        return self._descriptions[id(value)]

    def _schedule_ops(self) -> None:
        results = {*self.requested}
        values = computation([*reversed(self.requested)], lambda v: v.layout is None and v not in results)
        nodes = (v.node for v in values if v.node is not None and (v.layout is not None or v in results))
        for node in dict.fromkeys(nodes):
            call: PyTree = (node.args, node.kwargs)
            leaves, spec = optree.tree_flatten(call, none_is_leaf=True)
            operands = [self._operand(x) for x in leaves]
            outputs = [None if v is None else self._description(v) for v in node.outputs]
            self.steps.append(ScheduledStep(node.op, node.name, node.grad, node.rows, operands, spec, outputs))

    def _operand(self, x: PyTree) -> PyTree:
        if isinstance(x, RowSlice):
            return self._input(x.value, x.layout)
        if isinstance(x, LazyValue) and (x.layout is None or x.tensor is not None):
            return self._input(x, x.layout)
        return self._description(x) if isinstance(x, LazyValue) else x

    def _input(self, value: LazyValue, layout: RowLayout | None) -> Input:
        for known, read in zip(self.inputs, self.reads, strict=True):
            same = read is value or (value.tensor is not None and read.tensor is value.tensor)
            if same and (known.layout is layout or (layout is not None and layout.aligns_with(known.layout))):
                return known
        self.reads.append(value)
        self.inputs.append(Input(self._description(value), layout))
        return self.inputs[-1]

    def _find_last_uses(self) -> None:
        outputs = {id(v) for v in self.outputs}
        seen: set[int] = set()
        for step in reversed(self.steps):
            for x in step.leaves:
                if isinstance(x, LazyValue) and id(x) not in seen and id(x) not in outputs:
                    seen.add(id(x))
                    step.last_uses.append(x)

    def _find_unread(self) -> None:
        read: set[int] = set()
        differentiated = {
            id(v) for v, has_gradient in zip(self.outputs, self.differentiated, strict=True) if has_gradient
        }
        reached = {*differentiated}  # by gradients
        for step in reversed(self.steps):
            step.rides = not any(v is not None and id(v) in differentiated for v in step.outputs)
            if not step.rides:
                differentiated.update(id(x) for x in step.leaves if isinstance(x, LazyValue))
            step.without_value = not any(v is not None and id(v) in read for v in step.outputs)
            if step.rides:
                continue
            is_reached = step.grad and any(id(v) in reached for v in step.outputs if v is not None)
            for x in step.leaves:
                if isinstance(x, Input):
                    x.rides = False
                    x.has_gradient |= is_reached and x.value.needs_grad
                elif isinstance(x, LazyValue) and is_reached and x.needs_grad:
                    reached.add(id(x))
            if not step.without_value or _gradient_reads_operands(step):
                read.update(id(x) for x in step.leaves if isinstance(x, LazyValue))

    def differentiated_reads(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the inputs that backward reads, with None for others: a write to these is no concern of it."""
        return [None if read.rides else tensor for read, tensor in zip(self.inputs, tensors, strict=True)]

    @property
    def grad(self) -> bool:
        """Return whether any of its results requires grad."""
        return any(self.differentiated)

    @property
    def row_bytes(self) -> int:
        """Bytes that the results of all its ops take for one row."""
        total = 0
        for step in self.steps:
            views = isinstance(step.op, torch._ops.OpOverload) and step.op.is_view
            for value in step.outputs:
                if value is not None and value.layout is not None and not views and step.name != "reshape":
                    total += _bytes(value)
        return total // max(self.axis.size, 1)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that results and gradients take, whatever the size of a chunk."""
        total, piece = sum(map(_bytes, self.outputs)), 0
        for read in self.inputs:
            if not read.has_gradient:
                continue
            size = read.value.meta.element_size()
            is_compensated = read.layout is None and self.axis.policy.exact and size <= COMPENSATED_SIZE
            total += read.value.meta.numel() * (size + 2 * is_compensated)
            if is_compensated and size == COMPENSATED_SIZE:  # a product that is added to the sum
                piece = max(piece, min(PIECE_BYTES, _bytes(read.value)))
        return total + piece + self._one_row_temporaries()

    @property
    def _chunk_row_bytes(self) -> int:
        """Bytes that a row of a chunk takes, with its gradients if any, and with temporaries of the reference."""
        found, rows = self._kernel_operands(), max(self.axis.size, 1)
        total = self.row_bytes * (2 if self.grad else 1)
        if self.grad and len({id(logits) for logits in found}) < len(found):  # several gradients of the same logits
            total += max(_bytes(logits) for logits in found) // rows
        return max(total + self._one_row_temporaries() // REFERENCE_SHARE, 1)

    def _kernel_operands(self) -> list[LazyValue]:
        """Return the logits that kernels of rows read, one for each call."""
        first = [step.leaves[0] for step in self.steps if step.name in _KERNELS_OF_ROWS]
        return [logits.value if isinstance(logits, Input) else logits for logits in first]

    def _one_row_temporaries(self) -> int:
        """Return the bytes that the reference of these kernels takes for one row; 0 where they run themselves."""
        found = [v for v in self._kernel_operands() if v.device.type != "cuda" or v.dtype is torch.float64]
        sizes = (reference_bytes(1, v.meta.numel() // max(self.axis.size, 1), v.dtype.itemsize) for v in found)
        return max(sizes, default=0)

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that the pass takes: those of chunks of a row."""
        return self.fixed_bytes + self._chunk_row_bytes

    def _rows(self, limit: int | None) -> int:
        """Return the rows whose values, and gradients if any, fit in `limit` bytes (None: in a default budget)."""
        row = self._chunk_row_bytes
        if limit is not None:
            advice = f", chunk a dim of more than {self.axis.size} rows (st.chunk(x, dim))"
            check_limit(limit, self.least_bytes, advice)
            return _whole_tiles((limit - self.fixed_bytes) // row)
        device = self.outputs[0].device
        budget = DEFAULT_CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES["cpu"])
        if device.type == "cuda" and torch.cuda.is_available():
            budget = min(budget, torch.cuda.mem_get_info(device)[0] // 2)
        return _whole_tiles(max(budget // row, MIN_ROWS))

    def _requested_rows(self) -> Span:
        """Return the rows that the results depend on: those that are left by slices."""
        spans: list[Span] = []
        for value in self.requested:
            assert value.node is not None
            operands = tree_find((LazyValue, RowSlice), (value.node.args, value.node.kwargs))
            layouts = [x.layout for x in operands if x.layout is not None]
            spans += [layout.rows for layout in layouts] or [(0, self.axis.size)]
        return min(start for start, _ in spans), max(stop for _, stop in spans)

    def describe(self) -> str:
        """Describe the pass in lines: chunks, bytes, inputs and ops."""
        rows = self.spans[0][1] - self.spans[0][0]
        chunk = rows * self.row_bytes * (2 if self.grad else 1)
        chunks = "1 chunk" if len(self.spans) == 1 else f"{len(self.spans)} chunks"
        parts = [f"{chunks} of {rows} of {self.axis.size} rows, {in_bytes(chunk)} a chunk"]
        for read in self.inputs:
            how = "in full" if read.layout is None else "by rows"
            sums = ", its gradient summed" if read.layout is None and read.has_gradient else ""
            parts.append(f"  reads {how} {_described(read.value)}{sums}")
        for step in self.steps:
            parts.append(f"  {step.name} -> {', '.join(_described(v) for v in step.outputs if v is not None)}")
        return "\n".join(parts)


_KERNELS_OF_ROWS = ("cross_entropy", "row_statistics")
"""Ops whose results are a few numbers a row, and whose gradient is as large as the logits that they read."""


def axis_of(partial: LazyValue) -> ChunkAxis:
    """Return the axis of the pass that computes a partial."""
    assert partial.node is not None
    assert partial.node.axis is not None
    return partial.node.axis.root


def _bytes(value: LazyValue) -> int:
    return value.meta.numel() * value.meta.element_size()


def _gradient_reads_operands(step: ScheduledStep) -> bool:
    packet = getattr(step.op, "overloadpacket", None)
    is_sum = packet in JOINTLY_LINEAR and packet is not torch.ops.aten.div  # whose divisor has a gradient of both
    return not is_sum and step.op is not identity and step.name not in CHUNK_INDEPENDENT_VIEWS


def _whole_tiles(rows: int) -> int:
    """Return a number of rows, cut to a multiple of what the tiles of a matrix product take where there are as many."""
    return rows // MIN_ROWS * MIN_ROWS or rows


def _described(value: LazyValue) -> str:
    combined = "" if value.combine is None else f" ({value.combine.value} over chunks)"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{combined}"


def in_bytes(count: int) -> str:
    """Format a number of bytes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
