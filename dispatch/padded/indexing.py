"""Indexing, gather, scatter and embeddings: reads and writes at given positions.

The padding of an index reads position 0, and what it reads is padding of the result. It must not write to a valid
position, so for a write the tensor gets one more position along the dim, which takes these writes and is cut off.

An index counts valid positions, also of a dim in which they lie scattered (`positions.py`). It is data: one that names
positions beyond the true size reads padding, and no look at shapes can tell. A debug mode checks positions, which waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops import index_dims
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.tree import Kwargs
from subtensors.dispatch.padded.data_dependent import index_by_mask
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, broadcast_dim, expanded
from subtensors.dispatch.padded.positions import (
    check_bounds,
    counted_from_start,
    flattened,
    gather_along,
    in_bucket,
    ranks,
    rows_dim,
    with_factors,
)
from subtensors.dispatch.sizes.dim_factors import (
    Factors,
    bucket_of,
    is_padded,
    is_prefix,
    size_of,
    static_dims,
    with_dim,
)

aten = torch.ops.aten


@table.register(aten.index_select, across=True)
def index_select(call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue) -> PaddedValue:
    """Select positions of a padded dim."""
    d = _dim(x, dim)
    check_bounds(x, d, index, _min_end(x, d))
    out = call.dense({"index": _placed(x, d, index).filled(0)})
    return result(out, with_dim(x.dims, d, _index_dim(index)), call.sizes()).gradient_masked()


@table.register(aten.gather, across=True)
def gather(call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue) -> PaddedValue:
    """Read an element of a padded dim for each position of an index."""
    d = _dim(x, dim, index)
    index = _aligned(call, index, x, d)
    check_bounds(x, d, index, None if is_prefix(x.dims[d]) else _last(x, d))
    out = call.dense({"index": _placed(x, d, index).filled(0)})
    return result(out, index.dims, call.sizes()).gradient_masked()


@table.register(aten.take_along_dim)
def take_along_dim(call: PaddedCall, x: PaddedValue, indices: PaddedValue, dim: int | None) -> PaddedValue:
    """Read an element for each position of an index that broadcasts."""
    if dim is None:
        x, indices = flattened(x), flattened(indices)
    if x.dim() != indices.dim():
        raise UnsupportedCall("its index has another number of dims")
    d, single = (dim or 0) % x.dim(), static_dims([1])[0]
    dims, sizes = broadcast([PaddedValue(t.dense, tuple(with_dim(t.dims, d, single)), t.sizes) for t in (x, indices)])
    if not (_differs_by_row(x, d) or x.is_rows(d)):
        # Unlike gather, take_along_dim counts negative positions from the end.
        indices = indices.like(torch.where(indices.dense < 0, indices.dense + _last(x, d), indices.dense))
    x, indices = (expanded(t, with_dim(dims, d, t.dims[d]), sizes) for t in (x, indices))
    return apply(aten.gather.default, x, d, indices)


@table.register(aten.take, across=True)
def take(call: PaddedCall, x: PaddedValue, index: PaddedValue) -> PaddedValue:
    """Read elements of the flattened tensor."""
    x = flattened(x)
    positions = index.like(counted_from_start(index.dense, _last(x, 0), x.shape[0]))
    check_bounds(x, 0, positions, _last(x, 0))
    out = call.dense({"self": x.dense, "index": _placed(x, 0, positions).filled(0)})
    return result(out, index.dims, call.sizes()).gradient_masked()


Indices = Sequence[PaddedValue | None]


@table.register(index_dims.index, across=True)
def index(call: PaddedCall, x: PaddedValue, indices: Indices) -> PaddedValue:
    """Index with integers, or with one bool mask."""
    indices = _on_device_of(x, indices)
    by_dim = {d: i for d, i in enumerate(indices) if i is not None}
    if len(by_dim) == 1:
        ((d, only),) = by_dim.items()
        if only.dense.dtype == torch.bool and only.dim() > 0:
            return index_by_mask(call, x, d, only)
        if only.dim() == 1 and _differs_by_row(x, d):
            return _index_each_row(x, d, only)
    found, _ = _integer_indices(x, indices)
    dims = [call.label_dims[label] for label in call.dims().results[0]]
    return result(call.dense({"indices": found}), dims, call.sizes()).gradient_masked()


@table.register(index_dims.index_put, across=True)
def index_put(call: PaddedCall, x: PaddedValue, indices: Indices, values: PaddedValue, accumulate: bool) -> PaddedValue:
    """Write or add at integer positions, or write one value under a bool mask."""
    indices = _on_device_of(x, indices)
    masks = [i for i in indices if i is not None and i.dense.dtype == torch.bool]
    if len(masks) == len(indices) == 1 and values.dense.numel() == 1:
        if accumulate:
            raise UnsupportedCall("it adds under a mask")
        mask, trailing = masks[0], x.dim() - masks[0].dim()
        own = (*mask.dims, *static_dims([1] * trailing))
        widened = PaddedValue(mask.dense[(..., *(None,) * trailing)], own, mask.sizes)
        value = PaddedValue(values.dense.reshape(()), ())
        if value.dense.device != x.dense.device:  # a number's, on the host: `where` would copy it to the GPU
            return apply(aten.masked_fill.Tensor, x, widened, value)
        return apply(aten.where.self, widened, value.like(value.dense.to(x.dense.dtype)), x)
    if masks:
        raise UnsupportedCall("how many positions a mask names depends on its values")
    found, at = _integer_indices(x, indices, slot=True)
    picked, _ = broadcast([i for i in indices if i is not None])
    rest = [x.dims[d] for d in range(x.dim()) if d not in at]
    before = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    dims, named = [*rest[:before], *picked, *rest[before:]], range(before, before + len(picked))
    both, _ = broadcast([PaddedValue(x.dense, tuple(dims), x.sizes), values])
    if len(both) != len(dims) or any(is_padded(both[d]) and not is_padded(dims[d]) for d in named):
        raise UnsupportedCall("the values are padded in other dims than the positions")
    return _written(call, x, at[0], {"indices": found, "values": values.filled(0)})


@table.register(index_dims.scatter, across=True)
def scatter(
    call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue, src: PaddedValue | None = None
) -> PaddedValue:
    """Write, add or reduce at positions of a padded dim, an index for each element."""
    d = _dim(x, dim, index)
    if src is not None:
        index = _aligned(call, index, src)
    placed = _aligned(call, index, x, d)
    check_bounds(x, d, placed, None if is_prefix(x.dims[d]) else _last(x, d))
    changed = {} if src is None else {"src": src.filled(0)}
    return _written(call, x, d, {"index": _placed(x, d, placed).filled(x.shape[d]), **changed})


@table.register(index_dims.index_write, across=True)
def index_write(
    call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue, source: PaddedValue | None = None
) -> PaddedValue:
    """Write slices at positions of one dim."""
    d = _dim(x, dim)
    factors = _index_dim(index)
    if source is not None and source.dim():
        if index.dim() and len(factors) != len(source.dims[d]) and size_of(factors) == size_of(source.dims[d]):
            index = with_factors(index, 0, source.dims[d])
        factors = broadcast_dim([_index_dim(index), source.dims[d]], call.sizes())
        for e in set(range(x.dim())) - {d}:
            broadcast_dim([x.dims[e], source.dims[e]], call.sizes())
    placed = PaddedValue(index.dense, (factors,) if index.dim() else (), call.sizes())
    check_bounds(x, d, placed, _min_end(x, d))
    if call.op.overloadpacket is aten.index_fill:
        # Unlike the others, index_fill counts negative positions from the end.
        if _differs_by_row(x, d):
            return _fill_each_row(x, d, placed.filled(x.shape[d]), call["value"])
        placed = placed.like(counted_from_start(placed.dense, _last(x, d), x.shape[d]))
    changed = {} if source is None else {"source": source.filled(0)}
    return _written(call, x, d, {"index": _placed(x, d, placed).filled(x.shape[d]), **changed})


def _fill_each_row(x: PaddedValue, d: int, index: Tensor, value: PaddedValue | float) -> PaddedValue:
    """Write a value at the same positions of each row of a ragged batch; negative ones count from the row's end."""
    ends = torch.as_tensor(x.size(d), device=index.device).unsqueeze(-1)
    named = torch.where(index.reshape(-1) < 0, index.reshape(-1) + ends, index.reshape(-1))
    is_named = (named.unsqueeze(-1) == torch.arange(x.shape[d], device=index.device)).any(-2)
    rows = rows_dim(x)
    dims = [x.dims[e] if e in (rows, d) else static_dims([1])[0] for e in range(x.dim())]
    placed = (is_named if rows < d else is_named.t()).view([*map(bucket_of, dims)])
    if not isinstance(value, PaddedValue):
        value = unpadded_value(torch.full((), value, dtype=x.dense.dtype, device=index.device))
    return apply(aten.where.self, PaddedValue(placed, tuple(dims), x.sizes), value, x)


def _written(call: PaddedCall, x: PaddedValue, d: int, changed: Kwargs) -> PaddedValue:
    """Run a write with one more position along a dim, which takes what padding writes and is cut off."""
    widths = [0] * (2 * x.dim())
    widths[2 * (x.dim() - 1 - d) + 1] = 1
    out = call.dense({"self": torch.constant_pad_nd(x.dense, widths), **changed})
    sizes = x.sizes if x.sizes is not None else call.sizes()
    return result(out.narrow(d, 0, x.shape[d]), x.dims, sizes).gradient_masked()


def _dim(x: PaddedValue, dim: int, index: PaddedValue | None = None) -> int:
    """Return the dim that an index is about, from the front."""
    if x.dim() == 0 or (index is not None and index.dim() == 0):
        raise UnsupportedCall("it indexes a single number")
    return dim % x.dim()


def _index_dim(index: PaddedValue) -> Factors:
    return index.dims[0] if index.dim() else static_dims([1])[0]


def _aligned(call: PaddedCall, index: PaddedValue, other: PaddedValue, but: int | None = None) -> PaddedValue:
    """Return an index with the dims it has beside a tensor, whose positions it shares but for those of one dim.

    An unpadded index may have the bucket's shape. One that is shorter than the tensor names its first positions.
    """
    dims = [*index.dims]
    for e in range(min(index.dim(), other.dim())):
        if e == but or not (is_padded(dims[e]) or is_padded(other.dims[e])):
            continue
        if index.shape[e] == other.shape[e]:
            dims[e] = broadcast_dim([dims[e], other.dims[e]], call.sizes())
        elif index.shape[e] > other.shape[e] or not (is_prefix(dims[e]) and is_prefix(other.dims[e])):
            raise UnsupportedCall(f"its index of {index.shape[e]} positions in dim {e} goes with {other.shape[e]}")
    return PaddedValue(index.dense, tuple(dims), call.sizes())


def _placed(x: PaddedValue, d: int, index: PaddedValue) -> PaddedValue:
    """Return an index with positions in the bucket."""
    placed = in_bucket(x, d, index.dense)
    return index if placed is index.dense else PaddedValue(placed, index.dims, index.sizes)


def _on_device_of(x: PaddedValue, indices: Indices) -> Indices:
    """Move indices to the device of the tensor: torch accepts indices on the CPU, where it makes those of lists."""
    device = x.dense.device
    return [i if i is None or i.dense.device == device else i.like(i.dense.to(device), i.fill) for i in indices]


def _integer_indices(x: PaddedValue, indices: Indices, slot: bool = False) -> tuple[list[Tensor | None], list[int]]:
    """Return the indices without padding and counted from the start, and the dims that they index."""
    found: list[Tensor | None] = []
    at: list[int] = []
    for d, positions in enumerate(indices):
        if positions is None:
            found.append(None)
            continue
        if positions.dense.dtype in (torch.bool, torch.uint8):
            raise UnsupportedCall("how many positions a mask names depends on its values")
        dense = positions.dense
        if x.is_padded(d) and not x.is_rows(d):
            ends = _end(x, d, indices)
            check_bounds(x, d, positions, ends)
            dense = in_bucket(x, d, counted_from_start(dense, ends, x.shape[d]))
        elif slot and not at:
            # The slot moves the end that negative positions count from.
            dense = counted_from_start(dense, x.shape[d], x.shape[d])
        if positions.padded_dims:
            dense = PaddedValue(dense, positions.dims, positions.sizes).filled(x.shape[d] if slot and not at else 0)
        at.append(d)
        found.append(dense)
    if not at:
        raise UnsupportedCall("it names no positions")
    return found, at


def _end(x: PaddedValue, d: int, indices: Indices) -> Tensor | int:
    """Return the end that negative positions count from: in a ragged dim, the length of the indexed row."""
    if not _differs_by_row(x, d):
        return _last(x, d)
    for e, positions in enumerate(indices):
        if positions is not None and x.is_rows(e):
            return torch.as_tensor(x.size(d))[positions.filled(0)]
    raise UnsupportedCall("negative positions of a ragged dim count from different ends")


def _last(x: PaddedValue, d: int) -> Tensor | int:
    """Return the number of valid positions of a dim, of each row if only the rows of a ragged batch differ in it."""
    rank = ranks(x, d)
    return x.size(d) if rank is None else rank[-1]


def _differs_by_row(x: PaddedValue, d: int) -> bool:
    """Return whether the rows of a ragged batch differ in the true size of this dim."""
    return len(x.dims[d]) == 1 and x.sizes is not None and x.sizes.differs_by_row(x.dims[d][0].size)


def _index_each_row(x: PaddedValue, d: int, index: PaddedValue) -> PaddedValue:
    """Read the same positions of each row of a ragged batch; negative ones count from the row's end."""
    check_bounds(x, d, index, _min_end(x, d))
    positions = index.filled(0)
    ends = torch.as_tensor(x.size(d)).unsqueeze(-1)
    return gather_along(x, d, torch.where(positions < 0, positions + ends, positions), index.dims[0])


def _min_end(x: PaddedValue, d: int) -> Tensor | int:
    """Return the true size of a dim; for a ragged dim, that of its shortest row."""
    end = _last(x, d)
    return end.min() if isinstance(end, Tensor) and end.dim() else end


@table.register(aten.embedding, across=True)
def embedding(call: PaddedCall, weight: PaddedValue, indices: PaddedValue) -> PaddedValue:
    """Read a row of the table for each index; its gradient is divided by the number of times that the index occurs."""
    if weight.is_padded(0):
        raise UnsupportedCall("the table itself is padded")
    # Padding reads an extra row.
    rows = torch.cat([weight.dense, weight.dense.new_zeros(1, weight.shape[1])])
    out = call.dense({"weight": rows, "indices": indices.filled(weight.shape[0])})
    return result(out, [*indices.dims, weight.dims[1]], call.sizes()).gradient_masked()


@table.register(aten.embedding_renorm)
def embedding_renorm(
    call: PaddedCall, x: PaddedValue, indices: PaddedValue, max_norm: float, norm_type: float
) -> PaddedValue:
    """Return the table with the norms of the rows that occur limited."""
    if x.padded_dims:
        raise UnsupportedCall("the table itself is padded")
    count, rows = x.shape[0], x.dense
    occurs = torch.zeros(count + 1, dtype=torch.bool, device=rows.device)
    occurs = occurs.index_fill(0, indices.filled(count).reshape(-1), True)[:count, None]
    norm = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
    return x.like(torch.where(occurs & (norm > max_norm), rows * (max_norm / (norm + 1e-7)), rows))
