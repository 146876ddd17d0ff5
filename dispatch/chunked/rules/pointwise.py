"""Ops that compute each element from the operands at its place: every chunk computes its own."""

from __future__ import annotations

from typing import Any

import torch

from subtensors.dispatch.chunked.bound_call import BoundCall, broadcast, extent, largest, wrapped
from subtensors.dispatch.chunked.rules.table import RULES, record
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import tree_tensors

aten = torch.ops.aten


@RULES.register(OpClass.POINTWISE)
def pointwise(call: BoundCall) -> Any:
    """out[i] is a function of the broadcast operands at i, so a chunk of it needs their parts at the chunk's rows."""
    metas = call.infer()
    ndim = max(m.ndim for m in tree_tensors(metas))
    leader = largest(call.chunked)
    assert leader.layout is not None
    layout = leader.layout.at(leader.layout.dim + ndim - leader.ndim)
    if any(m.ndim != ndim or m.shape[layout.dim] != layout.extent for m in tree_tensors(metas)):
        raise call.unchunkable("its result is larger than its operands along the chunked dim")
    return call.emit(
        [layout] * len(tree_tensors(metas)), layout.axis, lambda v: broadcast(v, ndim, layout), metas=metas
    )


# Filled like their first operand, whose values they don't read.
@RULES.register(
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.scalar_tensor, aten.new_empty_strided
)
def like(call: BoundCall) -> Any:
    """A factory that takes sizes from a chunked operand is as chunked as that."""
    return pointwise(call)


@RULES.register(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def new(call: BoundCall) -> Any:
    """A factory with sizes of its own: chunked like its operand if they are the operand's.

    Its values depend on no chunk; chunked, it doesn't take the memory of the whole.
    """
    (source,) = call.chunked
    layout = source.layout
    assert layout is not None
    metas = call.infer()
    sizes = list(call["size"])
    dim = wrapped(layout.dim - source.ndim, len(sizes))
    if len(sizes) != source.ndim or sizes[dim] != layout.extent:
        # Its operand gives it dtype and device, and no values.
        nothing = torch.empty(0, dtype=source.dtype, device=source.device)
        return record(call.op, nothing, *call.positional[1:], **call.kwargs)
    layout = layout.at(dim)
    call["size"] = [extent(layout) if d == dim else size for d, size in enumerate(sizes)]
    return call.emit([layout], layout.axis, lambda v: v, metas=metas)
