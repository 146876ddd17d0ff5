"""Softmax, scans and differences: a padded dim is filled with the neutral element, and gradients are masked."""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.reduction_dims import monoid_of
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded import kernels
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, table
from subtensors.dispatch.padded.padded_value import PaddedValue, ScatteredDim, result
from subtensors.dispatch.padded.pointwise import broadcast
from subtensors.dispatch.sizes.dim_factors import is_prefix

aten = torch.ops.aten


@table.register(aten._softmax, aten._log_softmax, aten.softmax.int, aten.log_softmax.int, aten._safe_softmax,
                aten.special_softmax, aten.special_log_softmax, across=True)  # fmt: skip
def softmax(call: PaddedCall, x: PaddedValue, dim: int, dtype: torch.dtype | None = None) -> PaddedValue:
    """exp(x) / sum(exp(x)), with -inf in the padding, which adds nothing to the sum."""
    d = dim % x.dim()
    if not (x.dense.is_floating_point() or dtype):
        # For integers torch raises its own error.
        return x.like(call.dense())
    if dtype in (None, x.dense.dtype):
        is_log = "log_softmax" in call.op.name()
        by_kernel = kernels.softmax(x, d, is_log)
        if by_kernel is not None:
            return by_kernel
    # An integer input is cast first: its minimum is not neutral in a floating-point dtype.
    floating = x if x.dense.is_floating_point() else x.like(x.dense.to(dtype))
    return x.like(call.dense({"self": floating.filled(float("-inf"), [d])})).gradient_masked()


@table.register(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: PaddedCall) -> PaddedValue:
    """The gradient of a softmax, which autograd functions of a user's own ask for; padding adds nothing to its sum."""
    gradient, output = call["grad_output"], call["output"]
    dims, sizes = broadcast([gradient, output])
    d = call["dim"] % max(output.dim(), 1)
    out = call.dense({"grad_output": gradient.filled(0, [d]), "output": output.filled(0, [d])})
    return result(out, dims, sizes).gradient_masked()


@table.register(OpClass.SCAN, across=True)
def scan(call: PaddedCall, x: PaddedValue, dim: int) -> PyTree:
    """Run a scan: valid positions precede the padding, so only the gradient would pass through it."""
    monoid = monoid_of(call.op)
    if monoid is None:
        raise refuse(call, "its neutral element is unknown")
    if not is_prefix(x.dims[dim]) and call.op.overloadpacket in (aten.cummax, aten.cummin):
        raise ScatteredDim(x, dim % x.dim())
    out = call.dense({"self": x.filled(monoid.neutral(x.dense.dtype), [dim % x.dim()])})
    return tree_map_only(Tensor, lambda t: x.like(t).gradient_masked(), out)


@table.register(aten.diff)
def difference(call: PaddedCall, x: PaddedValue, dim: int) -> PaddedValue:
    """Subtract from each position the one before it, n times; compare bools instead."""
    d = dim
    parts = [part for part in (call["prepend"], x, call["append"]) if part is not None]
    x = apply(aten.cat.default, parts, d) if len(parts) > 1 else x
    minus = aten.ne.Tensor if x.dense.dtype == torch.bool else aten.sub.Tensor
    for _ in range(call["n"]):
        x = apply(minus, apply(aten.slice.Tensor, x, d, 1, None), apply(aten.slice.Tensor, x, d, 0, -1))
    return x
