"""Reads and writes at indices of rows, each in the chunk that has them; other dims are left to the dimension maps."""

from __future__ import annotations

from collections.abc import Sequence

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
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.ops import index_dims
from subtensors.dispatch.ops.dims import normalized
from subtensors.dispatch.ops.index_dims import MASKS
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten

Indices = Sequence[LazyValue | None]


@RULES.register(aten.index_select, across=True)
def index_select(call: ChunkedCall, x: LazyValue, dim: int, index: LazyValue) -> PyTree:
    """Select rows; a single one stays a dim of size 1."""
    positions = index if index.ndim else record(aten.unsqueeze.default, index, 0)
    return record(aten.index.Tensor, x, [*[None] * normalized(dim, x.ndim), positions])


@RULES.register(index_dims.index, across=True)
def index(call: ChunkedCall, x: LazyValue, indices: Indices) -> PyTree:
    """Index rows, as in `x[i, j]`: a chunk reads those that it has and 0 for the others, and the results are summed."""
    layout = x.layout
    if (without_masks := _without_masks(indices, layout)) is not None:
        return record(call.op, x, without_masks)
    if layout is None or any(i is not None and i.dtype in MASKS for i in indices):
        raise call.unchunkable("the number of elements that a mask selects depends on its values")
    if layout.runs != 1:
        raise call.unchunkable("its rows lie in several runs")
    metas = call.infer()
    if metas.numel() >= x.meta.numel() and x.meta.numel() > layout.size:
        raise call.unchunkable("it selects as much as there is")
    (labels,) = call.dims().results
    trailing = next((n for n, label in enumerate(reversed(labels)) if isinstance(label, tuple)), 0)

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
        return torch.where(here[(..., *[None] * trailing)], aten.index.Tensor(x, indices), 0)

    full_indices = [None if i is None else replicated(i) for i in indices]
    start = PerChunk(lambda span: layout.window(span)[0])
    return emit(read, (x, full_indices, start), {}, metas, [Combine.SUM])


def _checked_rows(rows: Tensor, layout: RowLayout, device: torch.device) -> Tensor:
    """Return an index of rows counted from the front, or raise torch's own error for one out of range."""
    positions = torch.arange(layout.size, device=rows.device)
    try:
        return positions[rows].to(device)
    except IndexError as error:
        raise IndexError(str(error).replace("dimension 0", f"dimension {layout.dim}")) from None


def _without_masks(indices: Indices, layout: RowLayout | None) -> list[LazyValue | None] | None:
    """Return indices with masks of other dims than the rows' replaced by positions; None where there are no such."""
    rows, out, is_replaced = None if layout is None else layout.dim, list[LazyValue | None](), False
    for index in indices:
        mask = None if index is None or index.layout is not None else known_tensor(index)
        if mask is None or mask.dtype != torch.bool or rows in range(len(out), len(out) + mask.ndim):
            out.append(index)
        else:
            out.extend(constant(i) for i in mask.nonzero().unbind(1))
            is_replaced = True
    return out if is_replaced else None


@RULES.register(index_dims.index_put, across=True)
def index_put(call: ChunkedCall, x: LazyValue, indices: Indices, values: LazyValue, accumulate: bool) -> PyTree:
    """Replace rows, as in `x[i, j] = y`: each chunk writes to its own, and to an extra row what others have."""
    layout = x.layout
    if layout is None:
        raise call.unchunkable("it writes to a replicated value")
    if (without_masks := _without_masks(indices, layout)) is not None:
        return record(call.op, x, without_masks, values, accumulate)
    if any(i is not None and (i.layout is not None or i.dtype in MASKS) for i in indices):
        raise call.unchunkable("its index is chunked, or a mask of the rows")
    if layout.runs != 1 or values.meta.numel() >= x.meta.numel():
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

    full_indices = [None if i is None else replicated(i) for i in indices]
    start = PerChunk(lambda span: layout.window(span)[0])
    return emit(write, (x, full_indices, start, replicated(values)), {}, x.meta, [layout])
