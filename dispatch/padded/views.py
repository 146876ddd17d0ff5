"""Views: the storage is viewed, and the factors of the dims move along with it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, table
from subtensors.dispatch.padded.offset_reads import take_range
from subtensors.dispatch.padded.padded_size import (
    PaddedSize,
    dim_of,
    is_same,
    least,
    sizes_with,
    true_expression,
    value_at,
)
from subtensors.dispatch.padded.padded_value import PaddedValue, host_sizes, prefix_size, result
from subtensors.dispatch.padded.pointwise import broadcast, gradient_safe
from subtensors.dispatch.padded.regrouping import regrouped
from subtensors.dispatch.padded.size_bounds import as_traced_size, selected_at_size, sliced_at_sizes
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import (
    Factors,
    bucket_of,
    is_padded,
    padded_dim,
    reshaped,
    size_of,
    static_dims,
    with_dim,
)
from subtensors.dispatch.sizes.expressions import convolved, largest, sliced, smallest
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten
_END = 2**62  # torch writes an open end as the largest int64


@table.register(aten.view.default, aten.view_copy.default, aten._unsafe_view, aten.reshape, aten._reshape_copy)
def reshape(call: PaddedCall, x: PaddedValue, size: Sequence[int]) -> PaddedValue:
    """Merge and split dims."""
    if 0 in x.shape:
        raise refuse(call, "an empty tensor doesn't determine the dims of its sizes")
    try:
        dims = _reshaped(x.dims, tuple(map(int, size)))
    except RuleError as error:
        return _regrouped(call, x, size, error)
    for factors, n in zip(dims, size, strict=True):
        if isinstance(n, PaddedSize) and not is_same(size_of(factors), n.size, sizes_with(x.sizes, n)):
            reason = refuse(call, f"the size {n.size} is asked for a dim of true size {size_of(factors)}")
            return _regrouped(call, x, size, reason)
    return result(call.dense(), dims, x.sizes, x.fill)


def _regrouped(call: PaddedCall, x: PaddedValue, shape: Sequence[int], reason: RuleError) -> PaddedValue:
    """Gather what no view of the storage holds; where that can't be done either, raise the reason why no view does."""
    try:
        return regrouped(x, shape)
    except UnsupportedCall as error:
        raise refuse(call, f"{reason}; {error}") from None


@functools.lru_cache(4096)
def _reshaped(before: tuple[Factors, ...], shape: tuple[int, ...]) -> tuple[Factors, ...]:
    """Return the dims of a reshape, with static ones of size 1 for those without factors."""
    return tuple(factors or static_dims([1])[0] for factors in _factors_reshaped(before, shape))


def _factors_reshaped(before: Sequence[Factors], shape: Sequence[int]) -> list[Factors]:
    """Return the factors of a reshape, with padded factors of bucket 1, such as a batch of one row, in their own dims.

    Sizes don't determine the place of these: each goes to the first free dim of size 1.
    """
    single = [f for factors in before for f in factors if f.bucket == 1 and not f.is_static]
    after = reshaped([tuple(f for f in factors if f not in single) for factors in before], shape)
    for factor in single:
        empty = next((d for d, factors in enumerate(after) if not factors), None)
        if empty is None:
            # No dim is free: the factor stays beside its neighbours.
            return reshaped(before, shape)
        after[empty] = (factor,)
    return after


@table.register(aten.expand, aten.expand_copy, aten.broadcast_to)
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
                raise refuse(call, f"a dim of true size {size_of(factors)} is expanded to {wanted.size}")
            continue
        dims[d + added] = factors
    shape = [-1 if n == -1 else bucket_of(factors) for n, factors in zip(target, dims, strict=True)]
    # The padding of a dim that becomes a padded one holds copies of values.
    before = [None] * added + list(x.dims)
    is_kept = all(factors == own or not is_padded(factors) for factors, own in zip(dims, before, strict=True))
    fill = x.fill if is_kept else None
    return result(call.dense() if shape == target else x.dense.expand(shape), dims, sizes, fill)


@table.register(aten.expand_as, aten.broadcast_tensors)
def expand_as(call: PaddedCall) -> PyTree:
    """Broadcast operands to the dims, padding included, that a pointwise op would give them."""
    operands = call.values
    dims, sizes = broadcast(operands)
    shape = tuple(map(bucket_of, dims))
    outs = [result(gradient_safe(x, dims, shape, sizes).expand(shape), dims, sizes) for x in operands]
    return outs[0] if call.op is aten.expand_as.default else outs


@table.register(aten.meshgrid)
def meshgrid(call: PaddedCall, tensors: Sequence[PaddedValue], indexing: str = "ij") -> list[PaddedValue]:
    """Expand each vector along a dim of its own over the dims of all others."""
    vectors = [x if x.dim() else PaddedValue(x.dense.view(1), static_dims([1])) for x in tensors]
    sizes = call.sizes()
    dims = [x.dims[0] for x in vectors]
    shape = [x.shape[0] for x in vectors]
    outs = []
    for i, x in enumerate(vectors):
        at = [1] * len(vectors)
        at[i] = -1
        own: list[Factors] = [static_dims([1])[0]] * len(vectors)
        own[i] = x.dims[0]
        placed = PaddedValue(x.dense.view(at), tuple(own), x.sizes)
        out = result(gradient_safe(placed, dims, shape, sizes).expand(shape), dims, sizes)
        swapped = indexing == "xy" and len(vectors) > 1
        axes = [1, 0, *range(2, len(vectors))]
        outs.append(result(out.dense.permute(axes), [dims[a] for a in axes], sizes) if swapped else out)
    return outs


@table.register(aten.view_as, aten.reshape_as)
def view_as(call: PaddedCall, x: PaddedValue, other: PaddedValue) -> PaddedValue:
    """Return the input's elements in the same order, in another tensor's shape."""
    if other.shape == x.shape:
        return x.like(call.dense(), x.fill)
    return result(call.dense(), _reshaped(x.dims, tuple(other.shape)), x.sizes, x.fill)


@table.register(aten.requires_grad_)
def same(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Return the input itself."""
    return x.like(call.dense(), x.fill)


@table.register(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Add a last dim of real and imaginary parts."""
    # The wrapper hides the storage's conjugate bit from torch.
    paired = result(call.dense({"self": x.dense.resolve_conj()}), [*x.dims, *static_dims([2])], x.sizes)
    return replace(paired, view="copy" if x.dense.is_conj() else "")


@table.register(aten.select.int, aten.select_copy, across=True)
def select(call: PaddedCall, x: PaddedValue, dim: int, index: int) -> PaddedValue:
    """Select an index of a dim; a negative one counts from the true end."""
    d = dim % x.dim()
    dims = [factors for i, factors in enumerate(x.dims) if i != d]
    if isinstance(index, PaddedSize):
        return selected_at_size(call, x, d, index)
    size = prefix_size(x, d)
    if size == rows_symbol():
        return select_row(x, d, index)
    _check_index(x, d, index)
    if index >= 0:
        return result(call.dense(), dims, x.sizes, x.fill)
    on_host = host_sizes(x, d)
    if on_host is not None and len(on_host) == 1 and not is_traced(x.dense):
        return result(x.dense.select(d, on_host[0] + index), dims, x.sizes, x.fill)
    one = take_range(x, d, x.size(d) + index, 1, static_dims([1])[0])
    return replace(result(one.dense.squeeze(d), dims, x.sizes), view="copy")


@table.register(aten.slice, aten.slice_copy, across=True)
def slice_(call: PaddedCall, x: PaddedValue, dim: int, start: int | None, end: int | None, step: int) -> PaddedValue:
    """Slice a dim; negative ends count from the true end."""
    d, stop = dim % x.dim(), end
    if x.is_padded(d) and is_traced(x.dense):
        stop = as_traced_size(x, d, stop)
    if isinstance(start, PaddedSize) or isinstance(stop, PaddedSize):
        call.replace("end", stop)
        return sliced_at_sizes(call, x, d, start)
    start, stop = start or 0, None if stop is None or stop >= _END else stop
    if start == 0 and (stop is None or stop >= x.shape[d]) and step == 1:
        return x.like(call.dense(), x.fill)
    size = prefix_size(x, d)
    if size == rows_symbol():
        assert x.sizes is not None
        out = x.dense[(slice(None),) * d + (slice(start, stop, step),)]
        rows = with_dim(x.dims, d, padded_dim(out.shape[d], rows_symbol()))
        return result(out, rows, x.sizes.of_rows(slice(start, stop, step)), x.fill)
    true_size = sliced(size, start, stop, step)[1]
    if start >= 0:
        bucket_stop = x.shape[d] if stop is None else stop
        out = x.dense[(slice(None),) * d + (slice(start, bucket_stop, step),)]
        dims = with_dim(x.dims, d, padded_dim(out.shape[d], true_size))
        if bucket_stop >= 0:
            return result(out, dims, x.sizes, x.fill_if_shifted)
        # Valid positions of the input become padding of the result, without a gradient.
        return result(out, dims, x.sizes).gradient_masked()
    last = x.shape[d] if stop is None else stop
    longest = len(range(x.shape[d])[start:last:step]) if last < 0 or stop is None else len(range(0, -start, step))
    on_host = host_sizes(x, d)
    if on_host is not None and len(on_host) == 1 and not is_traced(x.dense):
        # If the bucket has room, the result is a view, as it is of the unpadded data.
        at = max(on_host[0] + start, 0)
        if at + (longest - 1) * step < x.shape[d]:
            out = x.dense[(slice(None),) * d + (slice(at, at + (longest - 1) * step + 1, step),)]
            return result(out, with_dim(x.dims, d, padded_dim(longest, true_size)), x.sizes).gradient_masked()
    first = x.size(d)
    assert not isinstance(first, int)
    return take_range(x, d, (first + start).clamp(min=0), longest, padded_dim(longest, true_size), step)


@table.register(aten.narrow.default, across=True)
def narrow(call: PaddedCall, x: PaddedValue, dim: int, start: int, length: int) -> PaddedValue:
    """Select `length` positions from `start` on, which counts from the true end if negative."""
    d = dim % max(x.dim(), 1)
    if isinstance(start, PaddedSize) or isinstance(length, PaddedSize):
        sizes = sizes_with(x.sizes, start, length)
        if sizes is not None and sizes.known_on_host and sizes.rows is None and x.dim():
            at, count, end = (
                value_at(size, sizes.assignment())
                for size in (true_expression(start), true_expression(length), prefix_size(x, d))
            )
            if not -end <= at <= end or count < 0 or at % max(end, 1) + count > end:
                raise RuntimeError(f"start ({at}) + length ({count}) exceeds dim {d} of true size {end}")
        if least(true_expression(start), sizes) < 0:
            raise refuse(call, "its start counts from the end")
        return apply(aten.slice.Tensor, x, d, start, start + length)
    end = start + length
    if end == (x.shape[d] if start >= 0 else 0):
        return apply(aten.slice.Tensor, x, d, start, None)
    for size in host_sizes(x, d) or ():
        if not -size <= start <= end <= (size if start >= 0 else 0):
            raise RuntimeError(f"start ({start}) + length ({length}) exceeds dim {d} of true size {size}")
    return apply(aten.slice.Tensor, x, d, start, end)


@table.register(aten.unfold, aten.unfold_copy, across=True)
def unfold(call: PaddedCall, x: PaddedValue, dimension: int, size: int, step: int) -> PaddedValue:
    """Windows of a dim, which start a step apart; the last one ends within the true size."""
    d, out, window = dimension % x.dim(), call.dense(), static_dims([size])
    windows = convolved(prefix_size(x, d), size, step)
    windowed = result(
        out, [*with_dim(x.dims, d, padded_dim(out.shape[d], windows)), *window], x.sizes, x.fill_if_shifted
    )
    # A padded window may overlap valid positions, and would add its gradient to theirs.
    return windowed.gradient_masked()


@table.register(aten.diagonal, aten.diagonal_copy, aten.linalg_diagonal, across=True)
def diagonal(call: PaddedCall, x: PaddedValue, offset: int, dim1: int, dim2: int) -> PaddedValue:
    """The diagonal of two dims: it ends where the first of them does."""
    a, b = dim1 % x.dim(), dim2 % x.dim()
    out = call.dense()
    dims = [factors for i, factors in enumerate(x.dims) if i not in (a, b)]
    down, along = max(-offset, 0), max(offset, 0)
    length = largest(0, smallest(prefix_size(x, a) - down, prefix_size(x, b) - along))
    return result(out, [*dims, padded_dim(out.shape[-1], length)], x.sizes, x.fill_if_shifted)


def select_row(x: PaddedValue, d: int, index: int) -> PaddedValue:
    """Return one row of a ragged batch, with its own size."""
    assert x.sizes is not None
    rest = [factors for i, factors in enumerate(x.dims) if i != d]
    return result(x.dense.select(d, index), rest, x.sizes.of_row(index), x.fill)


def _check_index(x: PaddedValue, d: int, index: int) -> None:
    """Raise IndexError for an index beyond the true size, if the host knows that and all rows have the same."""
    sizes = host_sizes(x, d)
    if sizes is not None and len(sizes) == 1 and not -sizes[0] <= index < sizes[0]:
        raise IndexError(f"index {index} is out of bounds for dim {d} of true size {sizes[0]}")
