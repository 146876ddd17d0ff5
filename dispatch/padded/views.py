"""Views: the storage is viewed, and the factors of the dims move along with it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from subtensors.dispatch.ops import view_dims
from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, require_size, run, table
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, is_same, sizes_with
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.padded.positions import regrouped
from subtensors.dispatch.sizes.dim_factors import (
    bucket_of,
    is_padded,
    padded_dim,
    reshaped,
    size_of,
    static_dims,
    with_dim,
)
from subtensors.dispatch.sizes.expressions import convolved, largest, smallest

aten = torch.ops.aten


@table.register(view_dims.reshape, across=True)
def reshape(call: PaddedCall, x: PaddedValue, size: Sequence[int]) -> PaddedValue:
    """Merge and split dims as padded sizes say, or where a padded dim is cut."""
    if 0 in x.shape:
        raise UnsupportedCall("an empty tensor doesn't determine the dims of its sizes")
    try:
        dims = reshaped(x.dims, tuple(map(int, size)))
    except RuleError as error:
        return _regrouped(call, x, size, error)
    for factors, n in zip(dims, size, strict=True):
        if not isinstance(n, PaddedSize) or (n.sizes is x.sizes and factors[0].size == n.size and len(factors) == 1):
            continue
        if not is_same(size_of(factors), n.size, sizes_with(x.sizes, n)):
            reason = UnsupportedCall(f"the size {n.size} is asked for a dim of true size {size_of(factors)}")
            return _regrouped(call, x, size, reason)
    return result(call.dense(), dims, x.sizes, x.fill)


def _regrouped(call: PaddedCall, x: PaddedValue, shape: Sequence[int], reason: RuleError) -> PaddedValue:
    """Gather what no view of the storage holds; where that can't be done either, raise the reason why no view does."""
    try:
        return regrouped(x, shape)
    except UnsupportedCall as error:
        raise UnsupportedCall(f"{reason}; {error}") from None


@table.register(view_dims.expand, across=True)
def expand(call: PaddedCall, x: PaddedValue, size: Sequence[int]) -> PaddedValue:
    """Expand dims of size 1; a padded dim keeps its size."""
    target = list(size)
    added = len(target) - x.dim()
    sizes = sizes_with(x.sizes, *target)
    dims = [dim_of(max(n, 1) if n < 0 else n, sizes) for n in target]
    for d, factors in enumerate(x.dims):
        wanted = target[d + added]
        if wanted not in (-1, bucket_of(factors)):
            continue
        if isinstance(wanted, PaddedSize) and not is_same(size_of(factors), wanted.size, sizes):
            if bucket_of(factors) > 1:
                raise UnsupportedCall(f"a dim of true size {size_of(factors)} is expanded to {wanted.size}")
            continue
        dims[d + added] = factors
    shape = [-1 if n == -1 else bucket_of(factors) for n, factors in zip(target, dims, strict=True)]
    # The padding of a dim that becomes a padded one holds copies of values.
    before = [None] * added + list(x.dims)
    is_kept = all(factors == own or not is_padded(factors) for factors, own in zip(dims, before, strict=True))
    fill = x.fill if is_kept else None
    return result(call.dense() if shape == target else x.dense.expand(shape), dims, sizes, fill)


@table.register(aten.meshgrid)
def meshgrid(call: PaddedCall, tensors: Sequence[PaddedValue], indexing: str = "ij") -> list[PaddedValue]:
    """Expand each vector along a dim of its own over the dims of all others."""
    views = []
    for i, x in enumerate(tensors):
        # A number is a vector of one.
        after = len(tensors) - 1 - i + (not x.dim())
        views.append(functools.reduce(lambda y, d: apply(aten.unsqueeze.default, y, d), [0] * i + [-1] * after, x))
    outs: list[PaddedValue] = run(aten.broadcast_tensors.default, (views,), {})
    swaps = indexing == "xy" and len(outs) > 1
    return [apply(aten.transpose.int, x, 0, 1) for x in outs] if swaps else outs


@table.register(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Add a last dim of real and imaginary parts."""
    # The wrapper hides the storage's conjugate bit from torch.
    paired = result(call.dense({"self": x.dense.resolve_conj()}), [*x.dims, *static_dims([2])], x.sizes)
    return replace(paired, view="copy" if x.dense.is_conj() else "")


@table.register(view_dims.unfold, across=True)
def unfold(call: PaddedCall, x: PaddedValue, dimension: int, size: int, step: int) -> PaddedValue:
    """Windows of a dim, which start a step apart; the last one ends within the true size."""
    d, out, window = dimension % x.dim(), call.dense(), static_dims([size])
    windows = convolved(prefix_size(x, d), size, step)
    require_size(call, x.sizes, windows, 1)
    # A padded window may overlap valid positions: it has no fill, and would add its gradient to theirs.
    windowed = result(out, [*with_dim(x.dims, d, padded_dim(out.shape[d], windows)), *window], x.sizes)
    return windowed.gradient_masked()


@table.register(view_dims.diagonal, across=True)
def diagonal(call: PaddedCall, x: PaddedValue, offset: int, dim1: int, dim2: int) -> PaddedValue:
    """The diagonal of two dims: it ends where the first of them does."""
    a, b = dim1 % x.dim(), dim2 % x.dim()
    out = call.dense()
    dims = [factors for i, factors in enumerate(x.dims) if i not in (a, b)]
    down, along = max(-offset, 0), max(offset, 0)
    length = largest(0, smallest(prefix_size(x, a) - down, prefix_size(x, b) - along))
    return result(out, [*dims, padded_dim(out.shape[-1], length)], x.sizes, x.fill_if_shifted)
