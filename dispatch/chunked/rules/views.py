"""Views: a chunk takes the view of its part, where one dim of the result holds the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, PerChunk, emit, replicated
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, chunk_dim_size, record
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.chunked.rules.carried_dims import carry
from subtensors.dispatch.ops import view_dims
from subtensors.dispatch.ops.dims import normalized
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


@RULES.register(view_dims.reshape)
def reshaped(call: ChunkedCall) -> PyTree:
    """Keep rows chunked where one dim of the result holds them in order.

    Where the result groups rows, as in `x.view(B, T)` of `B * T` rows, chunks would have to hold complete groups. A
    small value is replicated instead: that costs less than large chunks.
    """
    value, layout = call.rows()
    meta = call.infer()
    new = layout.reshaped(value.shape, meta.shape)
    if new is None or (new.group > layout.group and value.meta.numel() == layout.axis.size):
        return record(aten.reshape.default, replicated(value), list(meta.shape))
    if new.group > 1:
        layout.axis.coarsen(new.group)
    sizes = [chunk_dim_size(new) if d == new.dim else size for d, size in enumerate(meta.shape)]
    call.replace("size" if "size" in call else "shape", sizes)
    return call.emit([new], op=_reshape, metas=meta)


def _reshape(x: Tensor, size: Sequence[int]) -> Tensor:
    # A chunk's part may not be contiguous where the full value is.
    return x.reshape(size)


@RULES.register(view_dims.squeeze)
def squeeze(call: ChunkedCall, x: LazyValue, dim: int | Sequence[int] | None = None) -> PyTree:
    """Remove dims of size 1, by index, since the rows of a short chunk may be one too."""
    named = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    single = [d for d in named if x.shape[d] == 1]
    if call.op is not aten.squeeze.dims or len(single) < len(named):
        return record(aten.squeeze.dims, x, single)
    return carry(call)


@RULES.register(view_dims.squeeze, view_dims.expand, across=True)
def replicate(call: ChunkedCall) -> PyTree:
    """Remove or expand the rows, of which there is one, by a view of the replicated value."""
    args, kwargs = call.with_values(replicated)
    return record(call.op, *args, **kwargs)


@RULES.register(aten.select.int, across=True)
def select(call: ChunkedCall, dim: int, index: int) -> PyTree:
    """Select one row; one chunk has it."""
    value, layout = call.rows()
    position = normalized(index, layout.dim_size)
    if layout.runs != 1 or not 0 <= position < layout.size:
        raise call.unchunkable("it selects a row")
    return record(aten.select.int, replicated(narrowed(value, layout, position, 1)), dim, 0)


def narrowed(value: LazyValue, layout: RowLayout, start: int, length: int) -> LazyValue:
    """Record positions `start .. start + length` of a chunked dim of one run: each chunk keeps those that it has."""
    new = RowLayout(layout.axis, layout.dim, length, 1, layout.unit, layout.start + start)

    def range_of_rows(part: Tensor, window: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
        (old_start, _), (new_start, new_stop) = window
        first = min(new_start + start - old_start, part.shape[layout.dim]) if new_stop > new_start else 0
        return part.narrow(layout.dim, first, new_stop - new_start)

    full = ChunkedCall(aten.slice.Tensor, (value, layout.dim, start, start + length), {})
    windows = PerChunk(lambda span: (layout.window(span), new.window(span)))
    narrow: LazyValue = emit(range_of_rows, (value, windows), {}, full.infer(), [new])
    return narrow


@RULES.register(aten.slice.Tensor, across=True)
def slice_(call: ChunkedCall, start: int | None, end: int | None, step: int) -> PyTree:
    """Slice the rows: each chunk keeps those that it has."""
    value, layout = call.rows()
    first, stop, step = slice(start, end, step).indices(layout.dim_size)
    if (first, stop, step) == (0, layout.dim_size, 1):
        return value
    if step != 1 or stop <= first:
        raise call.unchunkable("it takes rows by steps, or none")
    if layout.runs != 1:
        raise call.unchunkable("it takes a range across runs of rows")
    return narrowed(value, layout, first, stop - first)


@RULES.register(aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_chunk, across=True)
def split(call: ChunkedCall, dim: int) -> PyTree:
    """Split the rows into ranges."""
    value, layout = call.rows()
    metas = call.infer()
    starts = [sum(m.shape[layout.dim] for m in metas[:i]) for i in range(len(metas))]
    return [
        record(aten.slice.Tensor, value, dim, s, s + m.shape[layout.dim]) for s, m in zip(starts, metas, strict=True)
    ]
