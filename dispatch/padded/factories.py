"""Factories, random draws and dropout: what is made like a padded tensor is padded alike.

Draws are those of the bucket, so the value of a valid element does not depend on the true size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree, tree_has, tree_map_only
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, run, table
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import (
    EDGE_FILL,
    FINITE_FILL,
    PaddedValue,
    host_sizes,
    result,
    unpadded_value,
)
from subtensors.dispatch.padded.pointwise import broadcast
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import bucket_of, padded_dim, size_of, static_dims

aten = torch.ops.aten

_LIKE = {aten.zeros_like: 0, aten.ones_like: 1, aten.full_like: None, aten.empty_like: None}


@table.register(*_LIKE)
def like(call: PaddedCall) -> PaddedValue:
    """A tensor of the same shape and padding; its value fills the padding, too."""
    known = _LIKE[call.op.overloadpacket]
    x: PaddedValue = call["self"]
    return x.like(call.dense(), call.get("fill_value", known))


@table.register(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
def new_like(call: PaddedCall) -> PaddedValue:
    """`x.new_zeros(x.shape)` is padded as `x` is; a padded size gives a padded dim, any other number a plain one."""
    x: PaddedValue = call["self"]
    given = call["size"]
    is_like = [*given] == [*x.shape] and all(
        true_expression(n) == size_of(dim) for n, dim in zip(given, x.dims, strict=True) if isinstance(n, PaddedSize)
    )
    if tree_has(PaddedSize, given) and not is_like:
        sizes = sizes_with(x.sizes, *given)
        dims = [dim_of(size, sizes) for size in given]
        if x.dims and dims and x.dims[0] == padded_dim(given[0], rows_symbol()):
            dims[0] = x.dims[0]
        return result(call.dense({"size": list(map(bucket_of, dims))}), dims, sizes)
    out = call.dense()
    return x.like(out) if out.shape == x.shape else unpadded_value(out)


@table.register(OpClass.FACTORY)
def from_sizes(call: PaddedCall) -> PaddedValue:
    """An unpadded tensor of the given sizes."""
    return unpadded_value(call.dense())


@table.register(OpClass.RANDOM)
def draw(call: PaddedCall) -> PyTree:
    """Draw for each element of the bucket; the padding of parameters is filled with valid ones."""
    operands = call.values
    dims, sizes = broadcast(operands)
    out = call.dense(tree_map_only(PaddedValue, lambda x: x.edge_filled(), call.arguments))
    shape = [bucket_of(f) for f in dims]

    def padded_result(t: Tensor) -> PaddedValue:
        if list(t.shape) != shape:
            raise UnsupportedCall("its result has another shape than its operands")
        return result(t, dims, sizes)

    return tree_map_only(Tensor, padded_result, out)


@table.register(aten.multinomial)
def multinomial(call: PaddedCall) -> PaddedValue:
    """Draw positions by their weights; padding has weight zero."""
    x: PaddedValue = call["self"]
    at = x.dim() - 1
    for size in host_sizes(x, at) or ():
        if not call["replacement"] and call["num_samples"] > size:
            raise RuntimeError(f"cannot sample {call['num_samples']} of {size} positions without replacement")
    weights = PaddedValue(x.edge_filled([d for d in x.padded_dims if d != at]), x.dims, x.sizes).filled(0, [at])
    out = call.dense({"self": weights})
    return result(out, [*x.dims[:at], *static_dims([out.shape[at]])], x.sizes)


@table.register(aten.native_dropout)
def native_dropout(call: PaddedCall) -> tuple[PaddedValue, PaddedValue]:
    """Keep or drop each valid element by the bucket's draw."""
    x: PaddedValue = call["input"]
    out, kept = call.dense()
    fill = 0 if x.fill == 0 else FINITE_FILL if x.fill in (FINITE_FILL, EDGE_FILL) else None
    dropped = x.like(out, fill).gradient_tracked()
    x.gradient_is_zero_if(dropped)
    return dropped, x.like(kept)


@table.register(aten.dropout)
def dropout(call: PaddedCall) -> PaddedValue:
    """Apply dropout; in evaluation return the input itself, not a copy."""
    x: PaddedValue = call["input"]
    if not call["train"] or call["p"] == 0:
        same = replace(x, view="copy" if x.view == "copy" else "alias", tracker=None).gradient_tracked()
        x.gradient_is_zero_if(same)
        return same
    out: PaddedValue = run(aten.native_dropout.default, (x, call["p"], True), {})[0]
    x.gradient_is_zero_if(out)
    return out
