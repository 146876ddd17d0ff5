"""Pointwise ops, which every chunk computes for its rows, and factories that take sizes from an operand."""

from __future__ import annotations

import torch

from subtensors.dispatch.chunked.record import (
    RULES,
    ChunkedCall,
    broadcast,
    chunk_dim_size,
    largest,
    normalized_dim,
    record,
)
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree, tree_tensors

aten = torch.ops.aten


@RULES.register(OpClass.POINTWISE)
def pointwise(call: ChunkedCall) -> PyTree:
    """Run the op in each chunk: out[i] is a function of the broadcast operands at i."""
    metas = call.infer()
    ndim = max(m.ndim for m in tree_tensors(metas))
    leader = largest(call.chunked)
    assert leader.layout is not None
    layout = leader.layout.with_dim(leader.layout.dim + ndim - leader.ndim)
    if any(m.ndim != ndim or m.shape[layout.dim] != layout.dim_size for m in tree_tensors(metas)):
        raise call.unchunkable("its result is larger than its operands along the chunked dim")
    return call.emit(
        [layout] * len(tree_tensors(metas)), layout.axis, lambda v: broadcast(v, ndim, layout), metas=metas
    )


# Filled like their first operand, whose values they don't read.
@RULES.register(
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.scalar_tensor, aten.new_empty_strided
)
def like(call: ChunkedCall) -> PyTree:
    """Chunk a factory like the operand that it takes its sizes from."""
    return pointwise(call)


@RULES.register(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def new(call: ChunkedCall) -> PyTree:
    """Chunk a factory with sizes of its own if they are those of its operand.

    Its values depend on no chunk; chunked, it takes the memory of a chunk.
    """
    (source,) = call.chunked
    layout = source.layout
    assert layout is not None
    metas = call.infer()
    sizes = list(call["size"])
    dim = normalized_dim(layout.dim - source.ndim, len(sizes))
    if len(sizes) != source.ndim or sizes[dim] != layout.dim_size:
        # Its operand determines dtype and device, and no values.
        nothing = torch.empty(0, dtype=source.dtype, device=source.device)
        args, kwargs = call.with_values(lambda v: nothing)
        return record(call.op, *args, **kwargs)
    layout = layout.with_dim(dim)
    call.replace("size", [chunk_dim_size(layout) if d == dim else size for d, size in enumerate(sizes)])
    return call.emit([layout], layout.axis, lambda v: v, metas=metas)
