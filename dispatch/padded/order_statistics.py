"""Sorting, ranking, medians, modes and quantiles: padding sorts behind every valid element.

Of n valid elements, m of them NaN, in sorted order: a median is at rank (n - 1) // 2 and is NaN if m > 0, a nanmedian
at (n - m - 1) // 2; the q-quantile is at q (n - 1), between two elements if that is not an integer. The device counts n
and m, so no rank depends on what the host knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.lazy_storage import is_lazy
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.data_dependent import valid_first
from subtensors.dispatch.padded.interpreter import PaddedCall, require_elements, require_size, table
from subtensors.dispatch.padded.padded_value import (
    PaddedValue,
    ScatteredDim,
    reduced_result,
    result,
    unpadded_value,
)
from subtensors.dispatch.padded.positions import ranks
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import is_prefix, size_of, static_dims, with_dim
from subtensors.dispatch.torch_internals.dispatcher import is_traced, without_modes
from subtensors.kernels.runtime.custom_ops import max_value, min_value

aten = torch.ops.aten


def sort_valid_first(x: PaddedValue, d: int, descending: bool = False) -> tuple[PaddedValue, PaddedValue]:
    """Sort values and positions, the valid ones first. A sort puts NaN above all numbers.

    Padding that equals a valid element stays behind it, since the sort is stable and the valid positions come first.
    """
    mixes_rows = _mixes_rows(x, d)
    if mixes_rows or ranks(x, d) is not None:
        if mixes_rows or (x.sizes is not None and x.sizes.rows is not None):
            raise UnsupportedCall("the sorted positions of a flattened dim would be of rows of different lengths")
        raise ScatteredDim(x, d)
    last = min_value(x.dense.dtype) if descending else _above_all(x.dense.dtype)
    values, positions = torch.sort(x.filled(last, [d]), dim=d, descending=descending, stable=True)
    return x.like(values).gradient_masked(), x.like(positions)


def _mixes_rows(x: PaddedValue, d: int) -> bool:
    """Return whether a flattened dim has rows of a ragged batch that differ in the size of another dim."""
    sizes = x.sizes
    if sizes is None or len(x.dims[d]) < 2 or all(factor.size != rows_symbol() for factor in x.dims[d]):
        return False
    others = (factor.size for e, factors in enumerate(x.dims) if e != d for factor in factors)
    return any(map(sizes.differs_by_row, others))


def _above_all(dtype: torch.dtype) -> float:
    """Return a number that no valid one sorts behind."""
    return math.nan if dtype.is_floating_point else max_value(dtype)


@table.register(aten.sort, across=True)
def sort(call: PaddedCall, x: PaddedValue, dim: int = -1, descending: bool = False) -> PyTree:
    """Sort along a dim."""
    return sort_valid_first(x, dim % x.dim(), descending)


@table.register(aten.histc)
def histc(call: PaddedCall, x: PaddedValue, min: float, max: float) -> PaddedValue:
    """Count the valid elements in each bin; padding is beyond the last one."""
    if min == max:
        raise UnsupportedCall("its bins depend on values")
    beyond = max_value(x.dense.dtype)  # infinity; to add 1 would round to the last bin
    if beyond <= max:
        raise UnsupportedCall("no number of its dtype is beyond its bins")
    return unpadded_value(call.dense({"self": x.filled(beyond)}))


@table.register(aten.topk, across=True)
def topk(call: PaddedCall, x: PaddedValue, k: int, dim: int, largest: bool) -> PyTree:
    """The k largest or smallest elements."""
    d = dim % x.dim()
    require_size(call, x.sizes, size_of(x.dims[d]), k)
    dims = with_dim(x.dims, d, static_dims([k])[0])
    return tuple(result(r.dense.narrow(d, 0, k), dims, x.sizes) for r in sort_valid_first(x, d, largest))


@table.register(aten.kthvalue, across=True)
def kthvalue(call: PaddedCall, x: PaddedValue, k: int, dim: int, keepdim: bool) -> PyTree:
    """The element of rank k."""
    d = dim % x.dim()
    require_size(call, x.sizes, size_of(x.dims[d]), k)
    return _elements(x, d, sort_valid_first(x, d), torch.full((), k - 1, device=x.dense.device), keepdim)


@table.register(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(call: PaddedCall, invert: bool) -> PaddedValue:
    """Test whether each element is among the valid test elements."""
    tests, given = call.get("test_elements"), call.get("elements", call.get("element"))
    if not isinstance(tests, PaddedValue) or not tests.padded_dims:
        return given.like(call.dense())  # type: ignore[no-any-return]
    if not isinstance(given, PaddedValue):
        given = unpadded_value(torch.as_tensor(given, device=tests.dense.device))
    equal = given.dense.unsqueeze(-1) == tests.dense.reshape(-1)
    found = (equal & tests.mask_of_all().reshape(-1)).any(-1)
    return given.like(~found if invert else found)


@table.register(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def searchsorted(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Find the insertion points of values in a sorted sequence, whose padding is above all of them."""
    name = "sorted_sequence" if "sorted_sequence" in call else "boundaries"
    sequence: PaddedValue = call[name]
    if sequence.dim() > 1 or call.get("sorter") is not None:
        raise UnsupportedCall("each row of the sequence has its own values")
    if not is_prefix(sequence.dims[0]):
        raise ScatteredDim(sequence, 0)
    if not sequence.padded_dims:
        return x.like(call.dense())
    if sequence.dense.is_floating_point():
        raise UnsupportedCall("NaN sorts above the infinity that fills the padding")
    found, size = call.dense({name: sequence.filled(max_value(sequence.dense.dtype))}), sequence.size(0)
    if isinstance(size, Tensor) and size.dim():
        raise UnsupportedCall("each row of the sequence has its own values")
    found = torch.minimum(found, torch.as_tensor(size, dtype=found.dtype, device=found.device))
    return x.like(found) if x.padded_dims else unpadded_value(found)


@table.register(aten.median.dim, aten.nanmedian.dim, across=True)
def median(call: PaddedCall, x: PaddedValue, dim: int, keepdim: bool) -> PyTree:
    """The median along a dim, the lower of two, and its position; NaN if there is any and it counts."""
    d = dim % x.dim()
    require_elements(call, x, [d])
    return _elements(x, d, sort_valid_first(x, d), _median_rank(call, x, [d]), keepdim)


@table.register(aten.median.default, aten.nanmedian.default, across=True)
def median_of_all(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """The median of all elements; those that equal it share its gradient."""
    if is_lazy(x.dense):
        raise UnsupportedCall("it sorts all elements, which are never in memory together")
    rank = _median_rank(call, x, list(range(x.dim()))).reshape(1)
    with torch.no_grad():
        flat = x.filled(_above_all(x.dense.dtype)).reshape(-1).sort().values
        value = flat.gather(0, rank).reshape(())
        equal = (x.dense == value) | (x.dense.isnan() & value.isnan())
        mask = x.mask()
        chosen = equal if mask is None else equal & mask
    return unpadded_value(SharedGradient.apply(x.dense, value, chosen) if x.is_tracked else value)  # type: ignore[no-untyped-call]


@table.register(aten.mode, across=True)
def mode(call: PaddedCall, x: PaddedValue, dim: int, keepdim: bool) -> PyTree:
    """The smallest of the most frequent values, and its last position: in sorted order, the end of a longest run.

    With NaN, torch's result depends on the order of the elements; here each NaN is a value above all others.
    """
    d = dim % x.dim()
    require_elements(call, x, [d])
    ranked = sort_valid_first(x, d)
    values = ranked[0].dense.detach()
    index = torch.arange(x.shape[d], device=values.device).view([-1 if e == d else 1 for e in range(x.dim())])
    begins = (values != values.roll(1, d)) | (index == 0)
    length = index - torch.where(begins, index, 0).cummax(d).values + 1
    length = torch.where(index < x.valid_count([d]), length, 0)
    return _elements(x, d, ranked, length.argmax(d, keepdim=True), keepdim)


@table.register(aten.quantile, aten.nanquantile)
def quantile(
    call: PaddedCall, x: PaddedValue, q: PaddedValue | float, dim: int | None, keepdim: bool, interpolation: str
) -> PaddedValue:
    """Interpolate between the elements below and above the rank q (n - 1)."""
    d = None if dim is None else dim % max(x.dim(), 1)
    fractions = _fractions(x, q, interpolation)
    reduced = list(range(x.dim())) if d is None else [d]
    if any(map(x.is_padded, reduced)):
        require_elements(call, x, reduced)
        count, nans = _counts(x, reduced)
        if d is None:
            values = valid_first(x.cleaned(math.nan)).sort(stable=True).values
            count, nans = count.reshape(1), nans.reshape(1)
        else:
            values = sort_valid_first(x, d)[0].dense.movedim(d, -1)
            count, nans = count.movedim(d, -1), nans.movedim(d, -1)
        flat = fractions.reshape(-1)
        if call.op.overloadpacket is aten.nanquantile:
            places = flat * (count - nans - 1)
        else:
            places = torch.where(nans > 0, (count - 1).to(flat.dtype), flat * (count - 1))
        # Without valid elements, rank 0 is padding, which is NaN.
        places = places.clamp(min=0).expand(*values.shape[:-1], len(flat))
        out = _between(values, places, interpolation)
        if keepdim:
            out = out.unsqueeze(d) if d is not None else out.reshape(*[1] * x.dim(), len(flat))
        out = out.movedim(-1, 0) if fractions.dim() else out.squeeze(-1)
    else:
        out = call.dense()
    kept = [static_dims([1])[0] if e in reduced else f for e, f in enumerate(x.dims) if keepdim or e not in reduced]
    return result(out, [*static_dims(fractions.shape), *kept], x.sizes)


class _ChosenContext(FunctionCtx):
    """The saved mask of the elements that share a gradient."""

    saved_tensors: tuple[Tensor]


class SharedGradient(torch.autograd.Function):
    """A value that equals some elements of a tensor, which share its gradient evenly."""

    @staticmethod
    def forward(ctx: _ChosenContext, dense: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        """The value."""
        ctx.save_for_backward(chosen)
        return value.clone()

    @staticmethod
    def backward(ctx: _ChosenContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient divided evenly among the chosen elements."""
        (chosen,) = ctx.saved_tensors
        return torch.where(chosen, gradients[0] / chosen.sum(), 0), None, None


def _counts(x: PaddedValue, reduced: list[int]) -> tuple[Tensor, Tensor]:
    """Count the valid elements, and the NaN among them, keeping dims."""
    nan, mask = x.dense.detach().isnan(), x.mask(reduced)
    return x.valid_count(reduced), (nan if mask is None else nan & mask).sum(reduced, keepdim=True)


def _median_rank(call: PaddedCall, x: PaddedValue, reduced: list[int]) -> Tensor:
    if x.dense.dtype == torch.bool:
        raise UnsupportedCall("torch has no median of bools")
    count, nans = _counts(x, reduced)
    rank = ((count - nans - 1) // 2).clamp(min=0)
    return rank if call.op.overloadpacket is aten.nanmedian else torch.where(nans > 0, count - nans, rank)


def _elements(x: PaddedValue, d: int, ranked: Sequence[PaddedValue], rank: Tensor, keepdim: bool) -> PyTree:
    """Return the element of a rank in each row, and its position."""
    rank = rank.expand([1 if e == d else n for e, n in enumerate(x.shape)])
    found = [r.dense.gather(d, rank) for r in ranked]
    return reduced_result(tuple(f if keepdim else f.squeeze(d) for f in found), x, [d], keepdim)


def _fractions(x: PaddedValue, q: PaddedValue | float, interpolation: str) -> Tensor:
    """Return q as a tensor, after checks of what torch requires of it."""
    if x.dense.dtype not in (torch.float32, torch.float64):
        raise UnsupportedCall("torch has quantiles of float and double only")
    if interpolation not in _ROUNDING:
        raise UnsupportedCall(f"there is no interpolation {interpolation!r}")
    if not isinstance(q, PaddedValue):
        if not 0 <= q <= 1:
            raise UnsupportedCall(f"q is {q}, out of [0, 1]")
        return torch.full((), q, dtype=x.dense.dtype, device=x.dense.device)
    given = q.dense
    if q.padded_dims or q.is_tracked:
        raise UnsupportedCall("q is padded or requires grad")
    if given.dim() > 1 or given.dtype != x.dense.dtype or given.device != x.dense.device:
        raise UnsupportedCall("q must be a number or a vector, of the same dtype and device")
    # On other devices torch doesn't check either, since that waits for the device.
    if given.device.type == "cpu" and not is_traced(given):
        with without_modes():  # one that looks for what a GPU would wait for
            if not bool(((given >= 0) & (given <= 1)).all()):
                raise UnsupportedCall("a q is out of [0, 1]")
    return given


_ROUNDING: dict[str, Callable[[Tensor], Tensor] | None] = {
    "linear": None,
    "midpoint": None,
    "lower": torch.floor,
    "higher": torch.ceil,
    "nearest": torch.round,
}


def _between(values: Tensor, ranks: Tensor, interpolation: str) -> Tensor:
    """Return the values at fractional ranks of the last dim."""
    rounded = _ROUNDING[interpolation]
    ranks = ranks if rounded is None else rounded(ranks)
    low = ranks.floor()
    below = values.gather(-1, low.long())
    if rounded is not None:
        return below
    above = values.gather(-1, ranks.ceil().long())
    return torch.lerp(below, above, torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - low)
