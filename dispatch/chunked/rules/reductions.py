"""Reductions: over other dims in each chunk; over the rows by combining the parts of the chunks. A softmax is two."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, PerChunk, emit, replicated
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, chunk_dim_size, infer, record
from subtensors.dispatch.ops.dims import listed
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.reduction_dims import SUM, monoid_of
from subtensors.dispatch.ops.tree import PyTree
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@RULES.register(OpClass.REDUCTION, across=True)
def reduction(call: ChunkedCall) -> PyTree:
    """Reduce the rows: combine the chunks' results by the op's monoid, or as `OVER_ROWS` says."""
    (value,) = call.values
    merge, monoid = OVER_ROWS.get(call.op.overloadpacket), monoid_of(call.op)
    if merge is not None:
        return merge(call, value, listed(call.get("dim"), value.ndim))
    if monoid is None:
        raise call.unchunkable("it reduces over the rows")
    if monoid is SUM:
        return call.emit([Combine.SUM])
    return _stacked(call, value, monoid.combine, 0)


def sum_over_rows(value: LazyValue, dims: list[int], keepdim: bool, dtype: torch.dtype) -> LazyValue:
    """Record the sum over dims that hold the rows, accumulated in float32 or wider."""
    call = ChunkedCall(aten.sum.dim_IntList, (value, dims, keepdim), {"dtype": arithmetic_dtype(dtype)})
    return cast(call.emit([Combine.SUM]), dtype)


def cast(value: LazyValue, dtype: torch.dtype) -> LazyValue:
    """Return the value in a dtype."""
    out: LazyValue = value if value.dtype == dtype else record(aten._to_copy.default, value, dtype=dtype)
    return out


def _sum(call: ChunkedCall, value: LazyValue, dims: list[int]) -> LazyValue:
    return sum_over_rows(value, dims, call.get("keepdim", False), call.infer().dtype)


def _mean(call: ChunkedCall, value: LazyValue, dims: list[int]) -> LazyValue:
    dtype = call.infer().dtype
    summed = sum_over_rows(value, dims, call.get("keepdim", False), arithmetic_dtype(dtype))
    count = math.prod(value.shape[d] for d in dims)
    return cast(record(aten.div.Tensor, summed, count), dtype)


def _stacked(call: ChunkedCall, value: LazyValue, merge: Callable[..., Tensor], *options: int) -> LazyValue:
    """Record each chunk's result, stacked, and a merge of the stack."""
    meta = call.infer()
    parts = call.emit([Combine.STACK], metas=meta)
    merged: LazyValue = emit(merge, (parts, *options), {}, meta)
    return merged


def _norm(call: ChunkedCall, value: LazyValue, dims: list[int]) -> LazyValue:
    order = call["ord"] if "ord" in call else call["p"]
    order = 2.0 if order is None else float(order)

    def merge(stack: Tensor) -> Tensor:
        return stack.sum(0) if order == 0 else torch.linalg.vector_norm(stack, order, dim=0)

    dtype = call.infer().dtype
    wide = arithmetic_dtype(dtype)
    if wide != dtype:
        keepdim = call.get("keepdim", False)
        wider = ChunkedCall(aten.linalg_vector_norm.default, (value, order, dims, keepdim), {"dtype": wide})
        return cast(_stacked(wider, value, merge), dtype)
    return _stacked(call, value, merge)


class _ExtremeContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor]


class _Extreme(torch.autograd.Function):
    """The largest (or smallest) of the chunks' extremes; its gradient is divided among all elements that equal it.

    A chunk's own extreme divides its part among its ties, so a chunk with k of the n ties gets k / n.
    """

    @staticmethod
    def forward(ctx: _ExtremeContext, stack: Tensor, ties: Tensor, largest: bool) -> Tensor:
        best = stack.amax(0) if largest else stack.amin(0)
        ctx.save_for_backward(torch.where(stack == best, ties, 0))
        return best

    @staticmethod
    def backward(ctx: _ExtremeContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (ties,) = ctx.saved_tensors
        return grads[0] * (ties / ties.sum(0)).to(grads[0].dtype), None, None


def _extreme(call: ChunkedCall, value: LazyValue, dims: list[int], largest: bool) -> LazyValue:
    meta, keepdim = call.infer(), call.get("keepdim", False)

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        best = x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
        ties = (x.detach() == best.detach()).sum(dims, keepdim=keepdim)
        return (best if keepdim else best.squeeze(dims)), ties

    metas = (meta, torch.empty(meta.shape, dtype=torch.int64, device="meta"))
    best, ties = emit(parts, (value,), {}, metas, [Combine.STACK, Combine.STACK])

    def merge(stack: Tensor, ties: Tensor) -> Tensor:
        if not stack.dtype.is_floating_point:
            return stack.amax(0) if largest else stack.amin(0)
        out: Tensor = _Extreme.apply(stack, ties, largest)  # type: ignore[no-untyped-call]
        return out

    merged: LazyValue = emit(merge, (best, ties), {}, meta)
    return merged


def _extreme_and_position(call: ChunkedCall, value: LazyValue, dims: list[int], largest: bool) -> PyTree:
    """Record the extreme of the rows and its position, those of the first chunk that has it."""
    layout = value.row_layout
    only_positions = call.op.overloadpacket in (aten.argmax, aten.argmin)
    if call["dim"] is None:
        raise call.unchunkable("it counts positions over all dims")
    (dim,), keepdim = dims, call.get("keepdim", False)
    metas = infer(aten.max.dim, (value, dim, keepdim), {})
    if layout.runs != 1:
        raise call.unchunkable("its rows lie in several runs")

    def parts(x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        best = x.max(dim, keepdim) if largest else x.min(dim, keepdim)
        return best.values, best.indices + start

    start = PerChunk(lambda span: layout.window(span)[0])
    stacks = emit(parts, (value, start), {}, tuple(metas), [Combine.STACK, Combine.STACK])

    def merge(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        which = (values.argmax(0) if largest else values.argmin(0))[None]
        return values.gather(0, which)[0], indices.gather(0, which)[0]

    best, positions = emit(merge, tuple(stacks), {}, tuple(metas))
    return positions if only_positions else (best, positions)


def _max(call: ChunkedCall, value: LazyValue, dims: list[int], largest: bool) -> PyTree:
    return (_extreme_and_position if "dim" in call else _extreme)(call, value, dims, largest)


def _variance(call: ChunkedCall, value: LazyValue, dims: list[int]) -> PyTree:
    """Record the variance in two passes: the mean, then the mean square of the differences from it."""
    keepdim, packet = call.get("keepdim", False), call.op.overloadpacket
    correction = call["correction"] if "correction" in call else (1 if call["unbiased"] in (None, True) else 0)
    count = math.prod(value.shape[d] for d in dims)
    accurate, real = cast(value, arithmetic_dtype(value.dtype)), value.dtype.to_real()
    mean = record(aten.mean.dim, accurate, dims, True)
    squares = _squared_magnitudes(record(aten.sub.Tensor, accurate, mean))
    left = max(count - (1 if correction is None else correction), 0)
    scaled = record(aten.div.Tensor, sum_over_rows(squares, dims, keepdim, squares.dtype), left)
    spread = cast(record(aten.sqrt.default, scaled) if packet in (aten.std, aten.std_mean) else scaled, real)
    if packet not in (aten.var_mean, aten.std_mean):
        return spread
    mean = cast(mean if keepdim else record(aten.squeeze.dims, mean, dims), value.dtype)
    return spread, mean


def _squared_magnitudes(value: LazyValue) -> LazyValue:
    if not value.dtype.is_complex:
        return record(aten.pow.Tensor_Scalar, value, 2)  # type: ignore[no-any-return]
    squares = record(aten.pow.Tensor_Scalar, record(aten.view_as_real.default, value), 2)
    return record(aten.sum.dim_IntList, squares, [-1])  # type: ignore[no-any-return]


@RULES.register(aten._softmax, aten._log_softmax, across=True)
def softmax(call: ChunkedCall, dim: int) -> LazyValue:
    """Record exp(x - M) / S over the rows, with their maximum M and S = sum exp(x - M)."""
    (value,), dtype = call.chunked, call.infer().dtype
    accurate = cast(value, arithmetic_dtype(dtype))
    top = record(aten.amax.default, record(aten.detach.default, accurate), [dim], True)
    shifted = record(
        aten.sub.Tensor, accurate, record(aten.where.ScalarOther, record(aten.isfinite.default, top), top, 0)
    )
    exponentials = record(aten.exp.default, shifted)
    total = record(aten.sum.dim_IntList, exponentials, [dim], True)
    if call.op is aten._log_softmax.default:
        return cast(record(aten.sub.Tensor, shifted, record(aten.log.default, total)), dtype)
    return cast(record(aten.div.Tensor, exponentials, total), dtype)


@RULES.register(aten.native_group_norm)
def group_norm(call: ChunkedCall) -> PyTree:
    """Normalize the samples of each chunk, with replicated weights."""
    value: LazyValue = call["input"]
    layout = value.layout
    if layout is None or layout.dim != 0:
        raise call.unchunkable("it normalises the rows, or they are not its input's")
    metas = call.infer()
    call.replace("N", chunk_dim_size(layout))
    return call.emit([layout] * 3, lambda v: v if v is value else replicated(v), metas=metas)


# Sums are accumulated in a wider dtype; the gradient of an extreme is divided among its ties; the rest has no monoid.
OVER_ROWS: dict[OpOverloadPacket, Callable[[ChunkedCall, LazyValue, list[int]], PyTree]] = {
    aten.sum: _sum,
    aten.nansum: lambda call, value, dims: _sum(
        call, record(aten.nan_to_num.default, value, 0.0, math.inf, -math.inf), dims
    ),
    aten.mean: _mean,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten.amax: partial(_extreme, largest=True),
    aten.amin: partial(_extreme, largest=False),
    aten.max: partial(_max, largest=True),
    aten.min: partial(_max, largest=False),
    aten.argmax: partial(_extreme_and_position, largest=True),
    aten.argmin: partial(_extreme_and_position, largest=False),
    aten.var: _variance,
    aten.std: _variance,
    aten.var_mean: _variance,
    aten.std_mean: _variance,
}
