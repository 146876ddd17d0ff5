"""Reductions: padding is filled with the op's neutral element, and counts are those of valid elements.

A reduction f over padded dims is `f(where(mask, x, e))` with e neutral for f. A reduction that divides by a number of
elements divides by that of valid ones, which the device computes from the true sizes: mean = sum / count and
var = sum((x - mean)^2) / (count - correction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, table
from subtensors.dispatch.padded.padded_value import Number, PaddedValue, ScatteredDim, known_sizes, reduced_result
from subtensors.dispatch.sizes.dim_factors import is_prefix
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


def min_value(dtype: torch.dtype) -> Number:
    """Return the lower bound of the values of a dtype."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def max_value(dtype: torch.dtype) -> Number:
    """Return the upper bound of the values of a dtype."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _zero(dtype: torch.dtype) -> Number:
    return 0


def _one(dtype: torch.dtype) -> Number:
    return 1


NEUTRAL: dict[OpOverload | OpOverloadPacket, Callable[[torch.dtype], Number]] = {
    aten.sum: _zero,
    aten.nansum: _zero,
    aten.count_nonzero: _zero,
    aten.any: _zero,
    aten._is_any_true: _zero,
    aten.all: _one,
    aten._is_all_true: _one,
    aten.prod: _one,
    aten.amax: min_value,
    aten.amin: max_value,
    aten.max.default: min_value,
    aten.min.default: max_value,
    aten.max.dim: min_value,
    aten.min.dim: max_value,
    aten.logsumexp: min_value,
}
"""The neutral element of each reduction. Of equal elements max.dim and min.dim give the first, which is a valid one."""

_EXTREMES = frozenset([aten.amax, aten.amin, aten.max, aten.min])


@table.register(*NEUTRAL)
def reduction(call: PaddedCall) -> PyTree:
    """Fill with the neutral element, then reduce."""
    x: PaddedValue = call["self"]
    neutral = NEUTRAL.get(call.op) or NEUTRAL[call.op.overloadpacket]
    reduced = reduced_dims(call, x)
    if call.op.overloadpacket in _EXTREMES:
        require_elements(call, x, reduced)
    if call.op.overloadpacket is aten.logsumexp and not (x.dense.is_floating_point() or x.dense.is_complex()):
        # No integer is neutral for logsumexp.
        x = x.like(x.dense.to(torch.get_default_dtype()))
    by_kernel = _by_kernel(call, x, reduced)
    if by_kernel is not None:
        return by_kernel
    out = call.dense({"self": x.filled(neutral(x.dense.dtype), reduced)})
    if "dim" in call and isinstance(call["dim"], int) and isinstance(out, tuple):
        _require_prefix(call, x, reduced)
    return reduced_result(out, x, reduced, call.get("keepdim", False))


@table.register(aten.mean)
def mean(call: PaddedCall) -> PaddedValue:
    """Divide the sum by the count."""
    x: PaddedValue = call["self"]
    reduced = reduced_dims(call, x)
    keepdim = call.get("keepdim", False)
    dtype = call["dtype"] or x.dense.dtype
    if not _padded_among(x, reduced):
        return reduced_result(call.dense(), x, reduced, keepdim)  # type: ignore[no-any-return]
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


@table.register(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(call: PaddedCall) -> PyTree:
    """Divide the squared deviations from the mean by the count minus the correction."""
    x: PaddedValue = call["self"]
    reduced = reduced_dims(call, x)
    keepdim = call["keepdim"]
    if not _padded_among(x, reduced) or not (x.dense.is_floating_point() or x.dense.is_complex()):
        # For integers torch raises its own error.
        return reduced_result(call.dense(), x, reduced, keepdim)
    correction = 1 if call["correction"] is None else call["correction"]
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


@table.register(aten.linalg_vector_norm, aten.norm, aten.native_norm, aten.frobenius_norm)
def norm(call: PaddedCall) -> PaddedValue:
    """sum(|x|^p)^(1/p): zero adds nothing; for p = -inf, or another negative p, infinity does."""
    x: PaddedValue = call["self"]
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


@table.register(aten.argmax, aten.argmin)
def argmax(call: PaddedCall) -> PaddedValue:
    """The position of an extreme; in the flattened tensor, positions count valid elements only."""
    x: PaddedValue = call["self"]
    extreme = min_value if call.op.overloadpacket is aten.argmax else max_value
    reduced = reduced_dims(call, x)
    require_elements(call, x, reduced, IndexError)
    _require_prefix(call, x, reduced)
    dense = x.filled(extreme(x.dense.dtype), reduced)
    out = call.dense({"self": dense})
    if call["dim"] is None:
        out = logical_position(call, x, out)
    return reduced_result(out, x, reduced, call["keepdim"])  # type: ignore[no-any-return]


@table.register(aten.aminmax)
def aminmax(call: PaddedCall) -> PyTree:
    """The minimum and the maximum."""
    x: PaddedValue = call["self"]
    reduced = reduced_dims(call, x)
    require_elements(call, x, reduced)
    dtype, keepdim = x.dense.dtype, call["keepdim"]
    over = [] if call["dim"] is None else reduced
    low = torch.amin(x.filled(max_value(dtype), reduced), over, keepdim=keepdim)
    high = torch.amax(x.filled(min_value(dtype), reduced), over, keepdim=keepdim)
    return reduced_result((low, high), x, reduced, keepdim)


@table.register(aten.trace)
def trace(call: PaddedCall) -> PaddedValue:
    """The sum of the diagonal."""
    return apply(aten.sum.default, apply(aten.diagonal.default, call["self"]))


@table.register(OpClass.REDUCTION)
def without_padding(call: PaddedCall) -> PyTree:
    """Run a reduction with an unknown neutral element over dims without padding."""
    x = call.values[0]
    if len(call.values) > 1 or ("dim" not in call and "dims" not in call):
        raise refuse(call, "its neutral element is unknown")
    reduced = reduced_dims(call, x)
    if _padded_among(x, reduced):
        raise refuse(call, "its neutral element is unknown")
    return reduced_result(call.dense(), x, reduced, call.get("keepdim", False))


def _by_kernel(call: PaddedCall, x: PaddedValue, reduced: list[int], p: float = 2, correction: float = 1) -> PyTree:
    """Reduce with one kernel; return None if no kernel supports it."""
    if (
        not _padded_among(x, reduced)
        or call.get("dtype") not in (None, x.dense.dtype)
        or call.op in (aten.prod.default,)
    ):
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
    dims = call.get("dim", call.get("dims"))
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)] if x.dim() else []


def require_elements(
    call: PaddedCall, x: PaddedValue, reduced: Sequence[int], kind: type[Exception] | None = None
) -> None:
    """Raise what torch raises for a reduction without an identity over no elements, where the host knows the sizes.

    A row of a ragged batch that alone has no elements gives the neutral element, or NaN.

    Args:
        call: the call.
        x: the value.
        reduced: the dims.
        kind: of the error; by default an IndexError if the call names a dim, else a RuntimeError.
    """
    for d in reduced:
        if set(known_sizes(x, d)) == {0}:
            names = call.get("dim") not in (None, [])
            raise (kind or (IndexError if names else RuntimeError))(
                f"{call.op.overloadpacket.__name__}(): Expected reduction dim {d} to have non-zero size."
            )


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


def _padded_among(x: PaddedValue, dims: Sequence[int]) -> bool:
    return any(x.is_padded(d) for d in dims)


def _require_prefix(call: PaddedCall, x: PaddedValue, dims: Sequence[int]) -> None:
    scattered = next((d for d in dims if not is_prefix(x.dims[d])), None)
    if scattered is not None:
        raise ScatteredDim(x, scattered)


def _kept(out: Tensor, reduced: Sequence[int], keepdim: bool) -> Tensor:
    return out if keepdim else out.squeeze(list(reduced))
