"""Reads and writes by index: of another dim in each chunk; of rows in the chunk that has them."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import (
    Combine,
    LazyValue,
    PerChunk,
    constant,
    emit,
    known_tensor,
    replicated,
)
from subtensors.dispatch.chunked.record import (
    RULES,
    ChunkedCall,
    broadcast,
    largest,
    normalized_dim,
    record,
    sliced,
)
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


@RULES.register(aten.index_select, across=True)
def index_select(call: ChunkedCall, x: LazyValue, dim: int, index: LazyValue) -> PyTree:
    """Select rows."""
    if index.layout is not None:
        raise call.unchunkable("the index is chunked")
    return record(aten.index.Tensor, x, [*[None] * normalized_dim(dim, x.ndim), index])


@RULES.register(aten.index.Tensor)
def index(call: ChunkedCall) -> PyTree:
    """Index other dims in each chunk, as in `x[:, i, j]`, or rows too, as in `x[i, j]`.

    For rows, a chunk reads those that it has and 0 for the others, and the results are summed over chunks.
    """
    value: LazyValue = call["self"]
    layout = value.layout
    places: list[LazyValue | None] = list(call["indices"])
    given = [d for d, i in enumerate(places) if i is not None]
    if layout is not None and (without_masks := _without_masks(places, layout.dim)) is not None:
        return record(call.op, value, without_masks)
    dtypes = {places[d].dtype for d in given}  # type: ignore[union-attr]
    if layout is None:
        return _table_rows(call, places, given)
    if dtypes - {torch.int64, torch.int32}:
        raise call.unchunkable("the number of elements that a mask selects depends on its values")
    adjacent = given == list(range(given[0], given[-1] + 1))
    if layout.dim not in given:
        if any(i.layout is not None for i in places if i is not None) or not adjacent:
            raise call.unchunkable("the index is chunked")
        count = max(places[d].ndim for d in given)  # type: ignore[union-attr]
        out = layout.with_dim(layout.dim if layout.dim < given[0] else layout.dim - len(given) + count)
        return call.emit([out], layout.axis, lambda v: v)
    return _rows_from_chunks(call, places, given[0], adjacent)


def _rows_from_chunks(call: ChunkedCall, places: list[LazyValue | None], first: int, adjacent: bool) -> PyTree:
    """Record `x[i, j]` with rows among the indexed dims: each chunk reads the rows that it has.

    Args:
        call: of a value whose rows are indexed.
        places: the indices.
        first: the first dim that is indexed.
        adjacent: whether the indexed dims are adjacent.
    """
    value: LazyValue = call["self"]
    layout = value.layout
    assert layout is not None
    if layout.runs != 1:
        raise call.unchunkable("its rows lie in several runs")
    metas = call.infer()
    if metas.numel() >= value.meta.numel() and value.meta.numel() > layout.size:
        raise call.unchunkable("it selects as much as there is")

    def read(x: Tensor, indices: list[Tensor | None], start: int) -> Tensor:
        rows = indices[layout.dim]
        assert rows is not None
        count = x.shape[layout.dim]
        if not count:
            return x.new_zeros(metas.shape)
        rows = _checked_rows(rows, layout, x.device) - start
        here = (rows >= 0) & (rows < count)
        indices = list(indices)
        indices[layout.dim] = rows.clamp(0, count - 1)
        found = aten.index.Tensor(x, indices)
        # `here` has the dims of the indices, which stand where the first of them stood (or in front).
        trailing = found.ndim - (first if adjacent else 0) - max(i.ndim for i in indices if i is not None)
        return torch.where(here.reshape(*here.shape, *[1] * trailing), found, 0)

    full_indices = [None if i is None else replicated(i) for i in places]
    start = PerChunk(lambda span: layout.window(span)[0])
    return emit(read, (value, full_indices, start), {}, metas, [Combine.SUM], layout.axis)


def _checked_rows(rows: Tensor, layout: RowLayout, device: torch.device) -> Tensor:
    """Return an index of rows counted from the front, or raise torch's own error for one out of range."""
    positions = torch.arange(layout.size, device=rows.device)
    try:
        return positions[rows].to(device)
    except IndexError as error:
        raise IndexError(str(error).replace("dimension 0", f"dimension {layout.dim}")) from None


def _without_masks(places: list[LazyValue | None], dim: int) -> list[LazyValue | None] | None:
    """Return indices with masks of other dims than `dim` replaced by positions; None where there are no such masks."""
    out: list[LazyValue | None] = []
    for place in places:
        mask = None if place is None or place.layout is not None else known_tensor(place)
        if mask is None or mask.dtype != torch.bool or len(out) <= dim < len(out) + mask.ndim:
            out.append(place)
        else:
            out.extend(constant(i) for i in mask.nonzero().unbind(1))
    return None if all(any(o is p for p in places) for o in out) else out


@RULES.register(aten.index_put)
def index_put(call: ChunkedCall) -> PyTree:
    """Replace elements by index: each chunk writes to its own rows."""
    value, new = call["self"], call["values"]
    layout, places = value.layout, list(call["indices"])
    if layout is None:
        raise call.unchunkable("it writes to a replicated value")
    if (without_masks := _without_masks(places, layout.dim)) is not None:
        return record(call.op, value, without_masks, new, call["accumulate"])
    given = [d for d, i in enumerate(places) if i is not None]
    plain = all(places[d].layout is None and places[d].dtype != torch.bool for d in given)
    if not plain or given != list(range(given[0], given[-1] + 1)):
        raise call.unchunkable("its index is chunked, or of dims apart")
    if layout.dim in given:
        return _write_rows(call, layout, places)
    count = max(places[d].ndim for d in given)
    ndim = value.ndim - len(given) + count
    rows = layout.with_dim(layout.dim if layout.dim < given[0] else layout.dim - len(given) + count)
    return call.emit(
        [layout],
        layout.axis,
        lambda v: v if v is value else broadcast(v, ndim, rows) if v is new else v,
        metas=value.meta,
    )


def _write_rows(call: ChunkedCall, layout: RowLayout, places: list[LazyValue | None]) -> PyTree:
    """Record `x[i, j] = y` with rows among the indexed dims: writes to other chunks go to an extra row."""
    value, new, accumulate = call["self"], call["values"], call["accumulate"]
    if layout.runs != 1 or new.meta.numel() >= value.meta.numel():
        raise call.unchunkable("its rows lie in several runs, or it writes as much as there is")
    dim = layout.dim

    def write(x: Tensor, indices: list[Tensor | None], start: int, values: Tensor) -> Tensor:
        rows, count = indices[dim], x.shape[dim]
        assert rows is not None
        rows = _checked_rows(rows, layout, x.device) - start
        indices = list(indices)
        indices[dim] = torch.where((rows >= 0) & (rows < count), rows, count)
        behind = x.new_zeros([1 if d == dim else size for d, size in enumerate(x.shape)])
        put: Tensor = aten.index_put(torch.cat([x, behind], dim), indices, values, accumulate)
        return put.narrow(dim, 0, count)

    full_indices = [None if i is None else replicated(i) for i in places]
    start = PerChunk(lambda span: layout.window(span)[0])
    return emit(write, (value, full_indices, start, replicated(new)), {}, value.meta, [layout], layout.axis)


def _table_rows(call: ChunkedCall, places: list[LazyValue | None], given: list[int]) -> PyTree:
    """Look chunked indices up in a replicated table: each chunk its own."""
    chunked = largest(call.chunked)
    layout = chunked.layout
    assert layout is not None
    count = max(places[d].ndim for d in given)  # type: ignore[union-attr]
    adjacent = given == list(range(given[0], given[-1] + 1))
    if any(places[d].ndim != count or places[d].shape != chunked.shape for d in given) or not adjacent:  # type: ignore[union-attr]
        raise call.unchunkable("its indices have different sizes")
    metas = call.infer()
    table = call["self"]
    return call.emit(
        [layout.with_dim(layout.dim + given[0])],
        layout.axis,
        lambda v: replicated(v) if v is table else sliced(v, layout),
        metas=metas,
    )
