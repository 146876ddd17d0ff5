"""Ops along some dims (normalization, scan, sort, pooling): where those aren't chunked, each chunk runs alone."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, emit, replicated
from subtensors.dispatch.chunked.record import (
    RULES,
    ChunkedCall,
    chunk_dim_size,
    infer,
    record,
)
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@RULES.register(aten._softmax, aten._log_softmax, across=True)
def softmax(call: ChunkedCall) -> LazyValue:
    """Compute exp(x - M) / S with the rows' maximum M and S = sum exp(x - M), which are found by a pass of their own.

    A chunk computes its maximum m and s = sum exp(x - m); then M = max m and S = sum s exp(m - M).
    """
    (value,) = call.chunked
    layout, dim, dtype = value.layout, call["dim"], call.infer().dtype
    assert layout is not None
    accurate = cast(value, arithmetic_dtype(dtype))

    def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.detach().amax(dim, keepdim=True)
        top = torch.where(top.isfinite(), top, 0)
        return top, (x - top).exp().sum(dim, keepdim=True)

    def merge(maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        top = maxima.amax(0)
        return top, (sums * (maxima - top).exp()).sum(0)

    meta = infer(aten.amax.default, (accurate, [dim], True), {})
    stacks = emit(statistics, (accurate,), {}, (meta, meta), [Combine.STACK, Combine.STACK], layout.axis)
    top, total = emit(merge, tuple(stacks), {}, (meta, meta), [None, None], None)
    shifted = record(aten.sub.Tensor, accurate, record(aten.detach.default, top))
    if call.op is aten._log_softmax.default:
        return cast(record(aten.sub.Tensor, shifted, record(aten.log.default, total)), dtype)
    return cast(record(aten.div.Tensor, record(aten.exp.default, shifted), total), dtype)


@RULES.register(aten.native_group_norm)
def group_norm(call: ChunkedCall) -> PyTree:
    """Normalize the samples of each chunk, with replicated weights."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim != 0:
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    call.replace("N", chunk_dim_size(layout))
    return call.emit([layout] * 3, layout.axis, lambda v: v if v is value else replicated(v), metas=metas)
