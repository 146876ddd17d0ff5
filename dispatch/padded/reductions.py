"""Reductions: padding is filled with the op's neutral element, and counts are those of valid elements.

A reduction f over padded dims is `f(where(mask, x, e))` with e neutral for f. A reduction that divides by a number of
elements divides by that of valid ones, which the device computes from the true sizes: mean = sum / count and
var = sum((x - mean)^2) / (count - correction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.dims import listed
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.reduction_dims import LOGSUMEXP, max_value, min_value, monoid_of
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, require_elements, table
from subtensors.dispatch.padded.padded_value import PaddedValue, ScatteredDim, reduced_result
from subtensors.dispatch.sizes.dim_factors import is_prefix
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@table.register(OpClass.REDUCTION, across=True)
def reduction(call: PaddedCall, x: PaddedValue) -> PyTree:
    """Fill with the neutral element of the op's monoid, then reduce."""
    monoid = monoid_of(call.op)
    if monoid is None or len(call.values) > 1:
        raise refuse(call, "its neutral element is unknown")
    reduced = reduced_dims(call, x)
    if not monoid.has_identity:
        require_elements(call, x, reduced)
    if monoid is LOGSUMEXP and not (x.dense.is_floating_point() or x.dense.is_complex()):
        # No integer is neutral for logsumexp.
        x = x.like(x.dense.to(torch.get_default_dtype()))
    by_kernel = _by_kernel(call, x, reduced)
    if by_kernel is not None:
        return by_kernel
    out = call.dense({"self": x.filled(monoid.neutral(x.dense.dtype), reduced)})
    if isinstance(out, tuple):
        _require_prefix(call, x, reduced)
    return reduced_result(out, x, reduced, call.get("keepdim", False))


@table.register(aten.mean, across=True)
def mean(call: PaddedCall, x: PaddedValue, dtype: torch.dtype | None, keepdim: bool = False) -> PaddedValue:
    """Divide the sum by the count."""
    reduced = reduced_dims(call, x)
    dtype = dtype or x.dense.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be floating or complex. Got: {dtype}"
        )
    by_kernel = _by_kernel(call, x, reduced)
    if by_kernel is not None:
        return by_kernel  # type: ignore[no-any-return]
    total = torch.sum(x.filled(0, reduced), reduced, keepdim=True, dtype=arithmetic_dtype(dtype))
    out = (total / x.valid_count(reduced)).to(dtype)
    return reduced_result(_kept(out, reduced, keepdim), x, reduced, keepdim)  # type: ignore[no-any-return]


@table.register(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
                across=True)  # fmt: skip
def variance(call: PaddedCall, x: PaddedValue, correction: float | None, keepdim: bool) -> PyTree:
    """Divide the squared deviations from the mean by the count minus the correction."""
    reduced = reduced_dims(call, x)
    if not (x.dense.is_floating_point() or x.dense.is_complex()):
        # For integers torch raises its own error.
        return reduced_result(call.dense(), x, reduced, keepdim)
    correction = 1 if correction is None else correction
    if call.op is aten.var.correction:
        by_kernel = _by_kernel(call, x, reduced, correction=correction)
        if by_kernel is not None:
            return by_kernel
    dtype = x.dense.dtype
    values = x.filled(0, reduced).to(arithmetic_dtype(dtype))
    count = x.valid_count(reduced)
    average = values.sum(reduced, keepdim=True) / count
    mask = x.mask(reduced)
    distance = values - average if mask is None else torch.where(mask, values - average, 0)
    square = (distance * distance.conj()).real if distance.is_complex() else distance * distance
    squares = square.sum(reduced, keepdim=True) / (count - correction).clamp(min=0)
    name = call.op.overloadpacket
    spread = squares if name in (aten.var, aten.var_mean) else _root(squares)
    outs = [spread, average] if name in (aten.var_mean, aten.std_mean) else [spread]
    dtypes = (dtype.to_real(), dtype)
    results = [
        reduced_result(_kept(o.to(t), reduced, keepdim), x, reduced, keepdim)
        for o, t in zip(outs, dtypes, strict=False)
    ]
    return tuple(results) if len(results) > 1 else results[0]


def _root(squares: Tensor) -> Tensor:
    """Return the square root with a gradient of 0 at 0, as torch's standard deviation has."""
    is_zero = squares == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squares).sqrt())


@table.register(aten.linalg_vector_norm, aten.norm, aten.native_norm, aten.frobenius_norm, across=True)
def norm(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """sum(|x|^p)^(1/p): zero adds nothing; for p = -inf, or another negative p, infinity does."""
    order = call.get("ord", call.get("p", 2))
    order = 2 if order is None else order
    reduced = reduced_dims(call, x)
    if isinstance(order, int | float) and (order < 0 or order == math.inf):
        require_elements(call, x, reduced, RuntimeError)
    by_kernel = _by_kernel(call, x, reduced, p=order) if isinstance(order, int | float) else None
    if by_kernel is not None:
        return by_kernel  # type: ignore[no-any-return]
    return reduced_result(  # type: ignore[no-any-return]
        call.dense({"self": x.filled(math.inf if order < 0 else 0, reduced)}), x, reduced, call.get("keepdim", False)
    )


@table.register(aten.argmax, aten.argmin, across=True)
def argmax(call: PaddedCall, x: PaddedValue, dim: int | None, keepdim: bool) -> PaddedValue:
    """The position of an extreme; in the flattened tensor, positions count valid elements only."""
    extreme = min_value if call.op.overloadpacket is aten.argmax else max_value
    reduced = reduced_dims(call, x)
    require_elements(call, x, reduced, IndexError)
    _require_prefix(call, x, reduced)
    dense = x.filled(extreme(x.dense.dtype), reduced)
    out = call.dense({"self": dense})
    if dim is None:
        out = logical_position(call, x, out)
    return reduced_result(out, x, reduced, keepdim)  # type: ignore[no-any-return]


@table.register(aten.aminmax, across=True)
def aminmax(call: PaddedCall, x: PaddedValue, dim: int | None, keepdim: bool) -> PyTree:
    """The minimum and the maximum."""
    reduced = reduced_dims(call, x)
    require_elements(call, x, reduced)
    dtype = x.dense.dtype
    over = [] if dim is None else reduced
    low = torch.amin(x.filled(max_value(dtype), reduced), over, keepdim=keepdim)
    high = torch.amax(x.filled(min_value(dtype), reduced), over, keepdim=keepdim)
    return reduced_result((low, high), x, reduced, keepdim)


@table.register(aten.trace)
def trace(call: PaddedCall) -> PaddedValue:
    """The sum of the diagonal."""
    return apply(aten.sum.default, apply(aten.diagonal.default, call["self"]))


def _by_kernel(call: PaddedCall, x: PaddedValue, reduced: list[int], p: float = 2, correction: float = 1) -> PyTree:
    """Reduce with one kernel; return None if no kernel supports it."""
    if call.get("dtype") not in (None, x.dense.dtype) or call.op in (aten.prod.default,):
        return None
    out = kernels.reduced(call.op.overloadpacket, x, reduced, p, correction)
    if out is None:
        return None
    keepdim = call.get("keepdim", False)
    for d in sorted(reduced) if keepdim else ():
        out = out.unsqueeze(d)
    return reduced_result(out, x, reduced, keepdim)


def reduced_dims(call: PaddedCall, x: PaddedValue) -> list[int]:
    """Return the dims that a call reduces."""
    return listed(call.get("dim", call.get("dims")), x.dim())


def logical_position(call: PaddedCall, x: PaddedValue, position: Tensor) -> Tensor:
    """Convert a position in the flattened bucket to one in the flattened unpadded tensor."""
    out = torch.zeros_like(position)
    scale: Tensor | int = 1
    for d in reversed(range(x.dim())):
        index, position = position % x.shape[d], position // x.shape[d]
        out = out + index * scale
        size = x.size(d)
        if isinstance(size, Tensor) and size.dim():
            raise refuse(call, "a ragged batch has no flattened positions")
        scale = scale * size
    return out


def _require_prefix(call: PaddedCall, x: PaddedValue, dims: Sequence[int]) -> None:
    scattered = next((d for d in dims if not is_prefix(x.dims[d])), None)
    if scattered is not None:
        raise ScatteredDim(x, scattered)


def _kept(out: Tensor, reduced: Sequence[int], keepdim: bool) -> Tensor:
    return out if keepdim else out.squeeze(list(reduced))
