"""Ops along one dim or a few (normalisation, scan, sort): where those aren't chunked, each chunk does its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.bound_call import BoundCall, along, extent, largest, whole, wrapped
from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, emit, infer
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.dispatch.chunked.rules.table import RULES, record
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import tree_tensors
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@RULES.register(OpClass.SCAN, OpClass.SORT_SELECT, OpClass.NORMALISATION, aten.flip, aten.roll, aten.glu)
def sliced(call: BoundCall) -> Any:
    """A slice along the op's dims becomes a slice of the result, whatever the other slices hold."""
    if "dim" not in call and "dims" not in call:
        raise call.unchunkable("it has no dim to go along")
    leader = largest(call.chunked)
    layout = leader.layout
    assert layout is not None
    dims = call["dim"] if "dim" in call else call["dims"]
    if dims is None or dims == []:
        raise call.unchunkable("it goes along all dims")
    dims = [wrapped(d, leader.ndim) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if layout.dim in dims:
        if call.op in _SOFTMAX:
            return _softmax_along(call, leader)
        raise call.unchunkable("it goes along the rows")
    metas = call.infer()
    if any(v.ndim != leader.ndim for v in call.values):
        raise call.unchunkable("its operands have different numbers of dims")
    outs = [
        layout if m.ndim == leader.ndim else layout.at(layout.dim - sum(d < layout.dim for d in dims))
        for m in tree_tensors(metas)
    ]
    return call.emit(outs, layout.axis, lambda v: along(v, layout), metas=metas)


_SOFTMAX = {aten._softmax.default: False, aten._log_softmax.default: True}


def _softmax_along(call: BoundCall, value: LazyValue) -> LazyValue:
    """exp(x - M) / S with the rows' maximum M and S = sum exp(x - M), which a pass of its own finds.

    A chunk gives its maximum m and s = sum exp(x - m); then M = max m and S = sum s exp(m - M).
    """
    layout, dim, dtype = value.layout, call["dim"], call.infer().dtype
    assert layout is not None
    accurate = cast(value, arithmetic_dtype(dtype))

    def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.detach().amax(dim, keepdim=True)
        top = torch.where(top.isfinite(), top, 0)
        return top, (x - top).exp().sum(dim, keepdim=True)

    def merged(tops: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        top = tops.amax(0)
        return top, (sums * (tops - top).exp()).sum(0)

    meta = infer(aten.amax.default, (accurate, [dim], True), {})
    stacks = emit(statistics, (accurate,), {}, (meta, meta), [Combine.STACK, Combine.STACK], layout.axis)
    top, total = emit(merged, tuple(stacks), {}, (meta, meta), [None, None], None)
    below = record(aten.sub.Tensor, accurate, record(aten.detach.default, top))
    if _SOFTMAX[call.op]:
        return cast(record(aten.sub.Tensor, below, record(aten.log.default, total)), dtype)
    return cast(record(aten.div.Tensor, record(aten.exp.default, below), total), dtype)


@RULES.register(aten.native_layer_norm, aten._fused_rms_norm)
def layer_norm(call: BoundCall) -> Any:
    """The last dims are normalised, and weights are read whole."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim >= value.ndim - len(call["normalized_shape"]):
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    return call.emit(
        [layout] * len(tree_tensors(metas)), layout.axis, lambda v: v if v is value else whole(v), metas=metas
    )


@RULES.register(aten.native_group_norm)
def group_norm(call: BoundCall) -> Any:
    """Samples are normalised one by one, and weights are read whole."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim != 0:
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    call["N"] = extent(layout)
    return call.emit([layout] * 3, layout.axis, lambda v: v if v is value else whole(v), metas=metas)
