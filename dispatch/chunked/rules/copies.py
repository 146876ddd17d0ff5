"""Copies of elements: concatenation, repetition, padding, triangles and diagonals."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, emit
from subtensors.dispatch.chunked.record import RULES, BoundCall, largest, normalized_dim, record, sliced
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


@RULES.register(aten.cat, aten.stack)
def concatenate(call: BoundCall) -> PyTree:
    """Concatenate or stack tensors with the same rows along another dim."""
    tensors: list[LazyValue] = [v for v in call["tensors"] if v.shape != (0,)]
    call["tensors"] = tensors
    leader = largest(call.chunked)
    layout = leader.layout
    assert layout is not None
    new = call.op.overloadpacket is aten.stack
    dim = normalized_dim(call["dim"], leader.ndim + new)
    if not new and dim == layout.dim:
        raise call.unchunkable("it concatenates along the rows")
    if any(v.ndim != leader.ndim for v in tensors):
        raise call.unchunkable("its operands have different numbers of dims")
    out = layout.with_dim(layout.dim + (new and dim <= layout.dim))
    return call.emit([out], layout.axis, lambda v: sliced(v, layout))


@RULES.register(aten.constant_pad_nd, aten.reflection_pad1d, aten.replication_pad1d)
def padded(call: BoundCall) -> PyTree:
    """Pad other dims."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    padding = list(call["pad"] if "pad" in call else call["padding"])
    place = 2 * (value.ndim - 1 - layout.dim)
    if any(padding[place : place + 2]):
        raise call.unchunkable("it pads the rows")
    return call.emit([layout], layout.axis, lambda v: v)


@RULES.register(aten.repeat)
def repeat(call: BoundCall) -> PyTree:
    """Repeat other dims."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    dim = layout.dim + len(call["repeats"]) - value.ndim
    if call["repeats"][dim] != 1:
        raise call.unchunkable("it repeats the rows")
    return call.emit([layout.with_dim(dim)], layout.axis, lambda v: v)


@RULES.register(aten.tril, aten.triu)
def triangle(call: BoundCall) -> PyTree:
    """Take a triangle of the last two dims: the diagonal of a chunk is shifted by the chunk's first row or column."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    if layout.runs != 1 and layout.dim >= value.ndim - 2:
        raise call.unchunkable("its rows lie in several runs")
    sign = {value.ndim - 2: 1, value.ndim - 1: -1}.get(layout.dim, 0)
    diagonal = call["diagonal"]
    call["diagonal"] = 0
    meta = call.infer()
    call["diagonal"] = PerChunk(lambda span: diagonal + sign * layout.window(span)[0])
    return call.emit([layout], layout.axis, lambda v: v, metas=meta)


@RULES.register(aten.diagonal, aten.diagonal_copy)
def diagonal(call: BoundCall) -> PyTree:
    """Take a diagonal of other dims, or of the rows and a dim: then each chunk has its part of it."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    dims = [normalized_dim(call["dim1"], value.ndim), normalized_dim(call["dim2"], value.ndim)]
    meta = call.infer()
    if layout.dim not in dims:
        new = layout.with_dim(layout.dim - sum(d < layout.dim for d in dims))
        return call.emit([new], layout.axis, lambda v: v, metas=meta)
    if layout.runs != 1 or call["offset"] != 0 or meta.shape[-1] != layout.size:
        raise call.unchunkable("its diagonal does not have all the rows")
    sign = 1 if layout.dim == dims[0] else -1
    call["offset"] = PerChunk(lambda span: sign * layout.window(span)[0])
    return call.emit([layout.with_dim(meta.ndim - 1)], layout.axis, lambda v: v, metas=meta)


@RULES.register(aten.select_scatter, aten.slice_scatter)
def scatter_part(call: BoundCall) -> PyTree:
    """Replace a part of another dim, or rows."""
    value: LazyValue = call["self"]
    leader = largest(call.chunked)
    selects = call.op.overloadpacket is aten.select_scatter
    dim = normalized_dim(call["dim"], value.ndim)
    layout = leader.layout
    assert layout is not None
    if leader is not value:
        layout = layout.with_dim(layout.dim + (selects and dim <= layout.dim))
    if layout.dim == dim:
        return _replace_rows(call, value, selects)
    source = layout.with_dim(layout.dim - (selects and dim < layout.dim))
    return call.emit([layout], layout.axis, lambda v: sliced(v, layout if v is value else source))


def _replace_rows(call: BoundCall, value: LazyValue, selects: bool) -> PyTree:
    """Replace rows, each chunk its own."""
    layout, source = value.layout, call["src"]
    if layout is None or layout.runs != 1:
        raise call.unchunkable("it replaces rows of a replicated value, or of several runs")
    dim, size = layout.dim, value.shape[layout.dim]
    if selects:
        start = normalized_dim(call["index"], size)
        stop, step = start + 1, 1
        source = record(aten.unsqueeze.default, source, dim)
    else:
        start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    if step != 1 or not 0 <= start < stop <= size:
        raise call.unchunkable("it replaces rows by steps, or none")
    rows = replace(layout, size=stop - start, start=layout.start + start)

    def replace_rows(part: Tensor, source: Tensor, first: int) -> Tensor:
        count = source.shape[dim]
        return torch.slice_scatter(part, source, dim, first, first + count) if count else part

    first = PerChunk(lambda span: max(rows.window(span)[0] + start - layout.window(span)[0], 0))
    return emit(replace_rows, (value, sliced(source, rows), first), {}, value.meta, [layout], layout.axis)


@RULES.register(aten.one_hot)
def one_hot(call: BoundCall) -> PyTree:
    """Encode each index as a row of a given number of classes."""
    (value,) = call.chunked
    if call["num_classes"] < 0:
        raise call.unchunkable("the number of classes depends on the values")
    assert value.layout is not None
    return call.emit([value.layout], value.layout.axis, lambda v: v)
