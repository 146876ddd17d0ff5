"""Positions of a dim: reads at computed ones, regrouped factors, and the one convention of what an index counts.

An index counts the valid positions of a dim, as it does in the unpadded program. In a dim whose valid positions come
first, it names the same element of the unpadded data and of the storage. In one that was flattened from several dims
they lie scattered, and rules convert between the two with

    rank[j] = number of valid positions up to and including j

    dim (2, n), n = 3 of bucket 4    a b c . d e f .
    position in the bucket           0 1 2 3 4 5 6 7
    rank                             1 2 3 3 4 5 6 6
    valid position                   0 1 2   3 4 5

    bucket position of i = first j with rank[j] = i + 1        valid position of j = rank[j] - 1

Ranks come from the mask, so from true sizes on the device: nothing waits, and a captured graph serves every size. An
index that a program gets from elsewhere counts valid positions too, since that is what it means without padding.

A reshape that cuts through a padded dim is no view of the storage, but a gather. An element of the result has the same
place among the valid elements, in row-major order, as in the operand:

    (2, n), n = 3 of bucket 4      a b c .        (n, 2), bucket 4     a b
                                   d e f .                             c d
                                                                       e f
                                                                       . .

    place = row-major index in the true sizes of the result
    position in the storage = that place, as an index in the true sizes of the operand's factors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, is_same, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, bucket_of, is_prefix, merged, size_of, static_dims
from subtensors.dispatch.sizes.expressions import Size, divided, floor_divided, multiplied
from subtensors.dispatch.torch_internals.dispatcher import is_traced


def take_range(
    x: PaddedValue, dim: int, first: Tensor | int, count: int, factors: Factors, step: int = 1
) -> PaddedValue:
    """Copy `count` positions of a dim from `first` on, () or (rows,) int64, a step apart; those beyond are padding.

    The dim of the result has these factors, and the result is marked as a copied view.
    """
    steps = torch.arange(count, device=x.dense.device) * step
    start = torch.as_tensor(first, device=x.dense.device)
    found = gather_along(x, dim, start.unsqueeze(-1) + steps if start.dim() else start + steps, factors)
    return replace(found, view="copy")


def gather_along(x: PaddedValue, dim: int, index: Tensor, factors: Factors) -> PaddedValue:
    """Read the positions of a dim that an index gives, (count,) or, for a ragged batch, (rows, count) int64.

    Positions out of range read padding. The dim of the result has these factors.
    """
    index = index.clamp(0, x.shape[dim] - 1)
    if index.dim() == 1:
        out = x.dense.index_select(dim, index)
    else:
        rows, outer, inner = _rows_position(x)
        # A dim flattened with heads, say, has each row once a head.
        index = index.repeat_interleave(inner, 0).repeat(outer, 1)
        shape = [1] * x.dim()
        shape[rows], shape[dim] = index.shape
        if dim < rows:
            index = index.t()
        target = list(x.shape)
        target[dim] = shape[dim]
        out = x.dense.gather(dim, index.reshape(shape).expand(target))
    dims = [*x.dims[:dim], factors, *x.dims[dim + 1 :]]
    # Several padded positions may read one valid position, and would add their gradients to it.
    return result(out, dims, x.sizes).gradient_masked()


def size_along(x: PaddedValue, d: int) -> Tensor | int:
    """Return the true size of a dim, broadcastable to the value where rows differ in it."""
    size = x.size(d)
    if isinstance(size, Tensor) and size.dim():
        rows = rows_dim(x)
        return size.view([-1 if e == rows else 1 for e in range(x.dim())])
    return size


def rows_dim(x: PaddedValue) -> int:
    """The dim of a ragged batch's rows."""
    if x.rows_dim is None:
        raise UnsupportedCall("the rows of this ragged batch are part of a flattened dim")
    return x.rows_dim


def _rows_position(x: PaddedValue) -> tuple[int, int, int]:
    """Return the dim of a ragged batch's rows, and the number of indices outside of the rows and within each."""
    for d, factors in enumerate(x.dims):
        at = next((i for i, factor in enumerate(factors) if factor.size == rows_symbol()), None)
        if at is not None and all(factor.is_static for factor in factors if factor.size != rows_symbol()):
            return d, bucket_of(factors[:at]), bucket_of(factors[at + 1 :])
    raise UnsupportedCall("the rows of this ragged batch are part of a flattened dim")


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
    place = rebased(index, [f.bucket for f in new], [_true_size(f, sizes) for f in new])
    found = rebased(place, [_true_size(f, sizes) for f in old], [f.bucket for f in old])
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


def rebased(number: Tensor, base: Sequence[Tensor | int], other: Sequence[Tensor | int]) -> Tensor:
    """Read the digits of numbers in one mixed base as a number in another."""
    found, scale = torch.zeros_like(number), number.new_ones(())
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


def ranks(x: PaddedValue, d: int) -> Tensor | None:
    """Count the valid positions of a dim up to and including each, (bucket,) int64.

    Returns None where the valid positions come first, so that both ways of counting agree.
    """
    if not x.is_padded(d) or is_prefix(x.dims[d]) or x.sizes is None:
        return None
    keeps = x.sizes.serves_one_run or not x.sizes.is_captured
    key = ("ranks", x.dims[d])
    found = x.sizes.masks.get(key) if keeps else None
    if found is None:
        mask = x.mask([d])
        if mask is None:
            return None
        if mask.numel() != x.shape[d]:
            raise UnsupportedCall("the valid positions of its flattened dim differ from row to row")
        found = mask.reshape(-1).cumsum(0)
        if keeps:
            x.sizes.masks[key] = found
    return found


def in_bucket(x: PaddedValue, d: int, index: Tensor) -> Tensor:
    """Convert valid positions of a dim, of any integer dtype, to those in the bucket, or to one beyond any slot."""
    rank = ranks(x, d)
    if rank is None:
        return index
    found = torch.searchsorted(rank, (index.long() + 1).contiguous())
    return torch.where((index < 0) | (index >= rank[-1]), x.shape[d] + 1, found)


def in_valid(x: PaddedValue, d: int, positions: Tensor) -> Tensor:
    """Convert positions in the bucket, of valid elements, to valid positions of a dim; see `in_bucket`."""
    rank = ranks(x, d)
    return positions if rank is None else rank[positions] - 1


def counted_from_start(index: Tensor, end: Tensor | int, bucket: int) -> Tensor:
    """Count negative positions from the end; those before the start get one beyond the bucket, as an error of torch."""
    index = torch.where(index < 0, index + end, index)
    return torch.where(index < 0, bucket + 1, index)


def flattened(x: PaddedValue) -> PaddedValue:
    """Return a value with all dims in one, in which an index counts the elements of the unpadded tensor."""
    factors = merged([factor for dim in x.dims for factor in dim])
    flat = x.dense.reshape(-1)
    return PaddedValue(flat, (factors,) if factors else static_dims(flat.shape), x.sizes)


watching_bounds: list[Callable[[str], None]] = []


@contextmanager
def checked_bounds(report: Callable[[str], None]) -> Iterator[None]:
    """Report positions beyond the true size inside the context, by a call with a description."""
    watching_bounds.append(report)
    try:
        yield
    finally:
        watching_bounds.pop()


def check_bounds(x: PaddedValue, d: int, index: PaddedValue, ends: Tensor | int | None = None) -> None:
    """Report positions beyond the true size of a dim, in the debug mode and where values are known.

    The exclusive bounds of the positions broadcast to the index; by default they are the true size of the dim, for an
    index with the dims of `x`.
    """
    if not watching_bounds or not x.is_padded(d) or is_traced(index.dense):
        return
    if index.dense.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    ends = size_along(x, d) if ends is None else ends
    positions = index.filled(-1)
    beyond = positions >= ends
    if bool(beyond.any()):
        worst = int(positions[beyond.expand(positions.shape)].max())
        watching_bounds[-1](
            f"position {worst} of dim {d} is padding: the true size there is less; count to x.count({d})"
        )
