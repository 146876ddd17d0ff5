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
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, is_same, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, bucket_of, size_of, static_dims
from subtensors.dispatch.sizes.expressions import Size, divided, floor_divided, multiplied


def regrouped(x: PaddedValue, shape: Sequence[int]) -> PaddedValue:
    """Return a reshape of the valid elements, as a copy.

    Args:
        x: the value.
        shape: the sizes, padded ones among them; one of them may be -1.

    Raises:
        UnsupportedCall: sizes don't fit, or differ from row to row.
    """
    sizes = sizes_with(x.sizes, *shape)
    if sizes is None or sizes.rows is not None:
        raise UnsupportedCall("its reshape cuts through the rows of a ragged batch")
    dims = _dims_of(size_of(tuple(f for dim in x.dims for f in dim)), shape, sizes)
    before, after = 0, 0
    while before < min(x.dim(), len(dims)) and x.dims[before] == dims[before]:
        before += 1
    while after < min(x.dim(), len(dims)) - before and x.dims[-1 - after] == dims[-1 - after]:
        after += 1
    old, new = x.dims[before : x.dim() - after], dims[before : len(dims) - after]
    position = _positions(tuple(f for dim in old for f in dim), tuple(f for dim in new for f in dim), sizes)
    outer, inner = math.prod(x.shape[:before]), math.prod(x.shape[x.dim() - after :])
    out = x.dense.reshape(outer, -1, inner).index_select(1, position)
    copied = result(out.reshape(list(map(bucket_of, dims))), dims, sizes).gradient_masked()
    return replace(copied, view="copy")


def with_factors(x: PaddedValue, d: int, factors: Factors) -> PaddedValue:
    """Return a copy in which the valid positions of a dim lie as other factors of the same true size say.

    Raises:
        UnsupportedCall: the rows of a ragged batch are part of the dim.
    """
    if x.dims[d] == factors:
        return x
    if x.sizes is None or any(factor.size.has(rows_symbol()) for factor in x.dims[d]):
        raise UnsupportedCall("the rows of a ragged batch are part of it")
    return replace(gather_along(x, d, _positions(x.dims[d], factors, x.sizes), factors), view="copy")


def _positions(old: Factors, new: Factors, sizes: TrueSizes) -> Tensor:
    """Return where each index of some factors lies among others that have as many valid elements, in the same order.

    Returns:
        (bucket,) or, where sizes differ from row to row, (rows, bucket) int64.
    """
    keeps, key = sizes.serves_one_run or not sizes.is_captured, ("positions", old, new)
    if keeps and key in sizes.masks:
        return sizes.masks[key]
    index: Tensor = torch.arange(bucket_of(new), device=sizes.values.device)
    place = _rebased(index, [f.bucket for f in new], [_true_size(f, sizes) for f in new])
    found = _rebased(place, [_true_size(f, sizes) for f in old], [f.bucket for f in old])
    found = found.clamp(max=max(bucket_of(old) - 1, 0))
    if keeps:
        sizes.masks[key] = found
    return found


def _true_size(factor: Factor, sizes: TrueSizes) -> Tensor | int:
    """A factor's true size, at least 1, which broadcasts against positions."""
    if factor.is_static:
        return max(factor.bucket, 1)
    value = sizes.of_each(factor.size).clamp(min=1)
    return value.unsqueeze(-1) if value.dim() else value


def _rebased(number: Tensor, base: Sequence[Tensor | int], other: Sequence[Tensor | int]) -> Tensor:
    """Read the digits of numbers in one mixed base as a number in another."""
    found, scale = torch.zeros_like(number), torch.ones_like(number[..., :1])
    for size, place in zip(reversed(base), reversed(other), strict=True):
        found, number, scale = found + number % size * scale, number // size, scale * place
    return found


def _dims_of(elements: Size, shape: Sequence[int], sizes: TrueSizes) -> tuple[Factors, ...]:
    """Return the dims that a shape asks for."""
    known = multiplied(*(true_expression(size) for size in shape if isinstance(size, PaddedSize) or size != -1))
    if -1 not in [int(size) for size in shape if not isinstance(size, PaddedSize)]:
        if not is_same(known, elements, sizes):
            raise UnsupportedCall(f"a shape of {known} elements is asked for {elements} of them")
        return tuple(dim_of(size, sizes) for size in shape)
    rest = _quotient(elements, known, sizes)
    if rest is None:
        raise UnsupportedCall(f"{elements} elements are no multiple of {known} at every true size")
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
