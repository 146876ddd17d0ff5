"""Indexing, gather, scatter and embeddings: reads and writes at given positions.

The padding of an index reads position 0, and what it reads is padding of the result. It must not write to a valid
position, so for a write the tensor gets one more position along the dim, which takes these writes and is cut off.

An index is data: one that names positions beyond the true size reads padding, and no look at shapes can tell. A debug
mode checks positions, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.dispatch.padded.data_dependent import has_bool_mask, index_by_mask
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, table
from subtensors.dispatch.padded.offset_reads import gather_along, rows_dim
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, broadcast_dim, gradient_safe, pointwise
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, static_dims
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


@table.register(aten.index_select)
def index_select(call: PaddedCall) -> PaddedValue:
    """Select positions of a dim."""
    x, index = call["self"], call["index"]
    if x.dim() == 0:
        raise refuse(call, "it selects from a single number")
    d = call["dim"] % x.dim()
    check_bounds(x, d, index, _min_end(x, d))
    out = call.dense({"index": index.filled(0)})
    dims = [*x.dims[:d], index.dims[0] if index.dim() else static_dims([1])[0], *x.dims[d + 1 :]]
    return result(out, dims, call.sizes()).gradient_masked()


@table.register(aten.gather)
def gather(call: PaddedCall) -> PaddedValue:
    """Read an element for each position of an index."""
    x, index = call["self"], call["index"]
    if x.dim() == 0 or index.dim() == 0:
        raise refuse(call, "it gathers from a single number")
    d = call["dim"] % x.dim()
    dims = _index_dims(call, x, index, d)
    index = PaddedValue(index.dense, dims, call.sizes())
    check_bounds(x, d, index)
    return result(call.dense({"index": index.filled(0)}), dims, call.sizes()).gradient_masked()


@table.register(aten.take_along_dim)
def take_along_dim(call: PaddedCall) -> PaddedValue:
    """Read an element for each position of an index that broadcasts."""
    x, index = call["self"], call["indices"]
    if call["dim"] is None or x.dim() != index.dim():
        raise refuse(call, "without a dim it takes from the flattened tensor")
    d = call["dim"] % x.dim()
    rest = [PaddedValue(t.dense, (*t.dims[:d], static_dims([1])[0], *t.dims[d + 1 :]), t.sizes) for t in (x, index)]
    dims, sizes = broadcast(rest)
    widened = []
    for t in (x, index):
        own = [*dims[:d], t.dims[d], *dims[d + 1 :]]
        shape = list(map(bucket_of, own))
        widened.append(result(gradient_safe(t, own, shape, sizes).expand(shape), own, sizes))
    if _has_one_size(x, d):
        # Unlike gather, take_along_dim counts negative positions from the end.
        found = widened[1]
        size = torch.as_tensor(x.size(d), device=found.dense.device)
        widened[1] = found.like(torch.where(found.dense < 0, found.dense + size, found.dense))
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
            return _index_each_row(x, d, positions)
    indices, at = _integer_indices(call, x)
    out = call.dense({"indices": indices})
    picked, _ = broadcast([*by_dim.values()])
    rest = [x.dims[d] for d in range(x.dim()) if d not in at]
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = at[0] if adjacent else 0
    dims = [*rest[:before], *picked, *rest[before:]]
    return result(out, dims, call.sizes()).gradient_masked()


@table.register(aten.index_put, aten._unsafe_index_put)
def index_put(call: PaddedCall) -> PaddedValue:
    """Write or add at integer positions, or write one value under a bool mask."""
    x: PaddedValue = call["self"]
    values: PaddedValue = call["values"]
    _move_indices(call)
    only = [i for i in call["indices"] if i is not None]
    if len(only) == 1 and len(call["indices"]) == 1 and only[0].dense.dtype == torch.bool and values.dense.numel() == 1:
        if call["accumulate"]:
            raise refuse(call, "it adds under a mask")
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
        raise refuse(call, "how many positions a mask names depends on its values")
    indices, at = _integer_indices(call, x, slot=True)
    widened_x = _with_extra_slot(x, at[0])
    out = call.dense({"self": widened_x, "indices": indices, "values": values.filled(0)})
    return _without_slot(out, x, at[0], call)


@table.register(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter(call: PaddedCall) -> PaddedValue:
    """Write, add or reduce at positions of one dim, an index for each element."""
    x, index = call["self"], call["index"]
    if x.dim() == 0 or index.dim() == 0:
        raise refuse(call, "it scatters into a single number")
    d = call["dim"] % x.dim()
    sizes = call.sizes()
    dims = [*index.dims]
    source = call.get("src")
    if isinstance(source, PaddedValue):
        for e in range(len(dims)):
            if is_padded(source.dims[e]) and source.shape[e] == index.shape[e]:
                dims[e] = broadcast_dim([dims[e], source.dims[e]], sizes)
    for e in range(len(dims)):
        if e != d and is_padded(x.dims[e]) and x.shape[e] == index.shape[e]:
            dims[e] = broadcast_dim([dims[e], x.dims[e]], sizes)
    placed = PaddedValue(index.dense, tuple(dims), sizes)
    check_bounds(x, d, placed)
    changed: dict[str, Tensor] = {"self": _with_extra_slot(x, d), "index": placed.filled(x.shape[d])}
    if isinstance(source, PaddedValue):
        changed["src"] = source.filled(0)
    return _without_slot(call.dense(changed), x, d, call)


@table.register(aten.index_add, aten.index_copy, aten.index_reduce, aten.index_fill)
def index_write(call: PaddedCall) -> PaddedValue:
    """Write slices at positions of one dim."""
    x, index = call["self"], call["index"]
    if x.dim() == 0:
        raise refuse(call, "it writes to a single number")
    d = call["dim"] % x.dim()
    source = call.get("source")
    factors = index.dims[0] if index.dim() else static_dims([1])[0]
    if isinstance(source, PaddedValue) and source.dim():
        factors = broadcast_dim([factors, source.dims[d]], call.sizes())
        for e in range(x.dim()):
            if e != d:
                broadcast_dim([x.dims[e], source.dims[e]], call.sizes())
    placed = PaddedValue(index.dense, (factors,) if index.dim() else (), call.sizes())
    check_bounds(x, d, placed, _min_end(x, d))
    filled = placed.filled(x.shape[d])
    if call.op.overloadpacket is aten.index_fill:
        # Unlike the others, index_fill counts negative positions from the end.
        if not _has_one_size(x, d):
            return _fill_each_row(call, x, d, filled)
        filled = torch.where(filled < 0, filled + torch.as_tensor(x.size(d), device=filled.device), filled)
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
    x, index = call["self"], call["index"]
    if x.padded_dims:
        raise refuse(call, "positions of the flattened tensor depend on its true size")
    return result(call.dense({"index": index.filled(0)}), index.dims, index.sizes).gradient_masked()


def _index_dims(call: PaddedCall, x: PaddedValue, index: PaddedValue, d: int) -> tuple[Factors, ...]:
    """Return the dims of a result that has the shape of its index; an unpadded index may have the bucket's shape."""
    dims = []
    for e in range(index.dim()):
        same = e != d and index.shape[e] == x.shape[e]
        dims.append(broadcast_dim([index.dims[e], x.dims[e]], call.sizes()) if same else index.dims[e])
    return tuple(dims)


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
            raise refuse(call, "how many positions a mask names depends on its values")
        dense = positions.dense
        if x.is_padded(d) and not is_rows_dim(x, d):
            ends = _end(call, x, d)
            check_bounds(x, d, positions, ends)
            dense = torch.where(dense < 0, dense + ends, dense)
        dense = PaddedValue(dense, positions.dims, positions.sizes).filled(x.shape[d] if slot and not at else 0)
        at.append(d)
        found.append(dense)
    if not at:
        raise refuse(call, "it names no positions")
    return found, at


def _end(call: PaddedCall, x: PaddedValue, d: int) -> Tensor:
    """Return the end that negative positions count from: in a ragged dim, the length of the indexed row."""
    if _has_one_size(x, d):
        return torch.as_tensor(x.size(d))
    if len(x.dims[d]) == 1:
        for e, positions in enumerate(call["indices"]):
            if positions is not None and is_rows_dim(x, e):
                return torch.as_tensor(x.size(d))[positions.filled(0)]
    raise refuse(call, "negative positions of a ragged or flattened dim count from different ends")


def _differs_by_row(x: PaddedValue, d: int) -> bool:
    return not _has_one_size(x, d) and not is_rows_dim(x, d) and len(x.dims[d]) == 1


def _index_each_row(x: PaddedValue, d: int, index: PaddedValue) -> PaddedValue:
    """Read the same positions of each row of a ragged batch; negative ones count from the row's end."""
    check_bounds(x, d, index, _min_end(x, d))
    positions = index.filled(0)
    ends = torch.as_tensor(x.size(d)).unsqueeze(-1)
    return gather_along(x, d, torch.where(positions < 0, positions + ends, positions), index.dims[0])


def _min_end(x: PaddedValue, d: int) -> Tensor:
    """Return the true size of a dim; for a ragged dim, that of its shortest row."""
    return torch.as_tensor(x.size(d)).min()


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


@table.register(aten.embedding)
def embedding(call: PaddedCall) -> PaddedValue:
    """Read a row of the table for each index; padding adds nothing to the table's gradient."""
    weight, indices = call["weight"], call["indices"]
    if weight.is_padded(0):
        raise refuse(call, "the table itself is padded")
    if call["scale_grad_by_freq"] and indices.padded_dims:
        # A row's gradient is divided by its number of occurrences, so padding reads an extra row.
        rows = torch.cat([weight.dense, weight.dense.new_zeros(1, weight.shape[1])])
        out = call.dense({"weight": rows, "indices": indices.filled(weight.shape[0])})
    else:
        out = call.dense({"weight": weight.dense, "indices": indices.filled(0)})
    return result(out, [*indices.dims, weight.dims[1]], call.sizes()).gradient_masked()


@table.register(aten.embedding_renorm)
def embedding_renorm(call: PaddedCall) -> PaddedValue:
    """Return the table with the norms of the rows that occur limited."""
    weight, indices = call["self"], call["indices"]
    if weight.padded_dims:
        raise refuse(call, "the table itself is padded")
    count = weight.shape[0]
    occurs = torch.zeros(count + 1, dtype=torch.bool, device=weight.dense.device)
    occurs = occurs.index_fill(0, indices.filled(count).reshape(-1), True)[:count, None]
    norm = torch.linalg.vector_norm(weight.dense, call["norm_type"], 1, keepdim=True)
    shorter = weight.dense * (call["max_norm"] / (norm + 1e-7))
    out = torch.where(occurs & (norm > call["max_norm"]), shorter, weight.dense)
    return PaddedValue(out, weight.dims)


@table.register(aten.one_hot)
def one_hot(call: PaddedCall) -> PaddedValue:
    """Return for each index a row of zeros with a one at that position."""
    x: PaddedValue = call["self"]
    if call["num_classes"] < 0:
        raise refuse(call, "without num_classes the result's size depends on values")
    out = call.dense({"self": x.filled(0)})
    return result(out, [*x.dims, *static_dims([call["num_classes"]])], x.sizes)


_watching: list[Callable[[str], None]] = []


@contextmanager
def checked_bounds(report: Callable[[str], None]) -> Iterator[None]:
    """Report positions beyond the true size inside the context.

    Args:
        report: called with a description.
    """
    _watching.append(report)
    try:
        yield
    finally:
        _watching.pop()


def check_bounds(x: PaddedValue, d: int, index: PaddedValue, ends: Tensor | int | None = None) -> None:
    """Report positions beyond the true size of a dim, in the debug mode and where values are known.

    Args:
        x: the indexed value.
        d: the dim.
        index: the positions.
        ends: the exclusive bound of each position, broadcastable to the index; by default the true size of the dim, for
            an index with the dims of `x`.
    """
    if not _watching or not x.is_padded(d) or is_traced(index.dense):
        return
    if index.dense.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if ends is None:
        ends = x.size(d)
        if isinstance(ends, Tensor) and ends.dim():
            ends = ends.view([-1 if e == rows_dim(x) else 1 for e in range(x.dim())])
    positions = index.filled(-1)
    beyond = positions >= ends
    if bool(beyond.any()):
        worst = int(positions[beyond.expand(positions.shape)].max())
        _watching[-1](f"position {worst} of dim {d} is padding: the true size there is less; count to x.count({d})")
