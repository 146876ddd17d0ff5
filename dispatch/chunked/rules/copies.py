"""Copies of elements: triangles, diagonals, parts replaced; and new tensors of sizes that are not the rows'."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import PerChunk, emit
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record, sliced
from subtensors.dispatch.ops import sample_dims, view_dims
from subtensors.dispatch.ops.dims import normalized
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


@RULES.register(view_dims.triangle, across=True)
def triangle(call: ChunkedCall) -> PyTree:
    """Take a triangle of the last two dims: the diagonal of a chunk is shifted by the chunk's first row or column."""
    value, layout = call.rows()
    if layout.runs != 1 and layout.dim >= value.ndim - 2:
        raise call.unchunkable("its rows lie in several runs")
    sign = {value.ndim - 2: 1, value.ndim - 1: -1}.get(layout.dim, 0)
    diagonal = call["diagonal"]
    call.replace("diagonal", 0)
    meta = call.infer()
    call.replace("diagonal", PerChunk(lambda span: diagonal + sign * layout.window(span)[0]))
    return call.emit([layout], metas=meta)


@RULES.register(view_dims.diagonal, across=True)
def diagonal(call: ChunkedCall, offset: int, dim1: int) -> PyTree:
    """Take a diagonal of the rows and a dim: each chunk has its part of it."""
    value, layout = call.rows()
    meta = call.infer()
    if layout.runs != 1 or offset != 0 or meta.shape[-1] != layout.size:
        raise call.unchunkable("its diagonal does not have all the rows")
    sign = 1 if layout.dim == normalized(dim1, value.ndim) else -1
    call.replace("offset", PerChunk(lambda span: sign * layout.window(span)[0]))
    return call.emit([layout.with_dim(meta.ndim - 1)], metas=meta)


@RULES.register(view_dims.scatter_part, across=True)
def replace_rows(call: ChunkedCall) -> PyTree:
    """Replace rows, each chunk its own."""
    value, source, selects = call["self"], call["src"], call.op.overloadpacket is aten.select_scatter
    layout = value.layout
    if layout is None or layout.runs != 1:
        raise call.unchunkable("it replaces rows of a replicated value, or of several runs")
    dim, size = layout.dim, value.shape[layout.dim]
    if selects:
        start = normalized(call["index"], size)
        stop, step = start + 1, 1
        source = record(aten.unsqueeze.default, source, dim)
    else:
        start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    if step != 1 or not 0 <= start < stop <= size:
        raise call.unchunkable("it replaces rows by steps, or none")
    rows = replace(layout, size=stop - start, start=layout.start + start)

    def replaced(part: Tensor, source: Tensor, first: int) -> Tensor:
        count = source.shape[dim]
        return torch.slice_scatter(part, source, dim, first, first + count) if count else part

    first = PerChunk(lambda span: max(rows.window(span)[0] + start - layout.window(span)[0], 0))
    return emit(replaced, (value, sliced(source, rows), first), {}, value.meta, [layout])


@RULES.register(sample_dims.new, across=True)
def new(call: ChunkedCall) -> PyTree:
    """Make a tensor once: its operand determines dtype and device, and no values."""
    args, kwargs = call.with_values(lambda v: torch.empty(0, dtype=v.dtype, device=v.device))
    return record(call.op, *args, **kwargs)
