"""Sorting and ranking: padding sorts behind every real element, ties included, since it stands behind them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.padded_value import PaddedValue, host_sizes, plain, result
from subtensors.dispatch.padded.reductions import greatest, least, wrap_reduced
from subtensors.dispatch.sizes.dim_factors import is_prefix, static_dims

aten = torch.ops.aten


def in_order(call: PaddedCall, x: PaddedValue, d: int, descending: bool) -> tuple[PaddedValue, PaddedValue]:
    """Values and positions in order, the real ones first. A sort puts NaN above all numbers."""
    if not is_prefix(x.dims[d]):
        raise refuse(call, "a position in a flattened dim counts its padding")
    dtype = x.dense.dtype
    last = least(dtype) if descending else (math.nan if dtype.is_floating_point else greatest(dtype))
    values, positions = torch.sort(x.filled(last, [d]), dim=d, descending=descending, stable=True)
    return x.like(values).gradient_masked(), x.like(positions)


@table.register(aten.sort, aten.argsort, aten.msort)
def sort(call: PaddedCall) -> Any:
    """Elements in order."""
    x: PaddedValue = call["self"]
    if x.dim() == 0:
        return tree_map_only(Tensor, x.like, call.dense())
    d = call.get("dim", 0 if call.op.overloadpacket is aten.msort else -1) % x.dim()
    if not x.is_padded(d):
        return tree_map_only(Tensor, x.like, call.dense())
    values, positions = in_order(call, x, d, bool(call.get("descending", False)))
    only = {aten.argsort: positions, aten.msort: values}.get(call.op.overloadpacket)
    return only if only is not None else (values, positions)


@table.register(aten.topk)
def topk(call: PaddedCall) -> Any:
    """The k greatest or least."""
    x: PaddedValue = call["self"]
    d = call["dim"] % max(x.dim(), 1)
    k = static_dims([call["k"]])
    dims = [*x.dims[:d], *k, *x.dims[d + 1 :]] if x.dim() else []
    if x.dim() == 0 or not x.is_padded(d):
        return tree_map_only(Tensor, lambda t: result(t, dims, x.sizes), call.dense())
    _require_enough(x, d, call["k"])
    ranked = in_order(call, x, d, call["largest"])
    return tuple(result(r.dense.narrow(d, 0, call["k"]), dims, x.sizes) for r in ranked)


@table.register(aten.kthvalue)
def kthvalue(call: PaddedCall) -> Any:
    """The element of rank k."""
    x: PaddedValue = call["self"]
    d = call["dim"] % max(x.dim(), 1)
    if x.dim() == 0 or not x.is_padded(d):
        return wrap_reduced(call.dense(), x, [d], call["keepdim"])
    _require_enough(x, d, call["k"])
    found = [r.dense.narrow(d, call["k"] - 1, 1) for r in in_order(call, x, d, descending=False)]
    return wrap_reduced(tuple(f if call["keepdim"] else f.squeeze(d) for f in found), x, [d], call["keepdim"])


@table.register(OpClass.SORT_SELECT)
def unaware(call: PaddedCall) -> Any:
    """Any other selection along one dim: right over a dim without padding."""
    x = call.values[0]
    if len(call.values) > 1 or not isinstance(call.get("dim"), int) or not isinstance(call.get("keepdim"), bool):
        raise refuse(call, "what it selects depends on where padding stands")
    d = call["dim"] % max(x.dim(), 1)
    if x.is_padded(d):
        raise refuse(call, "what it selects depends on where padding stands")
    return wrap_reduced(call.dense(), x, [d], call["keepdim"])


@table.register(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(call: PaddedCall) -> PaddedValue:
    """Test whether each element is among the valid test elements."""
    tests = call.get("test_elements")
    if not isinstance(tests, PaddedValue) or not tests.padded_dims:
        elements = call["elements"]
        return elements.like(call.dense())  # type: ignore[no-any-return]
    mask = tests.mask()
    given = call.get("elements", call.get("element"))
    elements = given if isinstance(given, PaddedValue) else plain(torch.as_tensor(given, device=tests.dense.device))
    equal = elements.dense.unsqueeze(-1) == tests.dense.reshape(-1)
    equal = equal if mask is None else equal & mask.expand(tests.shape).reshape(-1)
    found = equal.any(-1)
    return elements.like(~found if call["invert"] else found)


@table.register(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def searchsorted(call: PaddedCall) -> PaddedValue:
    """Find where values belong in a sorted sequence, whose padding counts as above them all."""
    sequence = call.get("sorted_sequence", call.get("boundaries"))
    values: PaddedValue = call["self"]
    if sequence.dim() > 1 or call.get("sorter") is not None:
        raise refuse(call, "each row of the sequence has values of its own")
    if not sequence.padded_dims:
        return values.like(call.dense())
    if sequence.dense.is_floating_point():
        raise refuse(call, "NaN sorts above the infinity that stands in the padding")
    name = "sorted_sequence" if "sorted_sequence" in call else "boundaries"
    found = call.dense({name: sequence.filled(greatest(sequence.dense.dtype))})
    size = sequence.size(0)
    if isinstance(size, Tensor) and size.dim():
        raise refuse(call, "each row of the sequence has values of its own")
    found = torch.minimum(found, torch.as_tensor(size, dtype=found.dtype, device=found.device))
    return values.like(found) if values.padded_dims else plain(found)


def _require_enough(x: PaddedValue, d: int, k: int) -> None:
    for size in host_sizes(x, d) or ():
        if k > size:
            raise RuntimeError(f"selected index k out of range: {k} of a dim of true size {size}")
