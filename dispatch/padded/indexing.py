"""Indexing, gather, scatter and embeddings: reads and writes at given positions.

The padding of an index reads position 0, and what it reads is padding of the result. It must not write to a valid
position, so for a write the tensor gets one more position along the dim, which takes these writes and is cut off.

An index counts valid positions, also of a dim in which they lie scattered (`positions.py`). It is data: one that names
positions beyond the true size reads padding, and no look at shapes can tell. A debug mode checks positions, which waits
for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.padded.data_dependent import has_bool_mask, index_by_mask
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.offset_reads import gather_along, rows_dim
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, broadcast_dim, gradient_safe, pointwise
from subtensors.dispatch.padded.positions import check_bounds, counted_from_start, flattened, in_bucket, ranks
from subtensors.dispatch.padded.regrouping import with_factors
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, is_prefix, size_of, static_dims

aten = torch.ops.aten


@table.register(aten.index_select, across=True)
def index_select(call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue) -> PaddedValue:
    """Select positions of a padded dim."""
    if x.dim() == 0:
        raise UnsupportedCall("it selects from a single number")
    d = dim % x.dim()
    check_bounds(x, d, index, _min_end(call, x, d))
    out = call.dense({"index": _placed(call, x, d, index).filled(0)})
    dims = [*x.dims[:d], index.dims[0] if index.dim() else static_dims([1])[0], *x.dims[d + 1 :]]
    return result(out, dims, call.sizes()).gradient_masked()


@table.register(aten.gather, across=True)
def gather(call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue) -> PaddedValue:
    """Read an element of a padded dim for each position of an index."""
    if x.dim() == 0 or index.dim() == 0:
        raise UnsupportedCall("it gathers from a single number")
    d = dim % x.dim()
    index = _aligned(call, index, x, d)
    check_bounds(x, d, index, None if is_prefix(x.dims[d]) else _last(call, x, d))
    out = call.dense({"index": _placed(call, x, d, index).filled(0)})
    return result(out, index.dims, call.sizes()).gradient_masked()


@table.register(aten.take_along_dim)
def take_along_dim(call: PaddedCall) -> PaddedValue:
    """Read an element for each position of an index that broadcasts."""
    x, index = call["self"], call["indices"]
    if call["dim"] is None:
        x, index = flattened(x), flattened(index)
    if x.dim() != index.dim():
        raise UnsupportedCall("its index has another number of dims")
    d = (call["dim"] or 0) % x.dim()
    rest = [PaddedValue(t.dense, (*t.dims[:d], static_dims([1])[0], *t.dims[d + 1 :]), t.sizes) for t in (x, index)]
    dims, sizes = broadcast(rest)
    widened = []
    for t in (x, index):
        own = [*dims[:d], t.dims[d], *dims[d + 1 :]]
        shape = list(map(bucket_of, own))
        widened.append(result(gradient_safe(t, own, shape, sizes).expand(shape), own, sizes))
    if _has_one_size(x, d) or not is_prefix(x.dims[d]):
        # Unlike gather, take_along_dim counts negative positions from the end.
        found = widened[1]
        end = _last(call, x, d)
        widened[1] = found.like(torch.where(found.dense < 0, found.dense + end, found.dense))
    return apply(aten.gather.default, widened[0], d, widened[1])


@table.register(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: PaddedCall) -> PaddedValue:
    """Index with integers, or with one bool mask."""
    _move_indices(call)
    if has_bool_mask(call):
        return index_by_mask(call)
    x: PaddedValue = call["self"]
    by_dim = {d: i for d, i in enumerate(call["indices"]) if i is not None}
    if len(by_dim) == 1:
        ((d, positions),) = by_dim.items()
        if positions.dim() == 1 and _differs_by_row(x, d):
            return _index_each_row(call, x, d, positions)
    indices, at = _integer_indices(call, x)
    out = call.dense({"indices": indices})
    return result(out, _picked_dims(call, x, at)[0], call.sizes()).gradient_masked()


@table.register(aten.index_put, aten._unsafe_index_put)
def index_put(call: PaddedCall) -> PaddedValue:
    """Write or add at integer positions, or write one value under a bool mask."""
    x: PaddedValue = call["self"]
    values: PaddedValue = call["values"]
    _move_indices(call)
    only = [i for i in call["indices"] if i is not None]
    if len(only) == 1 and len(call["indices"]) == 1 and only[0].dense.dtype == torch.bool and values.dense.numel() == 1:
        if call["accumulate"]:
            raise UnsupportedCall("it adds under a mask")
        mask = only[0]
        trailing = x.dim() - mask.dim()
        widened = PaddedValue(
            mask.dense[(..., *(None,) * trailing)], (*mask.dims, *static_dims([1] * trailing)), mask.sizes
        )
        value = PaddedValue(values.dense.reshape(()).to(x.dense.dtype), ())
        named = {"condition": widened, "self": value, "other": x}
        chosen: PaddedValue = pointwise(PaddedCall(aten.where.self, (), named))
        return chosen
    if any(i.dense.dtype == torch.bool for i in only):
        raise UnsupportedCall("how many positions a mask names depends on its values")
    indices, at = _integer_indices(call, x, slot=True)
    _check_values(call, x, at, values)
    widened_x = _with_extra_slot(x, at[0])
    out = call.dense({"self": widened_x, "indices": indices, "values": values.filled(0)})
    return _without_slot(out, x, at[0], call)


@table.register(aten.scatter, aten.scatter_add, aten.scatter_reduce, across=True)
def scatter(call: PaddedCall, x: PaddedValue, dim: int, index: PaddedValue) -> PaddedValue:
    """Write, add or reduce at positions of a padded dim, an index for each element."""
    if x.dim() == 0 or index.dim() == 0:
        raise UnsupportedCall("it scatters into a single number")
    d = dim % x.dim()
    source = call.get("src")
    if isinstance(source, PaddedValue):
        index = _aligned(call, index, source)
    placed = _aligned(call, index, x, d)
    check_bounds(x, d, placed, None if is_prefix(x.dims[d]) else _last(call, x, d))
    filled = _placed(call, x, d, placed).filled(x.shape[d])
    changed: dict[str, Tensor] = {"self": _with_extra_slot(x, d), "index": filled}
    if isinstance(source, PaddedValue):
        changed["src"] = source.filled(0)
    return _without_slot(call.dense(changed), x, d, call)


@table.register(aten.index_add, aten.index_copy, aten.index_reduce, aten.index_fill)
def index_write(call: PaddedCall) -> PaddedValue:
    """Write slices at positions of one dim."""
    x, index = call["self"], call["index"]
    if x.dim() == 0:
        raise UnsupportedCall("it writes to a single number")
    d = call["dim"] % x.dim()
    source = call.get("source")
    factors = index.dims[0] if index.dim() else static_dims([1])[0]
    if isinstance(source, PaddedValue) and source.dim():
        if index.dim() and len(index.dims[0]) != len(source.dims[d]) and size_of(factors) == size_of(source.dims[d]):
            index = with_factors(index, 0, source.dims[d])
            factors = index.dims[0]
        factors = broadcast_dim([factors, source.dims[d]], call.sizes())
        for e in range(x.dim()):
            if e != d:
                broadcast_dim([x.dims[e], source.dims[e]], call.sizes())
    placed = PaddedValue(index.dense, (factors,) if index.dim() else (), call.sizes())
    check_bounds(x, d, placed, _min_end(call, x, d))
    if call.op.overloadpacket is aten.index_fill:
        # Unlike the others, index_fill counts negative positions from the end.
        if _differs_by_row(x, d):
            return _fill_each_row(call, x, d, placed.filled(x.shape[d]))
        placed = placed.like(counted_from_start(placed.dense, _last(call, x, d), x.shape[d]))
    filled = _placed(call, x, d, placed).filled(x.shape[d])
    changed: dict[str, Tensor] = {"self": _with_extra_slot(x, d), "index": filled}
    if isinstance(source, PaddedValue):
        changed["source"] = source.filled(0)
    return _without_slot(call.dense(changed), x, d, call)


def _fill_each_row(call: PaddedCall, x: PaddedValue, d: int, index: Tensor) -> PaddedValue:
    """Write a value at the same positions of each row of a ragged batch; negative ones count from the row's end."""
    ends = torch.as_tensor(x.size(d), device=index.device).unsqueeze(-1)
    named = torch.where(index.reshape(-1) < 0, index.reshape(-1) + ends, index.reshape(-1))
    position = torch.arange(x.shape[d], device=index.device)
    is_named = (named.unsqueeze(-1) == position).any(-2)
    rows = rows_dim(x)
    is_named = is_named if rows < d else is_named.t()
    shape = [x.shape[e] if e in (rows, d) else 1 for e in range(x.dim())]
    value = call["value"]
    number = (
        value
        if isinstance(value, PaddedValue)
        else unpadded_value(torch.full((), value, dtype=x.dense.dtype, device=index.device))
    )
    dims = [x.dims[e] if e in (rows, d) else static_dims([1])[0] for e in range(x.dim())]
    named_alike = PaddedValue(is_named.view(shape), tuple(dims), x.sizes)
    return apply(aten.where.self, named_alike, number, x)


@table.register(aten.take)
def take(call: PaddedCall) -> PaddedValue:
    """Read elements of the flattened tensor."""
    index: PaddedValue = call["index"]
    x = flattened(call["self"])
    positions = counted_from_start(index.dense, _last(call, x, 0), x.shape[0])
    check_bounds(x, 0, index.like(positions), _last(call, x, 0))
    out = call.dense({"self": x.dense, "index": _placed(call, x, 0, index.like(positions)).filled(0)})
    return result(out, index.dims, call.sizes()).gradient_masked()


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
            raise UnsupportedCall(
                f"its index of {index.shape[e]} positions in dim {e} goes with {other.shape[e]} of them"
            )
    return PaddedValue(index.dense, tuple(dims), call.sizes())


def _placed(call: PaddedCall, x: PaddedValue, d: int, index: PaddedValue) -> PaddedValue:
    """Return an index with positions in the bucket."""
    placed = in_bucket(call, x, d, index.dense)
    return index if placed is index.dense else PaddedValue(placed, index.dims, index.sizes)


def _picked_dims(call: PaddedCall, x: PaddedValue, at: list[int]) -> tuple[list[Factors], range]:
    """Return the dims of `x[indices]`, and which of them are those of the indices."""
    picked, _ = broadcast([i for i in call["indices"] if i is not None])
    rest = [x.dims[d] for d in range(x.dim()) if d not in at]
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = at[0] if adjacent else 0
    return [*rest[:before], *picked, *rest[before:]], range(before, before + len(picked))


def _check_values(call: PaddedCall, x: PaddedValue, at: list[int], values: PaddedValue) -> None:
    """Raise UnsupportedCall for values that are padded where the positions they are written to are not."""
    dims, named = _picked_dims(call, x, at)
    both, _ = broadcast([PaddedValue(x.dense, tuple(dims), x.sizes), values])
    if len(both) != len(dims) or any(is_padded(both[d]) and not is_padded(dims[d]) for d in named):
        raise UnsupportedCall("the values are padded in other dims than the positions")


def _move_indices(call: PaddedCall) -> None:
    """Move indices to the device of the tensor: torch accepts indices on the CPU, where it makes those of lists."""
    device = call["self"].dense.device
    call.replace("indices", [i if i is None else i.like(i.dense.to(device), i.fill) for i in call["indices"]])


def _integer_indices(call: PaddedCall, x: PaddedValue, slot: bool = False) -> tuple[list[Tensor | None], list[int]]:
    """Return the indices without padding and counted from the start, and the dims that they index."""
    found: list[Tensor | None] = []
    at: list[int] = []
    for d, positions in enumerate(call["indices"]):
        if positions is None:
            found.append(None)
            continue
        if positions.dense.dtype in (torch.bool, torch.uint8):
            raise UnsupportedCall("how many positions a mask names depends on its values")
        dense = positions.dense
        if x.is_padded(d) and not is_rows_dim(x, d):
            ends = _end(call, x, d)
            check_bounds(x, d, positions, ends)
            dense = in_bucket(call, x, d, counted_from_start(dense, ends, x.shape[d]))
        elif slot and not at:
            # The slot moves the end that negative positions count from.
            dense = counted_from_start(dense, x.shape[d], x.shape[d])
        dense = PaddedValue(dense, positions.dims, positions.sizes).filled(x.shape[d] if slot and not at else 0)
        at.append(d)
        found.append(dense)
    if not at:
        raise UnsupportedCall("it names no positions")
    return found, at


def _end(call: PaddedCall, x: PaddedValue, d: int) -> Tensor | int:
    """Return the end that negative positions count from: in a ragged dim, the length of the indexed row."""
    if _has_one_size(x, d) or not is_prefix(x.dims[d]):
        return _last(call, x, d)
    if len(x.dims[d]) == 1:
        for e, positions in enumerate(call["indices"]):
            if positions is not None and is_rows_dim(x, e):
                return torch.as_tensor(x.size(d))[positions.filled(0)]
    raise UnsupportedCall("negative positions of a ragged dim count from different ends")


def _last(call: PaddedCall, x: PaddedValue, d: int) -> Tensor | int:
    """Return the number of valid positions of a dim, of each row if only the rows of a ragged batch differ in it."""
    rank = ranks(call, x, d)
    return x.size(d) if rank is None else rank[-1]


def _differs_by_row(x: PaddedValue, d: int) -> bool:
    return not _has_one_size(x, d) and not is_rows_dim(x, d) and len(x.dims[d]) == 1


def _index_each_row(call: PaddedCall, x: PaddedValue, d: int, index: PaddedValue) -> PaddedValue:
    """Read the same positions of each row of a ragged batch; negative ones count from the row's end."""
    check_bounds(x, d, index, _min_end(call, x, d))
    positions = index.filled(0)
    ends = torch.as_tensor(x.size(d)).unsqueeze(-1)
    return gather_along(x, d, torch.where(positions < 0, positions + ends, positions), index.dims[0])


def _min_end(call: PaddedCall, x: PaddedValue, d: int) -> Tensor | int:
    """Return the true size of a dim; for a ragged dim, that of its shortest row."""
    end = _last(call, x, d)
    return end.min() if isinstance(end, Tensor) and end.dim() else end


def _has_one_size(x: PaddedValue, d: int) -> bool:
    """Return whether the true size of this dim is one number and its valid part a prefix."""
    if not x.is_padded(d) or x.sizes is None:
        return True
    return len(x.dims[d]) == 1 and not x.sizes.differs_by_row(x.dims[d][0].size) and not is_rows_dim(x, d)


def is_rows_dim(x: PaddedValue, d: int) -> bool:
    """Return whether a dim is the rows of a ragged batch."""
    from subtensors.dispatch.padded.true_sizes import rows_symbol

    return len(x.dims[d]) == 1 and x.dims[d][0].size == rows_symbol()


def _with_extra_slot(x: PaddedValue, d: int) -> Tensor:
    widths = [0] * (2 * x.dim())
    widths[2 * (x.dim() - 1 - d) + 1] = 1
    return torch.constant_pad_nd(x.dense, widths)


def _without_slot(out: Tensor, x: PaddedValue, d: int, call: PaddedCall) -> PaddedValue:
    return result(
        out.narrow(d, 0, x.shape[d]), x.dims, x.sizes if x.sizes is not None else call.sizes()
    ).gradient_masked()


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
def embedding_renorm(call: PaddedCall) -> PaddedValue:
    """Return the table with the norms of the rows that occur limited."""
    weight, indices = call["self"], call["indices"]
    if weight.padded_dims:
        raise UnsupportedCall("the table itself is padded")
    count = weight.shape[0]
    occurs = torch.zeros(count + 1, dtype=torch.bool, device=weight.dense.device)
    occurs = occurs.index_fill(0, indices.filled(count).reshape(-1), True)[:count, None]
    norm = torch.linalg.vector_norm(weight.dense, call["norm_type"], 1, keepdim=True)
    shorter = weight.dense * (call["max_norm"] / (norm + 1e-7))
    out = torch.where(occurs & (norm > call["max_norm"]), shorter, weight.dense)
    return PaddedValue(out, weight.dims)
