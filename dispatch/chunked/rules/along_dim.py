"""Ops along some dims (normalization, scan, sort, pooling): where those aren't chunked, each chunk runs alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, emit, replicated
from subtensors.dispatch.chunked.record import (
    RULES,
    BoundCall,
    chunk_dim_size,
    infer,
    largest,
    normalized_dim,
    record,
    sliced,
)
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree, tree_tensors
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@RULES.register(OpClass.SCAN, OpClass.SORT_SELECT, OpClass.NORMALISATION, aten.flip, aten.roll, aten.glu)
def along_unchunked_dims(call: BoundCall) -> PyTree:
    """Run the op in each chunk: each slice of the result depends on one slice of the operand along the op's dims."""
    if "dim" not in call and "dims" not in call:
        raise call.unchunkable("it has no dim to go along")
    leader = largest(call.chunked)
    layout = leader.layout
    assert layout is not None
    dims = call["dim"] if "dim" in call else call["dims"]
    if dims is None or dims == []:
        raise call.unchunkable("it goes along all dims")
    dims = [normalized_dim(d, leader.ndim) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if layout.dim in dims:
        if call.op in _SOFTMAX:
            return _softmax_along(call, leader)
        raise call.unchunkable("it goes along the rows")
    metas = call.infer()
    if any(v.ndim != leader.ndim for v in call.values):
        raise call.unchunkable("its operands have different numbers of dims")
    outs = [
        layout if m.ndim == leader.ndim else layout.with_dim(layout.dim - sum(d < layout.dim for d in dims))
        for m in tree_tensors(metas)
    ]
    return call.emit(outs, layout.axis, lambda v: sliced(v, layout), metas=metas)


_SOFTMAX: dict[OpOverload, bool] = {aten._softmax.default: False, aten._log_softmax.default: True}


def _softmax_along(call: BoundCall, value: LazyValue) -> LazyValue:
    """Compute exp(x - M) / S with the rows' maximum M and S = sum exp(x - M), which are found by a pass of their own.

    A chunk computes its maximum m and s = sum exp(x - m); then M = max m and S = sum s exp(m - M).
    """
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
    if _SOFTMAX[call.op]:
        return cast(record(aten.sub.Tensor, shifted, record(aten.log.default, total)), dtype)
    return cast(record(aten.div.Tensor, record(aten.exp.default, shifted), total), dtype)


@RULES.register(aten.native_layer_norm, aten._fused_rms_norm)
def layer_norm(call: BoundCall) -> PyTree:
    """Normalize the last dims in each chunk, with replicated weights."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim >= value.ndim - len(call["normalized_shape"]):
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    return call.emit(
        [layout] * len(tree_tensors(metas)), layout.axis, lambda v: v if v is value else replicated(v), metas=metas
    )


@RULES.register(aten.native_group_norm)
def group_norm(call: BoundCall) -> PyTree:
    """Normalize the samples of each chunk, with replicated weights."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim != 0:
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    call["N"] = chunk_dim_size(layout)
    return call.emit([layout] * 3, layout.axis, lambda v: v if v is value else replicated(v), metas=metas)


# op: the number of dims of a batch, and the operands that hold samples; the others are replicated.
SAMPLES: dict[OpOverload | OpOverloadPacket, tuple[int, tuple[str, ...]]] = {
    aten.avg_pool2d: (4, ("self",)),
    aten.avg_pool3d: (5, ("self",)),
    aten._adaptive_avg_pool2d: (4, ("self",)),
    aten._adaptive_avg_pool3d: (5, ("self",)),
    aten.adaptive_max_pool2d: (4, ("self",)),
    aten.adaptive_max_pool3d: (5, ("self",)),
    aten.max_pool2d_with_indices: (4, ("self",)),
    aten.max_pool3d_with_indices: (5, ("self",)),
    aten.reflection_pad2d: (4, ("self",)),
    aten.reflection_pad3d: (5, ("self",)),
    aten.replication_pad2d: (4, ("self",)),
    aten.replication_pad3d: (5, ("self",)),
    aten.upsample_nearest1d.default: (3, ("self",)),
    aten.upsample_nearest2d.default: (4, ("self",)),
    aten.upsample_linear1d.default: (3, ("self",)),
    aten.upsample_bilinear2d.default: (4, ("self",)),
    aten.upsample_bicubic2d.default: (4, ("self",)),
    aten.grid_sampler_2d: (4, ("input", "grid")),
    aten.grid_sampler_3d: (5, ("input", "grid")),
    aten.pixel_shuffle: (4, ("self",)),
    aten.pixel_unshuffle: (4, ("self",)),
    aten.im2col: (4, ("self",)),
    aten.col2im: (3, ("self",)),
    aten.convolution: (0, ("input",)),
}


@RULES.register(*SAMPLES)
def samples(call: BoundCall) -> PyTree:
    """Run a batched op (pooling, resampling, convolution) on the samples of each chunk: samples are independent."""
    ndim, names = SAMPLES.get(call.op) or SAMPLES[call.op.overloadpacket]
    value: LazyValue = call[names[0]]
    layout = value.layout
    # A batched input of a convolution has as many dims as its weight.
    ndim = ndim or call["weight"].ndim
    if layout is None or layout.dim != 0 or layout.runs != 1 or value.ndim != ndim:
        raise call.unchunkable("it is not chunked along its samples")
    if call.op.overloadpacket is aten.convolution and call["weight"].layout is not None:
        raise call.unchunkable("its weight is chunked")
    metas = call.infer()
    by_sample = [call[name] for name in names]
    return call.emit(
        [layout] * len(tree_tensors(metas)),
        layout.axis,
        lambda v: sliced(v, layout) if any(v is s for s in by_sample) else replicated(v),
        metas=metas,
    )
