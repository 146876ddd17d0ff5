"""Factories that take sizes from an operand, whose values they don't read."""

from __future__ import annotations

import torch

from subtensors.dispatch.chunked.record import (
    RULES,
    ChunkedCall,
    chunk_dim_size,
    normalized_dim,
    record,
)
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


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
