"""Views: a chunk takes the view of its part, where one dim of the result holds the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, emit, replicated
from subtensors.dispatch.chunked.record import RULES, BoundCall, chunk_dim_size, normalized_dim, record
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


def _value_and_layout(call: BoundCall) -> tuple[LazyValue, RowLayout]:
    (value,) = call.chunked
    assert value.layout is not None
    return value, value.layout


def _with_rows_in(call: BoundCall, dim: int) -> PyTree:
    """Record the same op on each chunk, whose rows are in another dim of the result."""
    _, layout = _value_and_layout(call)
    return call.emit([layout.with_dim(dim)], layout.axis, lambda v: v)


@RULES.register(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_copy, aten.view_copy.default)
def reshaped(call: BoundCall) -> PyTree:
    """Keep rows chunked where one dim of the result holds them in order.

    Where the result groups rows, as in `x.view(B, T)` of `B * T` rows, chunks would have to hold complete groups. A
    small value is replicated instead: that costs less than large chunks.
    """
    value, layout = _value_and_layout(call)
    meta = call.infer()
    new = layout.reshaped(value.shape, meta.shape)
    if new is None or (new.group > layout.group and value.meta.numel() == layout.axis.size):
        return record(aten.reshape.default, replicated(value), list(meta.shape))
    if new.group > 1:
        layout.axis.coarsen(new.group)
    sizes = [chunk_dim_size(new) if d == new.dim else size for d, size in enumerate(meta.shape)]
    call.positional[1] = sizes
    return call.emit([new], new.axis, lambda v: v, op=_reshape, metas=meta)


def _reshape(x: Tensor, size: Sequence[int]) -> Tensor:
    # A chunk's part may not be contiguous where the full value is.
    return x.reshape(size)


@RULES.register(aten.alias, aten.detach, aten.contiguous, aten.lift_fresh, aten.view_as_real, aten.real, aten.imag)
def same_dim(call: BoundCall) -> PyTree:
    """Keep the rows in their dim."""
    return _with_rows_in(call, _value_and_layout(call)[1].dim)


@RULES.register(aten.t)
def t(call: BoundCall) -> PyTree:
    """Exchange dims 0 and 1."""
    value, layout = _value_and_layout(call)
    return _with_rows_in(call, value.ndim - 1 - layout.dim)


@RULES.register(aten.transpose.int, aten.transpose_copy.int)
def transpose(call: BoundCall) -> PyTree:
    """Exchange two dims."""
    value, layout = _value_and_layout(call)
    a, b = normalized_dim(call["dim0"], value.ndim), normalized_dim(call["dim1"], value.ndim)
    return _with_rows_in(call, {a: b, b: a}.get(layout.dim, layout.dim))


@RULES.register(aten.permute)
def permute(call: BoundCall) -> PyTree:
    """Reorder dims."""
    value, layout = _value_and_layout(call)
    return _with_rows_in(call, [normalized_dim(d, value.ndim) for d in call["dims"]].index(layout.dim))


@RULES.register(aten.unsqueeze)
def unsqueeze(call: BoundCall) -> PyTree:
    """Insert a dim of size 1."""
    value, layout = _value_and_layout(call)
    return _with_rows_in(call, layout.dim + (normalized_dim(call["dim"], value.ndim + 1) <= layout.dim))


@RULES.register(aten.squeeze)
def squeeze(call: BoundCall) -> PyTree:
    """Remove dims of size 1, by index, since the rows of a short chunk may be one too."""
    value, layout = _value_and_layout(call)
    dims = call["dim"] if "dim" in call else range(value.ndim)
    dims = [normalized_dim(d, value.ndim) for d in (dims if isinstance(dims, Sequence) else [dims])]
    dims = [d for d in dims if value.shape[d] == 1]
    if layout.dim in dims:
        return record(aten.squeeze.dims, replicated(value), dims)
    named = BoundCall(aten.squeeze.dims, (value, dims), {})
    return _with_rows_in(named, layout.dim - sum(d < layout.dim for d in dims))


@RULES.register(aten.expand)
def expand(call: BoundCall) -> PyTree:
    """Repeat dims of size 1, and add new ones in front."""
    value, layout = _value_and_layout(call)
    meta = call.infer()
    dim = layout.dim + meta.ndim - value.ndim
    if meta.shape[dim] != layout.dim_size:
        return record(aten.expand.default, replicated(value), list(meta.shape))
    new = layout.with_dim(dim)
    call["size"] = [chunk_dim_size(new) if d == dim else size for d, size in enumerate(meta.shape)]
    return call.emit([new], new.axis, lambda v: v, metas=meta)


@RULES.register(aten.select.int)
def select(call: BoundCall) -> PyTree:
    """Select one position of a dim; in the chunked dim, one chunk has it."""
    value, layout = _value_and_layout(call)
    dim = normalized_dim(call["dim"], value.ndim)
    if dim != layout.dim:
        return _with_rows_in(call, layout.dim - (dim < layout.dim))
    index = normalized_dim(call["index"], value.shape[dim])
    if layout.runs != 1 or not 0 <= index < layout.size:
        raise call.unchunkable("it selects a row")
    one = narrowed(value, layout, index, 1)
    return record(aten.select.int, replicated(one), dim, 0)


def narrowed(value: LazyValue, layout: RowLayout, start: int, length: int) -> LazyValue:
    """Record positions `start .. start + length` of a chunked dim of one run: each chunk keeps those that it has."""
    new = RowLayout(layout.axis, layout.dim, length, 1, layout.unit, layout.start + start)

    def range_of_rows(part: Tensor, window: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
        (old_start, _), (new_start, new_stop) = window
        first = min(new_start + start - old_start, part.shape[layout.dim]) if new_stop > new_start else 0
        return part.narrow(layout.dim, first, new_stop - new_start)

    full = BoundCall(aten.slice.Tensor, (value, layout.dim, start, start + length), {})
    windows = PerChunk(lambda span: (layout.window(span), new.window(span)))
    narrow: LazyValue = emit(range_of_rows, (value, windows), {}, full.infer(), [new], layout.axis)
    return narrow


@RULES.register(aten.slice.Tensor)
def slice_(call: BoundCall) -> PyTree:
    """Slice a dim; in the chunked dim, each chunk keeps the rows that it has."""
    value, layout = _value_and_layout(call)
    dim = normalized_dim(call["dim"], value.ndim)
    if dim != layout.dim:
        return _with_rows_in(call, layout.dim)
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(value.shape[dim])
    if (start, stop, step) == (0, value.shape[dim], 1):
        return value
    if step != 1 or stop <= start:
        raise call.unchunkable("it takes rows by steps, or none")
    if layout.runs != 1:
        raise call.unchunkable("it takes a range across runs of rows")
    return narrowed(value, layout, start, stop - start)


@RULES.register(aten.split.Tensor, aten.split_with_sizes, aten.unbind.int, aten.unsafe_split, aten.unsafe_chunk)
def split(call: BoundCall) -> PyTree:
    """Split another dim in each chunk; split the chunked dim into ranges of rows."""
    value, layout = _value_and_layout(call)
    dim = normalized_dim(call["dim"], value.ndim)
    metas = call.infer()
    if dim == layout.dim:
        if call.op is aten.unbind.int:
            raise call.unchunkable("it takes the rows one by one")
        starts = [sum(m.shape[dim] for m in metas[:i]) for i in range(len(metas))]
        return [record(aten.slice.Tensor, value, dim, s, s + m.shape[dim]) for s, m in zip(starts, metas, strict=True)]
    removed = call.op is aten.unbind.int and dim < layout.dim
    return call.emit([layout.with_dim(layout.dim - removed)] * len(metas), layout.axis, lambda v: v, metas=metas)
