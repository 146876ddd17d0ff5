"""Factories, random draws and dropout: what is made like a padded tensor is padded alike.

Draws are those of the bucket, so the value of a valid element does not depend on the true size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree, tree_has, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, require_size, run, table
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import (
    EDGE_FILL,
    FINITE_FILL,
    PaddedValue,
    prefix_size,
    result,
    unpadded_value,
)
from subtensors.dispatch.padded.pointwise import broadcast
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import bucket_of, padded_dim, size_of, static_dims

aten = torch.ops.aten

_LIKE = {aten.zeros_like: 0, aten.ones_like: 1, aten.full_like: None, aten.empty_like: None}


@table.register(*_LIKE)
def like(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """A tensor of the same shape and padding; its value fills the padding, too."""
    fill = call.get("fill_value", _LIKE[call.op.overloadpacket])
    if isinstance(fill, torch.SymFloat):  # which means nothing outside its trace
        fill = None
    return x.like(call.dense(), fill)


@table.register(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided)
def new_like(call: PaddedCall, x: PaddedValue, size: Sequence[int]) -> PaddedValue:
    """`x.new_zeros(x.shape)` is padded as `x` is; a padded size gives a padded dim, any other number a plain one."""
    is_like = [*size] == [*x.shape] and all(
        true_expression(n) == size_of(dim) for n, dim in zip(size, x.dims, strict=True) if isinstance(n, PaddedSize)
    )
    if tree_has(PaddedSize, size) and not is_like:
        sizes = sizes_with(x.sizes, *size)
        dims = [dim_of(n, sizes) for n in size]
        if x.dims and dims and x.dims[0] == padded_dim(size[0], rows_symbol()):
            dims[0] = x.dims[0]
        return result(call.dense({"size": list(map(bucket_of, dims))}), dims, sizes)
    out = call.dense()  # autograd copies a gradient to memory of the strides of its own
    return x.like(out) if out.shape == x.shape else unpadded_value(out)


@table.register(OpClass.FACTORY)
def from_sizes(call: PaddedCall) -> PaddedValue:
    """An unpadded tensor of the given sizes."""
    return unpadded_value(call.dense())


@table.register(OpClass.RANDOM)
def draw(call: PaddedCall) -> PyTree:
    """Draw for each element of the bucket; the padding of parameters is filled with valid ones."""
    dims, sizes = broadcast(call.values)
    shape = tuple(map(bucket_of, dims))

    def padded_result(t: Tensor) -> PaddedValue:
        if t.shape != shape:
            raise UnsupportedCall("its result has another shape than its operands")
        return result(t, dims, sizes)

    filled = tree_map_only(PaddedValue, PaddedValue.edge_filled, call.arguments)
    return tree_map_only(Tensor, padded_result, call.dense(filled))


@table.register(aten.multinomial)
def multinomial(call: PaddedCall, x: PaddedValue, num_samples: int, replacement: bool) -> PaddedValue:
    """Draw positions by their weights; padding has weight zero."""
    at = x.dim() - 1
    if not replacement:
        require_size(call, x.sizes, prefix_size(x, at), num_samples)
    weights = PaddedValue(x.edge_filled([d for d in x.padded_dims if d != at]), x.dims, x.sizes).filled(0, [at])
    out = call.dense({"self": weights})
    return result(out, [*x.dims[:at], *static_dims([out.shape[at]])], x.sizes)


@table.register(aten.native_dropout)
def native_dropout(call: PaddedCall, x: PaddedValue) -> tuple[PaddedValue, PaddedValue]:
    """Keep or drop each valid element by the bucket's draw."""
    out, kept = call.dense()
    fill = 0 if x.fill == 0 else FINITE_FILL if x.fill in (FINITE_FILL, EDGE_FILL) else None
    dropped = x.like(out, fill).gradient_tracked()
    x.gradient_is_zero_if(dropped)
    return dropped, x.like(kept)


@table.register(aten.dropout)
def dropout(call: PaddedCall, x: PaddedValue, p: float, train: bool) -> PaddedValue:
    """Apply dropout; in evaluation return the input itself, not a copy."""
    if train and p != 0:
        out: PaddedValue = run(aten.native_dropout.default, (x, p, True), {})[0]
    else:
        out = replace(x, view="copy" if x.view == "copy" else "alias", tracker=None).gradient_tracked()
    x.gradient_is_zero_if(out)
    return out
