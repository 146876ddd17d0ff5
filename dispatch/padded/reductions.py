"""Reductions, scans and softmaxes: padding gets the op's neutral element, and counts are those of valid elements.

A reduction f over padded dims is `f(where(mask, x, e))` with e neutral for f, and so is a scan or a softmax. One that
divides by a number of elements divides by that of valid ones, which the device computes from the true sizes:
mean = sum / count and var = sum((x - mean)^2) / (count - correction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops import reduction_dims
from subtensors.dispatch.ops.dims import listed
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.reduction_dims import LOGSUMEXP, MAX, MIN, monoid_of
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, require_elements, table
from subtensors.dispatch.padded.padded_value import PaddedValue, ScatteredDim, reduced_result, result
from subtensors.dispatch.padded.pointwise import broadcast
from subtensors.dispatch.padded.positions import rebased, size_along
from subtensors.dispatch.sizes.dim_factors import is_prefix
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten

_POSITIONS = {aten.argmax: MAX, aten.argmin: MIN}
_NORMS = frozenset([aten.linalg_vector_norm, aten.norm, aten.native_norm, aten.frobenius_norm])


@table.register(OpClass.REDUCTION, across=True)
def reduction(call: PaddedCall, x: PaddedValue, keepdim: bool = False) -> PyTree:
    """Fill with the neutral element of the op's monoid, then reduce.

    A norm is sum(|x|^p)^(1/p): zero adds nothing; for p = -inf, or another negative p, infinity does.
    """
    packet, reduced = call.op.overloadpacket, reduced_dims(call, x)
    monoid = _POSITIONS.get(packet) or monoid_of(call.op)
    order, neutral = 2.0, 0.0
    if packet in _NORMS:
        given = call.get("ord", call.get("p"))
        order = 2 if given is None else given
        if order < 0 or order == math.inf:
            require_elements(call, x, reduced)
        neutral = math.inf if order < 0 else 0
    elif monoid is None or len(call.values) > 1:
        raise UnsupportedCall("its neutral element is unknown")
    else:
        if not monoid.has_identity:
            require_elements(call, x, reduced)
        if monoid is LOGSUMEXP and not (x.dense.is_floating_point() or x.dense.is_complex()):
            # No integer is neutral for logsumexp.
            x = x.like(x.dense.to(torch.get_default_dtype()))
        neutral = monoid.neutral(x.dense.dtype)
    by_kernel = _by_kernel(call, x, reduced, p=order)
    if by_kernel is not None:
        return by_kernel
    out = call.dense({"self": x.filled(neutral, reduced)})
    if isinstance(out, tuple) or packet in _POSITIONS:
        _require_prefix(x, reduced)
    if packet in _POSITIONS and call["dim"] is None:
        # In the flattened tensor, positions count valid elements only.
        if any(isinstance(size, Tensor) and size.dim() for size in map(x.size, x.padded_dims)):
            raise UnsupportedCall("a ragged batch has no flattened positions")
        out = unpadded_index(x, range(x.dim()), out)
    return reduced_result(out, x, reduced, keepdim)


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
    return reduced_result(out if keepdim else out.squeeze(reduced), x, reduced, keepdim)  # type: ignore[no-any-return]


@table.register(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
                across=True)  # fmt: skip
def variance(call: PaddedCall, x: PaddedValue, correction: float | None, keepdim: bool) -> PyTree:
    """Divide the squared deviations from the mean by the count minus the correction."""
    reduced = reduced_dims(call, x)
    if not (x.dense.is_floating_point() or x.dense.is_complex()):
        # For integers torch raises its own error.
        return reduced_result(call.dense(), x, reduced, keepdim)
    correction = 1 if correction is None else +correction  # True is 1
    if call.op is aten.var.correction:
        by_kernel = _by_kernel(call, x, reduced, correction=correction)
        if by_kernel is not None:
            return by_kernel
    dtype = x.dense.dtype
    count = x.valid_count(reduced)
    distance, average = deviations(x, x.filled(0, reduced).to(arithmetic_dtype(dtype)), reduced)
    square = (distance * distance.conj()).real if distance.is_complex() else distance * distance
    squares = square.sum(reduced, keepdim=True) / (count - correction).clamp(min=0)
    name = call.op.overloadpacket
    spread = squares if name in (aten.var, aten.var_mean) else _root(squares)
    outs = [spread.to(dtype.to_real())] + ([average.to(dtype)] if name in (aten.var_mean, aten.std_mean) else [])
    outs = outs if keepdim else [o.squeeze(reduced) for o in outs]
    return reduced_result(tuple(outs) if len(outs) > 1 else outs[0], x, reduced, keepdim)


def _root(squares: Tensor) -> Tensor:
    """Return the square root with a gradient of 0 at 0, as torch's standard deviation has."""
    is_zero = squares == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squares).sqrt())


@table.register(aten.aminmax, across=True)
def aminmax(call: PaddedCall, x: PaddedValue, dim: int | None, keepdim: bool) -> PyTree:
    """The minimum and the maximum."""
    over = [] if dim is None else [dim]
    require_elements(call, x, reduced_dims(call, x))
    return tuple(apply(op, x, over, keepdim) for op in (aten.amin.default, aten.amax.default))


@table.register(aten.trace)
def trace(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """The sum of the diagonal."""
    return apply(aten.sum.default, apply(aten.diagonal.default, x))


@table.register(reduction_dims.softmax, across=True)
def softmax(call: PaddedCall, x: PaddedValue, dim: int, dtype: torch.dtype | None = None) -> PaddedValue:
    """exp(x) / sum(exp(x)), with -inf in the padding, which adds nothing to the sum."""
    d = dim % x.dim()
    if not (x.dense.is_floating_point() or dtype):
        # For integers torch raises its own error.
        return x.like(call.dense())
    if dtype in (None, x.dense.dtype):
        by_kernel = kernels.softmax(x, d, is_log="log_softmax" in call.op.name())
        if by_kernel is not None:
            return by_kernel
    # An integer input is cast first: its minimum is not neutral in a floating-point dtype.
    floating = x if x.dense.is_floating_point() else x.like(x.dense.to(dtype))
    return x.like(call.dense({"self": floating.filled(float("-inf"), [d])})).gradient_masked()


@table.register(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: PaddedCall, grad_output: PaddedValue, output: PaddedValue, dim: int) -> PaddedValue:
    """The gradient of a softmax, which autograd functions of a user's own ask for; padding adds nothing to its sum."""
    dims, sizes = broadcast([grad_output, output])
    d = dim % max(output.dim(), 1)
    out = call.dense({"grad_output": grad_output.filled(0, [d]), "output": output.filled(0, [d])})
    return result(out, dims, sizes).gradient_masked()


@table.register(OpClass.SCAN, across=True)
def scan(call: PaddedCall, x: PaddedValue, dim: int) -> PyTree:
    """Run a scan: valid positions precede the padding, so only the gradient would pass through it."""
    monoid, d = monoid_of(call.op), dim % x.dim()
    if monoid is None:
        raise UnsupportedCall("its neutral element is unknown")
    if monoid in (MAX, MIN):
        _require_prefix(x, [d])
    out = call.dense({"self": x.filled(monoid.neutral(x.dense.dtype), [d])})
    return tree_map_only(Tensor, lambda t: x.like(t).gradient_masked(), out)


@table.register(aten.diff)
def difference(
    call: PaddedCall, x: PaddedValue, n: int, dim: int, prepend: PaddedValue | None, append: PaddedValue | None
) -> PaddedValue:
    """Subtract from each position the one before it, n times; compare bools instead."""
    parts = [part for part in (prepend, x, append) if part is not None]
    x = apply(aten.cat.default, parts, dim) if len(parts) > 1 else x
    minus = aten.ne.Tensor if x.dense.dtype == torch.bool else aten.sub.Tensor
    for _ in range(n):
        x = apply(minus, apply(aten.slice.Tensor, x, dim, 1, None), apply(aten.slice.Tensor, x, dim, 0, -1))
    return x


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


def unpadded_index(x: PaddedValue, dims: Sequence[int], index: Tensor) -> Tensor:
    """Convert an index of some flattened dims, of the bucket, to one of the unpadded tensor."""
    return rebased(index, [x.shape[d] for d in dims], [size_along(x, d) for d in dims])


def deviations(x: PaddedValue, values: Tensor, over: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the distances of values from their mean, zero in the padding of the dims that it is over, and the mean."""
    mean, mask = values.sum(list(over), keepdim=True) / x.valid_count(over), x.mask(over)
    return values - mean if mask is None else torch.where(mask, values - mean, 0), mean


def _require_prefix(x: PaddedValue, dims: Sequence[int]) -> None:
    scattered = next((d for d in dims if not is_prefix(x.dims[d])), None)
    if scattered is not None:
        raise ScatteredDim(x, scattered)
