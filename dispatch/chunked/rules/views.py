"""Views: the same elements under other sizes. A chunk takes the view of its part, where the rows stay together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.bound_call import BoundCall, extent, wrapped
from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, emit, gathered
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.chunked.rules.table import RULES, record

aten = torch.ops.aten


def _one(call: BoundCall) -> tuple[LazyValue, RowLayout]:
    (value,) = call.chunked
    assert value.layout is not None
    return value, value.layout


def _moved(call: BoundCall, dim: int) -> Any:
    """The same op on each chunk, its rows now in another dim."""
    _, layout = _one(call)
    return call.emit([layout.at(dim)], layout.axis, lambda v: v)


@RULES.register(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_copy, aten.view_copy.default)
def reshaped(call: BoundCall) -> Any:
    """Rows stay chunked where one dim of the result holds them in order.

    Where the result groups rows, as in `x.view(B, T)` of `B * T` rows, chunks would have to hold whole groups. A small
    value is gathered instead: it costs less than large chunks.
    """
    value, layout = _one(call)
    meta = call.infer()
    new = layout.reshaped(value.shape, meta.shape)
    if new is None or (new.group > layout.group and value.meta.numel() == layout.axis.size):
        return record(aten.reshape.default, gathered(value), list(meta.shape))
    if new.group > 1:
        layout.axis.coarsen(new.group)
    sizes = [extent(new) if d == new.dim else size for d, size in enumerate(meta.shape)]
    call.positional[1] = sizes
    return call.emit([new], new.axis, lambda v: v, op=_reshape, metas=meta)


def _reshape(x: Tensor, size: Sequence[int]) -> Tensor:
    # A chunk's part may not be contiguous where the whole is.
    return x.reshape(size)


@RULES.register(aten.alias, aten.detach, aten.contiguous, aten.lift_fresh, aten.view_as_real, aten.real, aten.imag)
def unmoved(call: BoundCall) -> Any:
    """The rows stay where they are."""
    return _moved(call, _one(call)[1].dim)


@RULES.register(aten.t)
def t(call: BoundCall) -> Any:
    """Dims 0 and 1 change places."""
    value, layout = _one(call)
    return _moved(call, value.ndim - 1 - layout.dim)


@RULES.register(aten.transpose.int, aten.transpose_copy.int)
def transpose(call: BoundCall) -> Any:
    """Two dims change places."""
    value, layout = _one(call)
    a, b = wrapped(call["dim0"], value.ndim), wrapped(call["dim1"], value.ndim)
    return _moved(call, {a: b, b: a}.get(layout.dim, layout.dim))


@RULES.register(aten.permute)
def permute(call: BoundCall) -> Any:
    """Dims in another order."""
    value, layout = _one(call)
    return _moved(call, [wrapped(d, value.ndim) for d in call["dims"]].index(layout.dim))


@RULES.register(aten.unsqueeze)
def unsqueeze(call: BoundCall) -> Any:
    """A dim of one is put in."""
    value, layout = _one(call)
    return _moved(call, layout.dim + (wrapped(call["dim"], value.ndim + 1) <= layout.dim))


@RULES.register(aten.squeeze)
def squeeze(call: BoundCall) -> Any:
    """Dims of one go; they are named, as the rows of a short chunk may be one too."""
    value, layout = _one(call)
    dims = call["dim"] if "dim" in call else range(value.ndim)
    dims = [wrapped(d, value.ndim) for d in (dims if isinstance(dims, Sequence) else [dims])]
    dims = [d for d in dims if value.shape[d] == 1]
    if layout.dim in dims:
        return record(aten.squeeze.dims, gathered(value), dims)
    named = BoundCall(aten.squeeze.dims, (value, dims), {})
    return _moved(named, layout.dim - sum(d < layout.dim for d in dims))


@RULES.register(aten.expand)
def expand(call: BoundCall) -> Any:
    """Dims of one are repeated, and new ones put in front."""
    value, layout = _one(call)
    meta = call.infer()
    dim = layout.dim + meta.ndim - value.ndim
    if meta.shape[dim] != layout.extent:
        return record(aten.expand.default, gathered(value), list(meta.shape))
    new = layout.at(dim)
    call["size"] = [extent(new) if d == dim else size for d, size in enumerate(meta.shape)]
    return call.emit([new], new.axis, lambda v: v, metas=meta)


@RULES.register(aten.select.int)
def select(call: BoundCall) -> Any:
    """One position of a dim; of the chunked dim it is in one chunk, and the others add nothing."""
    value, layout = _one(call)
    dim = wrapped(call["dim"], value.ndim)
    if dim != layout.dim:
        return _moved(call, layout.dim - (dim < layout.dim))
    index = wrapped(call["index"], value.shape[dim])
    if layout.outer != 1 or not 0 <= index < layout.size:
        raise call.unchunkable("it picks a row")
    one = narrowed(value, layout, index, 1)
    return record(aten.select.int, gathered(one), dim, 0)


def narrowed(value: LazyValue, layout: RowLayout, start: int, length: int) -> LazyValue:
    """Positions `start .. start + length` of a chunked dim of one run: each chunk keeps those that it has."""
    new = RowLayout(layout.axis, layout.dim, length, 1, layout.unit, layout.low + start)

    def range_of_rows(part: Tensor, window: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
        (old_start, _), (new_start, new_stop) = window
        first = min(new_start + start - old_start, part.shape[layout.dim]) if new_stop > new_start else 0
        return part.narrow(layout.dim, first, new_stop - new_start)

    whole = BoundCall(aten.slice.Tensor, (value, layout.dim, start, start + length), {})
    placed = PerChunk(lambda span: (layout.window(span), new.window(span)))
    out = emit(range_of_rows, (value, placed), {}, whole.infer(), [new], layout.axis)
    assert isinstance(out, LazyValue)
    return out


@RULES.register(aten.slice.Tensor)
def slice_(call: BoundCall) -> Any:
    """A range of a dim; of the chunked dim, each chunk keeps the rows that it has."""
    value, layout = _one(call)
    dim = wrapped(call["dim"], value.ndim)
    if dim != layout.dim:
        return _moved(call, layout.dim)
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(value.shape[dim])
    if (start, stop, step) == (0, value.shape[dim], 1):
        return value
    if step != 1 or stop <= start:
        raise call.unchunkable("it takes rows by steps, or none")
    if layout.outer != 1:
        raise call.unchunkable("it takes a range across runs of rows")
    return narrowed(value, layout, start, stop - start)


@RULES.register(aten.split.Tensor, aten.split_with_sizes, aten.unbind.int, aten.unsafe_split, aten.unsafe_chunk)
def split(call: BoundCall) -> Any:
    """Parts of another dim; of the chunked dim, ranges of rows."""
    value, layout = _one(call)
    dim = wrapped(call["dim"], value.ndim)
    metas = call.infer()
    if dim == layout.dim:
        if call.op is aten.unbind.int:
            raise call.unchunkable("it takes the rows one by one")
        starts = [sum(m.shape[dim] for m in metas[:i]) for i in range(len(metas))]
        return [record(aten.slice.Tensor, value, dim, s, s + m.shape[dim]) for s, m in zip(starts, metas, strict=True)]
    gone = call.op is aten.unbind.int and dim < layout.dim
    return call.emit([layout.at(layout.dim - gone)] * len(metas), layout.axis, lambda v: v, metas=metas)
