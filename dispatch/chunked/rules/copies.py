"""Copies of elements: concatenated, repeated, padded, or masked by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.bound_call import BoundCall, along, largest, wrapped
from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, emit
from subtensors.dispatch.chunked.rules.table import RULES, record

aten = torch.ops.aten


@RULES.register(aten.cat, aten.stack)
def side_by_side(call: BoundCall) -> Any:
    """Tensors with the same rows, laid side by side along another dim."""
    tensors: list[LazyValue] = [v for v in call["tensors"] if v.shape != (0,)]
    call["tensors"] = tensors
    leader = largest(call.chunked)
    layout = leader.layout
    assert layout is not None
    new = call.op.overloadpacket is aten.stack
    dim = wrapped(call["dim"], leader.ndim + new)
    if not new and dim == layout.dim:
        raise call.unchunkable("it lays rows after rows")
    if any(v.ndim != leader.ndim for v in tensors):
        raise call.unchunkable("its operands have different numbers of dims")
    out = layout.at(layout.dim + (new and dim <= layout.dim))
    return call.emit([out], layout.axis, lambda v: along(v, layout))


@RULES.register(aten.constant_pad_nd, aten.reflection_pad1d, aten.replication_pad1d)
def padded(call: BoundCall) -> Any:
    """Padding of other dims."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    padding = list(call["pad"] if "pad" in call else call["padding"])
    place = 2 * (value.ndim - 1 - layout.dim)
    if any(padding[place : place + 2]):
        raise call.unchunkable("it pads the rows")
    return call.emit([layout], layout.axis, lambda v: v)


@RULES.register(aten.repeat)
def repeat(call: BoundCall) -> Any:
    """Other dims laid out again and again."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    dim = layout.dim + len(call["repeats"]) - value.ndim
    if call["repeats"][dim] != 1:
        raise call.unchunkable("it repeats the rows")
    return call.emit([layout.at(dim)], layout.axis, lambda v: v)


@RULES.register(aten.tril, aten.triu)
def triangle(call: BoundCall) -> Any:
    """A triangle of the last two dims: a chunk of rows, or of columns, has its diagonal that much lower or higher."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    if layout.outer != 1 and layout.dim >= value.ndim - 2:
        raise call.unchunkable("its rows lie in several runs")
    sign = {value.ndim - 2: 1, value.ndim - 1: -1}.get(layout.dim, 0)
    diagonal = call["diagonal"]
    call["diagonal"] = 0
    meta = call.infer()
    call["diagonal"] = PerChunk(lambda span: diagonal + sign * layout.window(span)[0])
    return call.emit([layout], layout.axis, lambda v: v, metas=meta)


@RULES.register(aten.diagonal, aten.diagonal_copy)
def diagonal(call: BoundCall) -> Any:
    """A diagonal of other dims; where the rows are one of its dims, each chunk has its piece of it."""
    (value,) = call.chunked
    layout = value.layout
    assert layout is not None
    dims = [wrapped(call["dim1"], value.ndim), wrapped(call["dim2"], value.ndim)]
    meta = call.infer()
    if layout.dim not in dims:
        new = layout.at(layout.dim - sum(d < layout.dim for d in dims))
        return call.emit([new], layout.axis, lambda v: v, metas=meta)
    if layout.outer != 1 or call["offset"] != 0 or meta.shape[-1] != layout.size:
        raise call.unchunkable("its diagonal does not have all the rows")
    sign = 1 if layout.dim == dims[0] else -1
    call["offset"] = PerChunk(lambda span: sign * layout.window(span)[0])
    return call.emit([layout.at(meta.ndim - 1)], layout.axis, lambda v: v, metas=meta)


@RULES.register(aten.select_scatter, aten.slice_scatter)
def put_back(call: BoundCall) -> Any:
    """A part of another dim replaced."""
    value: LazyValue = call["self"]
    leader = largest(call.chunked)
    selects = call.op.overloadpacket is aten.select_scatter
    dim = wrapped(call["dim"], value.ndim)
    layout = leader.layout
    assert layout is not None
    if leader is not value:
        layout = layout.at(layout.dim + (selects and dim <= layout.dim))
    if layout.dim == dim:
        return _rows_replaced(call, value, selects)
    source = layout.at(layout.dim - (selects and dim < layout.dim))
    return call.emit([layout], layout.axis, lambda v: along(v, layout if v is value else source))


def _rows_replaced(call: BoundCall, value: LazyValue, selects: bool) -> Any:
    """Each chunk replaces those of the rows that it has."""
    layout, source = value.layout, call["src"]
    if layout is None or layout.outer != 1:
        raise call.unchunkable("it replaces rows of a whole value, or of several runs")
    dim, size = layout.dim, value.shape[layout.dim]
    if selects:
        start = wrapped(call["index"], size)
        stop, step = start + 1, 1
        source = record(aten.unsqueeze.default, source, dim)
    else:
        start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    if step != 1 or not 0 <= start < stop <= size:
        raise call.unchunkable("it replaces rows by steps, or none")
    rows = replace(layout, size=stop - start, low=layout.low + start)

    def replaced(part: Tensor, source: Tensor, first: int) -> Tensor:
        count = source.shape[dim]
        return torch.slice_scatter(part, source, dim, first, first + count) if count else part

    first = PerChunk(lambda span: max(rows.window(span)[0] + start - layout.window(span)[0], 0))
    return emit(replaced, (value, along(source, rows), first), {}, value.meta, [layout], layout.axis)


@RULES.register(aten.one_hot)
def one_hot(call: BoundCall) -> Any:
    """A row for each index, of a given number of classes."""
    (value,) = call.chunked
    if call["num_classes"] < 0:
        raise call.unchunkable("the number of classes depends on the values")
    assert value.layout is not None
    return call.emit([value.layout], value.layout.axis, lambda v: v)
