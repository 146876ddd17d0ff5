"""Slices and positions whose bounds are padded sizes, such as `x[..., : h.shape[-1]]` and `x[:, x.shape[1] - 1]`.

A bound that may be negative counts from the end at those true sizes at which it is, as in the unpadded program.
"""

from __future__ import annotations

from dataclasses import replace

from subtensors.dispatch.padded.interpreter import PaddedCall, refuse
from subtensors.dispatch.padded.offset_reads import take_range
from subtensors.dispatch.padded.padded_size import PaddedSize, bound_in, is_same, most, sizes_with, value_at
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims, with_dim
from subtensors.dispatch.sizes.expressions import largest, smallest
from subtensors.dispatch.torch_internals.dispatcher import is_traced


def as_traced_size(x: PaddedValue, d: int, stop: int | None) -> int | None:
    """Return the end of a slice in compiled code, where sizes are plain ints, as the padded size that it must be.

    In `conv1d(h, w, padding=2)[..., : h.shape[-1]]` the end is the bucket of the symbol that the dim's size is made of.
    """
    size, sizes = prefix_size(x, d), x.sizes
    if sizes is None or type(stop) is not int or size.is_Symbol:
        return stop
    buckets = dict(zip(sizes.symbols, sizes.buckets, strict=True))
    found = [symbol for symbol in size.free_symbols if buckets.get(symbol) == stop]
    return PaddedSize(stop, found[0], sizes) if len(found) == 1 and stop < x.shape[d] else stop


def sliced_at_sizes(call: PaddedCall, x: PaddedValue, d: int, start: int | None) -> PaddedValue:
    """Slice a dim with bounds that are padded sizes: they mean the true ones."""
    stop = call["end"]
    sizes = sizes_with(x.sizes, start, stop)
    size = prefix_size(x, d)
    if size == rows_symbol() or call["step"] != 1:
        raise refuse(call, "its step is not 1, or it slices the rows of a ragged batch")
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


def selected_at_size(call: PaddedCall, x: PaddedValue, d: int, index: PaddedSize) -> PaddedValue:
    """Select the position that a padded size means, such as the last one, `x.shape[d] - 1`."""
    sizes = sizes_with(x.sizes, index)
    assert sizes is not None
    size = prefix_size(x, d)
    if size == rows_symbol():
        raise refuse(call, "it selects a row of a ragged batch")
    if sizes.known_on_host and sizes.rows is None and not is_traced(x.dense):
        at, end = index.on_host(), value_at(size, sizes.assignment())
        if not -end <= at < end:
            raise IndexError(f"index {at} is out of bounds for dim {d} of true size {end}")
    is_negative = smallest(1, largest(0, -index.size))
    position = index.size + size * is_negative
    one = take_range(replace(x, sizes=sizes), d, sizes.of_each(position), 1, static_dims([1])[0])
    dims = [factors for i, factors in enumerate(x.dims) if i != d]
    return replace(result(one.dense.squeeze(d), dims, sizes), view="copy")
