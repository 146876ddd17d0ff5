"""A reshape that cuts through a padded dim: no view of the storage, but a gather whose positions the device computes.

An element of the result has the same place among the valid elements, in row-major order, as in the operand:

    (2, n), n = 3 of bucket 4      a b c .        (n, 2), bucket 4     a b
                                   d e f .                             c d
                                                                       e f
                                                                       . .

    place = row-major index in the true sizes of the result
    position in the storage = that place, as an index in the true sizes of the operand's factors
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, is_same, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import (
    Factor,
    Factors,
    bucket_of,
    is_padded,
    size_of,
    static_dims,
    with_dim,
)
from subtensors.dispatch.sizes.expressions import Size, divided, floor_divided, multiplied


def regrouped(call: PaddedCall, x: PaddedValue, shape: Sequence[int]) -> PaddedValue:
    """Return a reshape of the valid elements, as a copy.

    Args:
        call: the call to refuse where sizes don't fit, or differ from row to row.
        x: the value.
        shape: the sizes, padded ones among them; one of them may be -1.
    """
    sizes = sizes_with(x.sizes, *shape)
    if sizes is None or sizes.rows is not None:
        raise refuse(call, "its reshape cuts through the rows of a ragged batch")
    dims = _dims_of(call, size_of(tuple(f for dim in x.dims for f in dim)), shape, sizes)
    before, after = 0, 0
    while before < min(x.dim(), len(dims)) and x.dims[before] == dims[before]:
        before += 1
    while after < min(x.dim(), len(dims)) - before and x.dims[-1 - after] == dims[-1 - after]:
        after += 1
    old, new = x.dims[before : x.dim() - after], dims[before : len(dims) - after]
    position = _positions([f for dim in old for f in dim], [f for dim in new for f in dim], sizes)
    outer, inner = math.prod(x.shape[:before]), math.prod(x.shape[x.dim() - after :])
    out = x.dense.reshape(outer, -1, inner).index_select(1, position)
    copied = result(out.reshape(list(map(bucket_of, dims))), dims, sizes).gradient_masked()
    return replace(copied, view="copy")


def with_factors(x: PaddedValue, d: int, factors: Factors) -> PaddedValue:
    """Return a value in which the valid positions of a dim lie as other factors of the same true size say."""
    if x.dims[d] == factors:
        return x
    if x.sizes is None or x.sizes.rows is not None:
        raise UnsupportedCall("the positions of a ragged batch's rows lie in another order")
    out = x.dense.index_select(d, _positions(x.dims[d], factors, x.sizes))
    return result(out, with_dim(x.dims, d, factors), x.sizes).gradient_masked()


def _positions(old: Sequence[Factor], new: Sequence[Factor], sizes: TrueSizes) -> Tensor:
    """Return where each index of some factors lies among others that have as many valid elements, in the same order."""
    device = sizes.values.device
    place = torch.zeros((), dtype=torch.int64, device=device)
    for factor in new:
        place = place.unsqueeze(-1) * sizes.of(factor.size) + torch.arange(factor.bucket, device=device)
    place, stride = place.reshape(-1), 1
    position = torch.zeros_like(place)
    for factor in reversed(old):
        count = sizes.of(factor.size).clamp(min=1)
        position, place = position + place % count * stride, place // count
        stride *= factor.bucket
    return position.clamp(max=stride - 1)


def unify_layouts(operands: Sequence[PaddedValue]) -> dict[int, PaddedValue]:
    """Find operands of a broadcast whose dims are of one true size and lie in different ways, flattened or not.

    Returns:
        By the operand's id, the same operand as the others lie.
    """
    found: dict[int, PaddedValue] = {}
    rank = max((x.dim() for x in operands), default=0)
    for back in range(1, rank + 1):
        padded = [x.dims[-back] for x in operands if x.dim() >= back and is_padded(x.dims[-back])]
        chosen = max(padded, key=len, default=())
        if len(chosen) < 2:
            continue
        for x in operands:
            own = x.dims[-back] if x.dim() >= back else chosen
            if is_padded(own) and len(own) < len(chosen) and size_of(own) == size_of(chosen):
                found[id(x)] = with_factors(found.get(id(x), x), x.dim() - back, chosen)
    return found


def _dims_of(call: PaddedCall, elements: Size, shape: Sequence[int], sizes: TrueSizes) -> tuple[Factors, ...]:
    """Return the dims that a shape asks for."""
    known = multiplied(*(true_expression(size) for size in shape if isinstance(size, PaddedSize) or size != -1))
    if -1 not in [int(size) for size in shape if not isinstance(size, PaddedSize)]:
        if not is_same(known, elements, sizes):
            raise refuse(call, f"a shape of {known} elements is asked for {elements} of them")
        return tuple(dim_of(size, sizes) for size in shape)
    rest = _quotient(elements, known, sizes)
    if rest is None:
        raise refuse(call, f"{elements} elements are no multiple of {known} at every true size")
    last = static_dims([int(rest)])[0] if rest.is_Integer else dim_of(PaddedSize(0, rest, sizes), sizes)
    return tuple(last if not isinstance(size, PaddedSize) and size == -1 else dim_of(size, sizes) for size in shape)


def _quotient(size: Size, by: Size, sizes: TrueSizes) -> Size | None:
    """Return the size that makes another one if it is multiplied; None where none does."""
    try:
        return divided(size, by)
    except RuleError:
        if not by.is_Integer or by == 0:
            return None
        quotient = floor_divided(size, int(by))
        return quotient if is_same(multiplied(quotient, by), size, sizes) else None
