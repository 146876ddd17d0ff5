"""Random numbers: those of few elements are drawn when they are recorded, others chunk by chunk from a seed.

Drawn at once, as for a tensor no larger than the one that was chunked, they are the numbers that the unchunked program
draws from the same generator. Larger ones may not be there in full: the generator then gives a seed, and each block of
rows is drawn from that and its first row. Chunks begin where blocks do. So every pass that reads the numbers has the
same, however long its chunks are, and so has a chunk that is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.bound_call import BoundCall, along, largest
from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, Span, constant, emit
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.chunked.rules.table import RULES, record
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.op_classes import OpClass

aten = torch.ops.aten

# Ops whose numbers don't depend on the values of their operand, only on its sizes.
_OF_SIZES = frozenset(
    """bernoulli.p uniform.default normal_functional.default exponential.default geometric.default cauchy.default
    log_normal.default rand_like.default randn_like.default randint_like.default randint_like.low_dtype
    random.default random.from random.to""".split()
)


@RULES.register(OpClass.RANDOM)
def random(call: BoundCall) -> Any:
    """Numbers of the sizes of the first operand."""
    value: LazyValue = largest(call.chunked) if call.chunked else call.values[0]
    layout, meta = value.layout, call.infer()
    if not isinstance(meta, Tensor) or meta.shape != value.shape or any(v.shape != value.shape for v in call.values):
        raise call.unchunkable("its numbers have other sizes than its operand")
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _by_seed(call, layout, lambda v: along(v, layout), meta, [layout])
    if str(call.op).removeprefix("aten.") not in _OF_SIZES:
        raise call.unchunkable("its numbers depend on values")
    stand_in = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    args, kwargs = call.with_values(lambda v: stand_in)
    return constant(call.op(*args, **kwargs))


@RULES.register(aten.native_dropout)
def dropout(call: BoundCall) -> Any:
    """The mask of few elements is drawn for all rows; what it is multiplied with stays chunked."""
    value: LazyValue = call["input"]
    layout, metas = value.layout, call.infer()
    if layout is not None and value.meta.numel() > layout.axis.elements:
        return _by_seed(call, layout, lambda v: v, metas, [layout, layout])
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    scaled, mask = call.op(ones, call["p"], call["train"])
    return record(aten.mul.Tensor, value, constant(scaled)), constant(mask)


MOST_DRAWN = 64
"""Rows of a block, where memory says how many a chunk has."""


def _by_seed(call: BoundCall, layout: RowLayout, brought: Any, metas: Any, layouts: list[RowLayout]) -> Any:
    seed = int(torch.randint(1 << 48, ()))
    op, axis = call.op, layout.axis
    axis.coarsen(axis.rows(partial(_rows_within, largest(call.chunked).meta, axis.size)))
    block = axis.granule

    def drawn(span: Span, *args: Any, **kwargs: Any) -> Any:
        device = next((x.device for x in args if isinstance(x, Tensor)), torch.device("cpu"))
        start = layout.window(span)[0]
        chunk = RowLayout(axis, layout.dim, layout.window(span)[1] - start, layout.outer)
        parts = []
        place = capture.rng_state(device)
        try:
            for row in range(span[0], span[1], block):
                capture.seed_rng(device, seed + row)
                if span[1] - span[0] <= block:
                    return op(*args, **kwargs)
                begin, end = layout.window((row, min(row + block, span[1])))
                rows = begin - start, end - start
                parts.append(op(*[chunk.cut(x, rows) if isinstance(x, Tensor) else x for x in args], **kwargs))
        finally:
            capture.set_rng_state(device, place)
        return _side_by_side(parts, chunk)

    args, kwargs = call.with_values(brought)
    return emit(drawn, (PerChunk(lambda span: span), *args), kwargs, metas, layouts, axis)


def _rows_within(meta: Tensor, rows: int, limit: int | None) -> int:
    """Rows of a block that leaves a chunk within some bytes room for more than these numbers."""
    row = max(1, meta.nbytes // max(1, rows))
    return MOST_DRAWN if limit is None else max(1, min(MOST_DRAWN, limit // (32 * row)))


def _side_by_side(parts: list[Any], layout: RowLayout) -> Any:
    """The parts of a chunk, in their order, as one; of several results, each."""
    if not isinstance(parts[0], Tensor):
        return tuple(_side_by_side(list(results), layout) for results in zip(*parts, strict=True))
    dim, outer = layout.dim, layout.outer
    if outer == 1:
        return torch.cat(parts, dim)
    return torch.cat([p.unflatten(dim, (outer, p.shape[dim] // outer)) for p in parts], dim + 1).flatten(dim, dim + 1)
