"""Selections whose length depends on values: nonzero, a bool index, unique. Their results are unpadded.

The valid elements of a padded tensor are in the order of the unpadded one, so a selection among them is the same. Its
length is unknown beforehand: a compiler and a graph capture get an error, as they do for plain tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.ops.errors import DataDependentCall, UnsupportedCall
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_value import PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, broadcast_dim, same_factors
from subtensors.dispatch.padded.positions import in_valid
from subtensors.dispatch.sizes.dim_factors import bucket_of, is_prefix, static_dims, with_dim
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


@table.register(aten.nonzero)
def nonzero(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """The positions of nonzero elements; padding counts as zero."""
    require_values(call)
    out = call.dense({"self": x.filled(0)})
    positions = [in_valid(x, d, found) for d, found in enumerate(out.unbind(1))]
    return unpadded_value(torch.stack(positions, 1) if positions else out)


@table.register(aten.nonzero_static)
def nonzero_static(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """The positions of nonzero elements, as many as the caller asks for."""
    if not all(map(is_prefix, x.dims)):
        raise UnsupportedCall("its fill value is no position of a flattened dim")
    return unpadded_value(call.dense({"self": x.filled(0)}))


@table.register(aten.masked_select)
def masked_select(call: PaddedCall, x: PaddedValue, mask: PaddedValue) -> PaddedValue:
    """The valid elements under a mask."""
    require_values(call)
    return unpadded_value(call.dense({"mask": _valid_under(x, mask)}))


def _valid_under(x: PaddedValue, mask: PaddedValue) -> Tensor:
    """Return a mask without the positions that are padding of it or of a value that it broadcasts with."""
    dims, sizes = broadcast([x, mask])
    valid = PaddedValue(mask.dense.expand(list(map(bucket_of, dims))), dims, sizes).mask()
    return mask.dense if valid is None else mask.dense & valid


def index_by_mask(call: PaddedCall, x: PaddedValue, at: int, mask: PaddedValue) -> PaddedValue:
    """`x[..., mask]` with a bool mask of some adjacent dims, from the dim `at` on."""
    require_values(call)
    over, sizes = range(at, at + mask.dim()), call.sizes()
    dims = [broadcast_dim([mask.dims[i], x.dims[d]], sizes) for i, d in enumerate(over)]
    valid = PaddedValue(x.dense, (*x.dims[:at], *dims, *x.dims[over.stop :]), sizes).mask(over)
    chosen = mask.dense
    if valid is not None:
        if any(size != 1 for d, size in enumerate(valid.shape) if d not in over):
            raise UnsupportedCall("its valid positions differ from row to row")
        chosen = chosen & valid.reshape([valid.shape[d] for d in over])
    out = call.dense({"indices": [*[None] * at, chosen]})
    return result(out, [*x.dims[:at], *static_dims([out.shape[at]]), *x.dims[over.stop :]], x.sizes).gradient_masked()


@table.register(aten.masked_scatter)
def masked_scatter(call: PaddedCall, x: PaddedValue, mask: PaddedValue, source: PaddedValue) -> PaddedValue:
    """Write the elements of a source, in order, to the valid positions under a mask."""
    dims, sizes = broadcast([x, mask])
    changed = {"source": valid_first(source), "mask": _valid_under(x, mask)}
    return result(call.dense(changed), dims, sizes).gradient_masked()


@table.register(aten._unique2, aten._unique, aten.unique_consecutive)
def unique(call: PaddedCall, x: PaddedValue, return_inverse: bool, dim: int | None = None) -> PyTree:
    """The values of valid elements; of consecutive ones, one for each run of equal ones."""
    if dim is not None:
        return unique_along(call, x, return_inverse, dim)
    require_values(call)
    mask = x.mask_of_all()
    values, inverse, *counts = call.dense({"self": x.dense[mask]})
    if not return_inverse:
        return tuple(map(unpadded_value, (values, inverse, *counts)))
    placed = torch.zeros(x.shape, dtype=inverse.dtype, device=inverse.device)
    placed[mask] = inverse
    return (unpadded_value(values), x.like(placed), *map(unpadded_value, counts))


@table.register(aten.unique_dim, aten.unique_dim_consecutive)
def unique_along(call: PaddedCall, x: PaddedValue, return_inverse: bool, dim: int) -> PyTree:
    """The unique slices of a dim; padding inside of them is filled alike."""
    require_values(call)
    d = dim % max(x.dim(), 1)
    if x.sizes is not None and x.sizes.rows is not None:
        raise UnsupportedCall("rows of different lengths cannot be compared as slices")
    if not x.dim() or not is_prefix(x.dims[d]):
        raise UnsupportedCall("a position in a flattened dim counts its padding")
    dense, valid = x.filled(0), x.mask([d])
    if valid is not None:
        dense = dense.index_select(d, valid.reshape(-1).nonzero().squeeze(1))
    values, inverse, counts = call.dense({"self": dense})
    if return_inverse:
        where = result(torch.constant_pad_nd(inverse, (0, x.shape[d] - inverse.shape[0])), [x.dims[d]], x.sizes)
    else:
        where = unpadded_value(inverse)
    found = result(values, with_dim(x.dims, d, static_dims([values.shape[d]])[0]), x.sizes)
    return found, where, unpadded_value(counts)


@table.register(aten.bincount)
def bincount(call: PaddedCall, x: PaddedValue, weights: PaddedValue | None) -> PaddedValue:
    """Count how often each number occurs, or sum its weights."""
    require_values(call)
    dims, sizes = broadcast(call.values)
    mask = PaddedValue(x.dense, dims, sizes).mask_of_all()
    given = {} if weights is None else {"weights": weights.dense[mask]}
    return unpadded_value(call.dense({"self": x.dense[mask], **given}))


@table.register(aten.equal, aten.allclose)
def all_equal(call: PaddedCall, x: PaddedValue, other: PaddedValue) -> bool:
    """Return whether all valid elements are equal, or close, as a Python bool."""
    require_values(call)
    dims = zip(x.dims, other.dims, strict=False)
    if x.dim() != other.dim() or not all(same_factors(f, g, call.sizes()) for f, g in dims):
        raise UnsupportedCall("whether their sizes are the same")
    if call.op is aten.equal.default:
        same = x.dense == other.dense
    else:
        same = torch.isclose(x.dense, other.dense, call["rtol"], call["atol"], call["equal_nan"])
    return bool(same[x.mask_of_all()].all())


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


@table.register(aten._linalg_check_errors)
def check_errors(call: PaddedCall, info: PaddedValue) -> None:
    """Raise if the op failed on a valid matrix."""
    call.dense({"info": info.edge_filled()})
