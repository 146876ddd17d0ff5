"""Selections, slices and splits of a dim, whose bounds may be padded sizes: `x[..., : h.shape[-1]]`, `x[:, n - 1]`.

A bound that may be negative counts from the end at those true sizes at which it is, as in the unpadded program. Parts
of a padded dim are slices, whose sizes are expressions. If their number depends on the true size, the host has to know
it, and in a ragged batch it has to be the same for every row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.ops.errors import DataDependentCall, UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, require_size, table
from subtensors.dispatch.padded.padded_size import (
    PaddedSize,
    bound_in,
    is_same,
    least,
    most,
    sizes_with,
    true_expression,
)  # fmt: skip
from subtensors.dispatch.padded.padded_value import PaddedValue, known_sizes, prefix_size, result, size_in_rows
from subtensors.dispatch.padded.positions import take_range
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import padded_dim, size_of, static_dims, with_dim
from subtensors.dispatch.sizes.expressions import Size, added, floor_divided, largest, multiplied, sliced, smallest
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten
_END = 2**62  # torch writes an open end as the largest int64


@table.register(aten.select.int, aten.select_copy, across=True)
def select(call: PaddedCall, x: PaddedValue, dim: int, index: int) -> PaddedValue:
    """Select an index of a dim; a negative one counts from the true end."""
    d = dim % x.dim()
    dims = [factors for i, factors in enumerate(x.dims) if i != d]
    if len(x.dims[d]) > 1 and (position := _scattered_position(call, x, d, index)) is not None:
        return result(x.dense.select(d, position), dims, x.sizes, x.fill)
    size, at, sizes = prefix_size(x, d), true_expression(index), sizes_with(x.sizes, index)
    if size == rows_symbol():
        if isinstance(index, PaddedSize):
            raise UnsupportedCall("it selects a row of a ragged batch")
        assert x.sizes is not None
        return result(x.dense.select(d, index), dims, x.sizes.of_rows(index), x.fill)
    if at.is_Integer:
        require_size(call, sizes, size, index + 1 if index >= 0 else -index)
    else:
        require_size(call, sizes, added(size, multiplied(-1, at)), 1)
        require_size(call, sizes, added(size, at), 0)
    end = _size_on_host(x, d)
    if at.is_Integer and (index >= 0 or (end is not None and not is_traced(x.dense))):
        return result(x.dense.select(d, index if index >= 0 else (end or 0) + index), dims, x.sizes, x.fill)
    # Counted from the end where it is negative.
    at = at + size * smallest(1, largest(0, -at))
    assert sizes is not None
    one = take_range(replace(x, sizes=sizes), d, sizes.of_each(at), 1, static_dims([1])[0])
    return replace(result(one.dense.squeeze(d), dims, sizes), view="copy")


def _scattered_position(call: PaddedCall, x: PaddedValue, d: int, index: int) -> int | None:
    """Return where an index of a dim that was flattened from several lies in the bucket, if the host knows that."""
    if isinstance(index, PaddedSize) or x.sizes is None or not x.sizes.known_on_host or is_traced(x.dense):
        return None
    require_size(call, x.sizes, size_of(x.dims[d]), index + 1 if index >= 0 else -index)
    each = [set(x.sizes.each_on_host(factor.size)) for factor in x.dims[d]]
    if any(len(sizes) > 1 for sizes in each):
        return None
    shape = [size for sizes in each for size in sizes]
    places = np.unravel_index(index % math.prod(shape), shape)
    return int(np.ravel_multi_index(places, [factor.bucket for factor in x.dims[d]]))


def _size_on_host(x: PaddedValue, d: int) -> int | None:
    """Return the true size of a dim, if the host knows that and all rows have the same."""
    sizes = {*known_sizes(x, d)}
    return sizes.pop() if len(sizes) == 1 else None


@table.register(aten.slice, aten.slice_copy, across=True)
def slice_(call: PaddedCall, x: PaddedValue, dim: int, start: int | None, end: int | None, step: int) -> PaddedValue:
    """Slice a dim; negative ends count from the true end."""
    d, stop = dim % x.dim(), end
    if x.is_padded(d) and is_traced(x.dense):
        stop = _as_traced_size(x, d, stop)
    if isinstance(start, PaddedSize) or isinstance(stop, PaddedSize):
        return _sliced_at_sizes(x, d, start, stop, step)
    start, stop = start or 0, None if stop is None or stop >= _END else stop
    if start == 0 and (stop is None or stop >= x.shape[d]) and step == 1:
        return x.like(call.dense(), x.fill)
    size, before = prefix_size(x, d), (slice(None),) * d
    if size == rows_symbol():
        assert x.sizes is not None
        rows = slice(start, stop, step)
        out = x.dense[(*before, rows)]
        return result(out, with_dim(x.dims, d, padded_dim(out.shape[d], size)), x.sizes.of_rows(rows), x.fill)
    true_size = sliced(size, start, stop, step)[1]
    if start >= 0:
        bucket_stop = x.shape[d] if stop is None else stop
        out = x.dense[(*before, slice(start, bucket_stop, step))]
        dims = with_dim(x.dims, d, padded_dim(out.shape[d], true_size))
        if bucket_stop >= 0:
            return result(out, dims, x.sizes, x.fill_if_shifted)
        # Valid positions of the input become padding of the result, without a gradient.
        return result(out, dims, x.sizes).gradient_masked()
    last = x.shape[d] if stop is None else stop
    longest = len(range(x.shape[d])[start:last:step]) if last < 0 or stop is None else len(range(0, -start, step))
    factors, on_host = padded_dim(longest, true_size), _size_on_host(x, d)
    if on_host is not None and not is_traced(x.dense):
        # If the bucket has room, the result is a view, as it is of the unpadded data.
        at = max(on_host + start, 0)
        if at + (longest - 1) * step < x.shape[d]:
            out = x.dense[(*before, slice(at, at + (longest - 1) * step + 1, step))]
            return result(out, with_dim(x.dims, d, factors), x.sizes).gradient_masked()
    return take_range(x, d, (torch.as_tensor(x.size(d)) + start).clamp(min=0), longest, factors, step)


def _as_traced_size(x: PaddedValue, d: int, stop: int | None) -> int | None:
    """Return the end of a slice in compiled code, where sizes are plain ints, as the padded size that it must be.

    In `conv1d(h, w, padding=2)[..., : h.shape[-1]]` the end is the bucket of the symbol that the dim's size is made of.
    """
    size, sizes = prefix_size(x, d), x.sizes
    if sizes is None or type(stop) is not int or size.is_Symbol:
        return stop
    buckets = dict(zip(sizes.symbols, sizes.buckets, strict=True))
    found = [symbol for symbol in size.free_symbols if buckets.get(symbol) == stop]
    return PaddedSize(stop, found[0], sizes) if len(found) == 1 and stop < x.shape[d] else stop


def _sliced_at_sizes(x: PaddedValue, d: int, start: int | None, stop: int | None, step: int) -> PaddedValue:
    """Slice a dim with bounds that are padded sizes: they mean the true ones."""
    sizes, size = sizes_with(x.sizes, start, stop), prefix_size(x, d)
    if size == rows_symbol() or step != 1:
        raise UnsupportedCall("its step is not 1, or it slices the rows of a ragged batch")
    first, last = bound_in(size, start, 0, sizes), bound_in(size, stop, size, sizes)
    length = largest(0, last - first)
    if first == 0 and is_same(length, size, sizes):
        return x.like(x.dense.narrow(d, 0, x.shape[d]), x.fill)
    bucket = min(most(length, sizes), x.shape[d])
    factors = padded_dim(bucket, length)
    if not first.is_Integer:
        assert sizes is not None
        return take_range(replace(x, sizes=sizes), d, sizes.of_each(first), bucket, factors)
    out = x.dense.narrow(d, min(int(first), x.shape[d] - bucket), bucket)
    # Valid positions of the input may become padding of the result, without a gradient.
    return result(out, with_dim(x.dims, d, factors), sizes).gradient_masked()


@table.register(aten.narrow.default, across=True)
def narrow(call: PaddedCall, x: PaddedValue, dim: int, start: int, length: int) -> PaddedValue:
    """Select `length` positions from `start` on, which counts from the true end if negative."""
    d, sizes = dim % max(x.dim(), 1), sizes_with(x.sizes, start, length)
    is_sized = isinstance(start, PaddedSize) or isinstance(length, PaddedSize)
    if not is_sized and start + length == (x.shape[d] if start >= 0 else 0):
        return apply(aten.slice.Tensor, x, d, start, None)
    at, count, size = true_expression(start), true_expression(length), prefix_size(x, d)
    if is_sized and noting.into is None and not (sizes is not None and sizes.known_on_host) and least(at, sizes) < 0:
        raise UnsupportedCall("its start may count from the end")
    if is_sized:
        require_size(call, sizes, at, 0)
    require_size(call, sizes, count, 0)
    require_size(call, sizes, added(size if start >= 0 else 0, multiplied(-1, at), multiplied(-1, count)), 0)
    if start < 0:
        require_size(call, sizes, size, -start)
    return apply(aten.slice.Tensor, x, d, start, start + length)


@table.register(aten.split_with_sizes, aten.split_with_sizes_copy, aten.unsafe_split_with_sizes, aten.split.sizes,
                aten.split.default, across=True)  # fmt: skip
def split_into(call: PaddedCall, x: PaddedValue, dim: int) -> list[PaddedValue]:
    """Split into sizes that add up to the bucket's; the last part ends at the true end."""
    sizes: Sequence[int] = call.get("split_sizes", call.get("split_size"))
    if sum(sizes) != x.shape[dim]:
        raise UnsupportedCall(f"the sizes {list(sizes)} do not add up to the bucket's {x.shape[dim]}")
    return split_at(call, x, dim, list(itertools.accumulate(sizes))[:-1])


@table.register(aten.tensor_split.indices, across=True)
def split_at(call: PaddedCall, x: PaddedValue, dim: int, indices: Sequence[int]) -> list[PaddedValue]:
    """Split at positions; parts end at the true end."""
    bounds = [0, *indices, None]
    return [apply(aten.slice.Tensor, x, dim, start, end) for start, end in itertools.pairwise(bounds)]


@table.register(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor, across=True)
def split(call: PaddedCall, x: PaddedValue, dim: int, split_size: int) -> list[PaddedValue]:
    """Split into parts of one size, and a rest."""
    size_in_rows(x, dim)
    count = _same_count(call, x, dim, lambda n: max(-(-n // split_size), 1) if split_size else 1)
    return [apply(aten.slice.Tensor, x, dim, i * split_size, (i + 1) * split_size) for i in range(count)]


@table.register(aten.chunk, aten.unsafe_chunk, across=True)
def chunk(call: PaddedCall, x: PaddedValue, dim: int, chunks: int) -> list[PaddedValue]:
    """Split into at most this many parts of one size; the last may be smaller."""
    true_size = size_in_rows(x, dim)
    count = _same_count(call, x, dim, lambda n: -(-n // -(-n // chunks)) if n else chunks)
    size = floor_divided(true_size + chunks - 1, chunks)
    return [_part(x, dim, i * size, smallest(size, largest(0, true_size - i * size)), chunks) for i in range(count)]


@table.register(aten.tensor_split.sections, across=True)
def sections(call: PaddedCall, x: PaddedValue, dim: int, sections: int) -> list[PaddedValue]:
    """Split into this many parts, of which the first ones may be one longer."""
    true_size = size_in_rows(x, dim)
    min_size = floor_divided(true_size, sections)
    starts = [i * min_size + smallest(i, true_size - sections * min_size) for i in range(sections)]
    sizes = [floor_divided(true_size + sections - 1 - i, sections) for i in range(sections)]
    return [_part(x, dim, start, size, sections) for start, size in zip(starts, sizes, strict=True)]


@table.register(aten.unbind, aten.unbind_copy, across=True)
def unbind(call: PaddedCall, x: PaddedValue, dim: int) -> list[PaddedValue]:
    """Select each index of a dim."""
    is_rows = prefix_size(x, dim) == rows_symbol()
    count = x.shape[dim] if is_rows else _same_count(call, x, dim, lambda n: n)
    return [apply(aten.select.int, x, dim, i) for i in range(count)]


def _part(x: PaddedValue, dim: int, start: Size, size: Size, parts: int) -> PaddedValue:
    """Return one of `parts` parts of a dim, from the index `start` on."""
    assert x.sizes is not None
    d = dim % x.dim()
    longest = -(-x.shape[d] // parts)
    return take_range(x, d, x.sizes.of_each(start), longest, padded_dim(longest, size))


def _same_count(call: PaddedCall, x: PaddedValue, d: int, count: Callable[[int], int]) -> int:
    """Return the number of parts that a dim has, if the host knows its true sizes and it is the same for all rows."""
    is_unknown = is_traced(x.dense) or needs_host(x.dense, call.op.name())
    counts = set() if is_unknown else {count(n) for n in known_sizes(x, d)}
    if not counts:
        raise DataDependentCall("the number of parts would depend on the true size")
    if len(counts) > 1:
        raise UnsupportedCall("the number of parts differs from row to row")
    return counts.pop()
