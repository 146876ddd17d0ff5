"""Random numbers: drawn when they are recorded, or chunk by chunk from a seed where they are too large for that.

For a tensor no larger than the one that was chunked, they are drawn at once: the numbers that the unchunked program
draws from the same generator. Larger ones can't be in memory in full: the generator then gives a seed, and each block
of rows is drawn from the seed plus its first row. Chunks begin where blocks do. So every pass that reads the numbers
draws the same, whatever the length of its chunks, and so does a chunk that is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, Span, constant, emit, largest
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record, sliced
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten

# Ops whose numbers depend only on the sizes of their operand, not on its values.
_OF_SIZES = frozenset(
    """bernoulli.p uniform.default normal_functional.default exponential.default geometric.default cauchy.default
    log_normal.default rand_like.default randn_like.default randint_like.default randint_like.low_dtype
    random.default random.from random.to""".split()
)


@RULES.register(OpClass.RANDOM)
def random(call: ChunkedCall) -> PyTree:
    """Draw numbers of the sizes of the first operand."""
    value: LazyValue = largest(call.chunked) if call.chunked else call.values[0]
    layout, meta = value.layout, call.infer()
    if not isinstance(meta, Tensor) or meta.shape != value.shape or any(v.shape != value.shape for v in call.values):
        raise call.unchunkable("its numbers have other sizes than its operand")
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _draw_by_seed(call, layout, lambda v: sliced(v, layout), meta, [layout])
    if str(call.op).removeprefix("aten.") not in _OF_SIZES:
        raise call.unchunkable("its numbers depend on values")
    stand_in = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    args, kwargs = call.with_values(lambda v: stand_in)
    return constant(call.op(*args, **kwargs))


@RULES.register(aten.native_dropout)
def dropout(call: ChunkedCall) -> PyTree:
    """Draw a small mask for all rows, and multiply each chunk by its part; draw a large one by chunks."""
    value: LazyValue = call["input"]
    layout, metas = value.layout, call.infer()
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _draw_by_seed(call, layout, lambda v: v, metas, [layout, layout])
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    scaled, mask = call.op(ones, call["p"], call["train"])
    return record(aten.mul.Tensor, value, constant(scaled)), constant(mask)


MAX_BLOCK_ROWS = 64
"""The most rows of a block, where the free memory decides how many a chunk has."""


def _draw_by_seed(
    call: ChunkedCall,
    layout: RowLayout,
    to_operand: Callable[[LazyValue], PyTree],
    metas: PyTree,
    layouts: list[RowLayout],
) -> PyTree:
    """Record numbers that are drawn chunk by chunk from a seed."""
    seed = int(torch.randint(1 << 48, ()))
    op, axis = call.op, layout.axis
    axis.coarsen(axis.rows(partial(_rows_within, largest(call.chunked).meta, axis.size)))
    block = axis.granule

    def draw(span: Span, *args: PyTree, **kwargs: PyTree) -> PyTree:
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device("cpu"))
        start = layout.window(span)[0]
        chunk = RowLayout(axis, layout.dim, layout.window(span)[1] - start, layout.runs)
        parts = []
        state = capture.rng_state(device)
        try:
            for row in range(span[0], span[1], block):
                capture.generator_of(device).manual_seed(seed + row)
                if span[1] - span[0] <= block:
                    return op(*args, **kwargs)
                begin, end = layout.window((row, min(row + block, span[1])))
                rows = begin - start, end - start
                parts.append(op(*[chunk.chunk_of(x, rows) if isinstance(x, Tensor) else x for x in args], **kwargs))
        finally:
            capture.set_rng_state(device, state)
        return _concatenate(parts, chunk)

    args, kwargs = call.with_values(to_operand)
    return emit(draw, (PerChunk(lambda span: span), *args), kwargs, metas, layouts)


def _rows_within(meta: Tensor, rows: int, limit: int | None) -> int:
    """Return the rows of a block that leaves room for other values in a chunk of some bytes."""
    row = max(1, meta.nbytes // max(1, rows))
    return MAX_BLOCK_ROWS if limit is None else max(1, min(MAX_BLOCK_ROWS, limit // (32 * row)))


def _concatenate(parts: list[PyTree], layout: RowLayout) -> PyTree:
    """Concatenate the parts of a chunk; of several results, each."""
    if not isinstance(parts[0], Tensor):
        return tuple(_concatenate(list(results), layout) for results in zip(*parts, strict=True))
    dim, runs = layout.dim, layout.runs
    return torch.cat([p.unflatten(dim, (runs, p.shape[dim] // runs)) for p in parts], dim + 1).flatten(dim, dim + 1)
