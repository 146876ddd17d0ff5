"""Selections whose length depends on values: nonzero, a bool index, unique. Their results are unpadded.

The valid elements of a padded tensor are in the order of the unpadded one, so a selection among them is the same. Its
length is unknown beforehand: a compiler and a graph capture get an error, as they do for plain tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.errors import DataDependentCall, UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, broadcast_dim, same_factors
from subtensors.dispatch.padded.positions import in_valid
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_prefix, static_dims
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


@table.register(aten.nonzero, aten.argwhere, aten.nonzero_numpy, aten.where.default)
def nonzero(call: PaddedCall) -> PyTree:
    """The positions of nonzero elements; padding counts as zero."""
    require_values(call)
    name = "condition" if "condition" in call else "self"
    x: PaddedValue = call[name]
    out = call.dense({name: x.filled(0)})
    each = out.unbind(1) if isinstance(out, Tensor) else out
    positions = [in_valid(call, x, d, found) for d, found in enumerate(each)]
    if not isinstance(out, Tensor):
        return [unpadded_value(found) for found in positions]
    return unpadded_value(torch.stack(positions, 1) if positions else out)


@table.register(aten.nonzero_static)
def nonzero_static(call: PaddedCall) -> PaddedValue:
    """The positions of nonzero elements, as many as the caller asks for."""
    x: PaddedValue = call["self"]
    if not all(map(is_prefix, x.dims)):
        raise UnsupportedCall("its fill value is no position of a flattened dim")
    return unpadded_value(call.dense({"self": x.filled(0)}))


@table.register(aten.masked_select)
def masked_select(call: PaddedCall) -> PaddedValue:
    """The valid elements under a mask."""
    require_values(call)
    dims, sizes = broadcast([call["self"], call["mask"]])
    mask = call["mask"].dense
    valid = PaddedValue(mask.expand(list(map(bucket_of, dims))), dims, sizes).mask()
    return unpadded_value(call.dense({"mask": mask if valid is None else mask & valid}))


def index_by_mask(call: PaddedCall) -> PaddedValue:
    """`x[..., mask]` with a bool mask of some adjacent dims."""
    require_values(call)
    x: PaddedValue = call["self"]
    at, mask = _bool_mask(call)
    over = range(at, at + mask.dim())
    dims = [broadcast_dim([mask.dims[i], x.dims[d]], call.sizes()) for i, d in enumerate(over)]
    combined = PaddedValue(x.dense, (*x.dims[:at], *dims, *x.dims[at + mask.dim() :]), call.sizes())
    valid = combined.mask(over)
    chosen = mask.dense
    if valid is not None:
        if any(size != 1 for d, size in enumerate(valid.shape) if d not in over):
            raise UnsupportedCall("its valid positions differ from row to row")
        chosen = chosen & valid.reshape([valid.shape[d] for d in over])
    out = call.dense({"indices": [*[None] * at, chosen]})
    selected = static_dims([out.shape[at]])
    return result(out, [*x.dims[:at], *selected, *x.dims[at + mask.dim() :]], x.sizes).gradient_masked()


def has_bool_mask(call: PaddedCall) -> bool:
    """Return whether the index of a call is a single bool mask."""
    indices = [i for i in call["indices"] if i is not None]
    return len(indices) == 1 and indices[0].dense.dtype == torch.bool and indices[0].dim() > 0


def _bool_mask(call: PaddedCall) -> tuple[int, PaddedValue]:
    return next((at, i) for at, i in enumerate(call["indices"]) if i is not None)


@table.register(aten.masked_scatter)
def masked_scatter(call: PaddedCall) -> PaddedValue:
    """Write the elements of a source, in order, to the valid positions under a mask."""
    x, mask, source = call["self"], call["mask"], call["source"]
    dims, sizes = broadcast([x, mask])
    shape = list(map(bucket_of, dims))
    valid = PaddedValue(x.dense.expand(shape), dims, sizes).mask()
    changed: dict[str, Tensor] = {"source": valid_first(source)}
    if valid is not None:
        changed["mask"] = mask.dense & valid
    return result(call.dense(changed), dims, sizes).gradient_masked()


@table.register(aten._unique2, aten._unique)
def unique(call: PaddedCall) -> PyTree:
    """The values of valid elements."""
    return _unique_values(call)


@table.register(aten.unique_consecutive)
def unique_consecutive(call: PaddedCall) -> PyTree:
    """The values of valid elements, one for each run of equal ones."""
    return _unique_values(call) if call["dim"] is None else unique_along(call)


def _unique_values(call: PaddedCall) -> PyTree:
    require_values(call)
    x: PaddedValue = call["self"]
    mask = _mask_of_all(x)
    values, inverse, *counts = call.dense({"self": x.dense[mask]})
    if not call.get("return_inverse"):
        return (unpadded_value(values), unpadded_value(inverse), *map(unpadded_value, counts))
    placed = torch.zeros(x.shape, dtype=inverse.dtype, device=inverse.device)
    placed[mask] = inverse
    return (unpadded_value(values), x.like(placed), *map(unpadded_value, counts))


@table.register(aten.unique_dim, aten.unique_dim_consecutive)
def unique_along(call: PaddedCall) -> PyTree:
    """The unique slices of a dim; padding inside of them is filled alike."""
    require_values(call)
    x: PaddedValue = call["self"]
    d = call["dim"] % max(x.dim(), 1)
    if x.sizes is not None and x.sizes.rows is not None:
        raise UnsupportedCall("rows of different lengths cannot be compared as slices")
    if not x.dim() or not is_prefix(x.dims[d]):
        raise UnsupportedCall("a position in a flattened dim counts its padding")
    dense = x.filled(0)
    valid = x.mask([d])
    if valid is not None:
        dense = dense.index_select(d, valid.reshape(-1).nonzero().squeeze(1))
    values, inverse, counts = call.dense({"self": dense})
    dims: list[Factors] = [*x.dims[:d], *static_dims([values.shape[d]]), *x.dims[d + 1 :]]
    if call.get("return_inverse"):
        widths = (0, x.shape[d] - inverse.shape[0])
        where = result(torch.constant_pad_nd(inverse, widths), [x.dims[d]], x.sizes)
    else:
        where = unpadded_value(inverse)
    return result(values, dims, x.sizes), where, unpadded_value(counts)


@table.register(aten.bincount)
def bincount(call: PaddedCall) -> PaddedValue:
    """Count how often each number occurs, or sum its weights."""
    require_values(call)
    x, weights = call["self"], call["weights"]
    dims, sizes = broadcast([x] if weights is None else [x, weights])
    mask = _mask_of_all(PaddedValue(x.dense, dims, sizes))
    changed = {"self": x.dense[mask]}
    if weights is not None:
        changed["weights"] = weights.dense[mask]
    return unpadded_value(call.dense(changed))


@table.register(aten.equal, aten.allclose)
def all_equal(call: PaddedCall) -> bool:
    """Return whether all valid elements are equal, or close, as a Python bool."""
    require_values(call)
    a, b = call["self"], call["other"]
    alike = a.dim() == b.dim() and all(same_factors(f, g, call.sizes()) for f, g in zip(a.dims, b.dims, strict=True))
    if not alike:
        raise UnsupportedCall("whether their sizes are the same")
    if call.op is aten.equal.default:
        same = a.dense == b.dense
    else:
        named = {name: call[name] for name in ("rtol", "atol", "equal_nan")}
        same = torch.isclose(a.dense, b.dense, **named)
    return bool(same[_mask_of_all(a)].all())


def valid_first(x: PaddedValue) -> Tensor:
    """Flatten all elements, the valid ones first, in their order."""
    flat, mask = x.dense.reshape(-1), x.mask()
    if mask is None:
        return flat
    order = mask.expand(x.shape).reshape(-1).logical_not().to(torch.uint8).argsort(stable=True)
    return flat.index_select(0, order)


def require_values(call: PaddedCall) -> None:
    """Raise DataDependentCall where values are unknown: under a compiler and in a graph capture."""
    for x in call.values:
        if is_traced(x.dense) or needs_host(x.dense, call.op.name()):
            raise DataDependentCall("the length of its result depends on values")


def _mask_of_all(x: PaddedValue) -> Tensor:
    mask = x.mask()
    if mask is None:
        return torch.ones(x.shape, dtype=torch.bool, device=x.dense.device)
    return mask.expand(x.shape)


@table.register(aten._linalg_check_errors)
def check_errors(call: PaddedCall, info: PaddedValue) -> None:
    """Raise if the op failed on a valid matrix."""
    call.dense({"info": info.edge_filled()})
