"""A padded value as the rules see it: dense storage of the bucket's shape, and the dims that say which part is valid.

Two invariants hold for every rule. The contents of the padding are undefined unless `fill` says so, and so is the
gradient that arrives there: NaN is allowed in both. So a rule that combines positions fills its operands with a neutral
element first, which also stops the gradient; and a rule whose backward combines positions (every row adds to a weight's
gradient) masks the gradient of its result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.lazy_storage import fill_padding, mask_gradient
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.gradient_masking import GradientTracker, IsZero, MaskGradient
from subtensors.dispatch.padded.size_conditions import noting
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import (
    Factor,
    Factors,
    bucket_of,
    is_padded,
    merged,
    padded_dim,
    size_of,
    static,
    static_dims,
)
from subtensors.dispatch.sizes.expressions import Size, as_expression
from subtensors.dispatch.torch_internals.dispatcher import without_overrides

Number = int | float | bool

FINITE_FILL: Literal["finite"] = "finite"
"""The fill of padding known only to be finite, unless valid values have NaN or infinity for the same reason."""

EDGE_FILL: Literal["edge"] = "edge"
"""The fill with the value at the first position of each padded dim: ops on the padding see only valid values."""

Fill = Number | Literal["finite", "edge"]
View: TypeAlias = Literal["", "alias", "copy"]


@dataclass(eq=False, frozen=True)
class Layout:
    """Properties by which rules decide besides true sizes: one object for all values that share them."""

    dims: tuple[Factors, ...]
    dtype: torch.dtype
    device: torch.device
    fill: Fill | None
    view: View


# The last one, the text of the fill, tells 0 from -0.0 and False.
_layout: Callable[..., Layout] = functools.lru_cache(4096)(lambda *fields: Layout(*fields[:-1]))


@dataclass(eq=False)
class PaddedValue:
    """A tensor as the rules see it.

    Args:
        dense: the padded storage, of the bucket's shape.
        dims: the factors of each dim; a dim of one static factor has no padding.
        sizes: the true sizes behind the factors; None when nothing is padded.
        fill: the value throughout the padding, `FINITE_FILL` or `EDGE_FILL`; None when nothing is known.
        view: for the result of a view op, "alias" if it shares the input's memory, "copy" if it had to be copied.
        tracker: the knowledge of the gradient that arrives at it; None where gradients are not tracked.
    """

    dense: Tensor
    dims: tuple[Factors, ...]
    sizes: TrueSizes | None = None
    fill: Fill | None = None
    view: View = ""
    tracker: GradientTracker | None = None
    _padded_dims: list[int] | None = field(default=None, init=False, repr=False)

    @property
    def shape(self) -> torch.Size:
        """The bucket shape, in ints: where a compiler left a size open, its graph is for this bucket."""
        shape = self.dense.shape
        try:
            hash(shape)
        except TypeError:  # a compiler's symbol has no hash
            return torch.Size(map(int, shape))
        return shape

    def dim(self) -> int:
        """The number of dims."""
        return self.dense.dim()

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.dense.dim()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the storage."""
        return self.dense.dtype

    def is_padded(self, dim: int) -> bool:
        """Return whether this dim has padding, or is the rows of a ragged batch."""
        return is_padded(self.dims[dim])

    @property
    def padded_dims(self) -> list[int]:
        """The dims with padding."""
        if self._padded_dims is None:
            self._padded_dims = [d for d, factors in enumerate(self.dims) if is_padded(factors)]
        return self._padded_dims

    def is_rows(self, dim: int) -> bool:
        """Return whether this dim is the rows of a ragged batch; there may be several, as of products of all pairs."""
        return len(self.dims[dim]) == 1 and self.dims[dim][0].size == rows_symbol()

    @property
    def rows_dim(self) -> int | None:
        """The first dim that is the rows of a ragged batch; None where none is, or they are part of another dim."""
        return next(filter(self.is_rows, range(self.dim())), None)

    @property
    def is_tracked(self) -> bool:
        """Return whether the storage is tracked by autograd."""
        return self.dense.requires_grad and torch.is_grad_enabled()

    def size(self, dim: int) -> Tensor | int:
        """The true size of a dim: () or, of several rows, (rows,) int64 on the device; an int where it is static."""
        if not self.is_padded(dim) or self.sizes is None:
            return self.shape[dim]
        return self.sizes.of_each(size_of(self.dims[dim]))

    def mask(self, only: Iterable[int] | None = None) -> Tensor | None:
        """Return the mask of valid elements.

        Args:
            only: the dims whose padding counts; all by default.

        Returns:
            bool, broadcastable to `dense`; None when every element is valid.
        """
        wanted = tuple(self.padded_dims if only is None else (d for d in only if self.is_padded(d)))
        return self.sizes.mask(self.dims, wanted) if wanted and self.sizes is not None else None

    def mask_of_all(self) -> Tensor:
        """Return the mask of valid elements, bool, of the shape of `dense`."""
        mask = self.mask()
        everywhere = torch.ones((), dtype=torch.bool, device=self.dense.device) if mask is None else mask
        return everywhere.expand(self.dense.shape)

    def valid_count(self, dims: Sequence[int]) -> Tensor:
        """Count the valid elements along some dims, which are kept with size 1."""
        mask = self.mask(dims)
        if mask is None:
            return torch.full((), math.prod(self.shape[d] for d in dims), device=self.dense.device)
        constant = math.prod(self.shape[d] for d in dims if mask.shape[d] == 1)
        return mask.sum(list(dims), keepdim=True) * constant

    @property
    def padding_is_finite(self) -> bool:
        """Return whether the padding has no NaN or infinity, unless valid values have them for the same reason."""
        return isinstance(self.fill, str) or (self.fill is not None and math.isfinite(self.fill))

    @property
    def fill_if_shifted(self) -> Fill | None:
        """The fill that is known if the positions of a padded dim are shifted; None when unknown."""
        return None if self.fill == EDGE_FILL else self.fill

    @property
    def padding_is_bounded(self) -> bool:
        """Return whether the padding holds zeros or numbers of the magnitude of valid values."""
        return self.fill == 0 or isinstance(self.fill, str)

    def with_bounded_padding(self) -> Tensor:
        """Return the storage, with 0 in the padding unless `padding_is_bounded`; then its gradient isn't masked."""
        return self.dense if self.padding_is_bounded else self.filled(0)

    def filled(self, value: Number, only: Iterable[int] | None = None) -> Tensor:
        """Return the storage with `value` in the padding of some dims, all by default; its gradient there is zero."""
        if _same_number(self.fill, value):
            return self.gradient_masked().dense
        mask = self.mask(only)
        return self.dense if mask is None else self._filled(self.dense, mask, value)

    def _filled(self, dense: Tensor, mask: Tensor, value: Number | Tensor, is_zero: IsZero | None = None) -> Tensor:
        if not isinstance(value, Tensor):
            value = self._number(value, dense)
        if type(dense) in LAZY_TYPES:
            return fill_padding(dense, mask, value)
        if not self.is_tracked:
            return torch.where(mask, dense, value)
        return opaque(MaskGradient.apply, dense, mask, value, self._number(0, dense), is_zero)  # type: ignore[no-any-return]

    def _number(self, value: Number, like: Tensor) -> Number | Tensor:
        assert self.sizes is not None
        return self.sizes.fill(_as_dtype(value, like.dtype), like.dtype, like.device)

    def with_finite_padding(self) -> Tensor:
        """Return the storage, with 0 in the padding unless it is known to be finite."""
        return self.dense if self.padding_is_finite else self.filled(0)

    def cleaned(self, value: Number = 0) -> PaddedValue:
        """Return this padded value with `value` throughout its padding."""
        return replace(self, dense=self.filled(value), fill=value, tracker=None)

    def edge_filled(self, only: Iterable[int] | None = None, is_zero: IsZero | None = None) -> Tensor:
        """Return the storage with the first valid values in place of padding, which are in the domain of any op.

        Args:
            only: the dims whose padding counts; all by default.
            is_zero: called in the backward to ask if the incoming gradient is zero there already.
        """
        if self.fill == EDGE_FILL:
            return self.dense
        dense = self.dense
        for d in self.padded_dims if only is None else only:
            mask = self.mask([d])
            if mask is not None:
                first = dense.narrow(d, 0, 1).detach()
                if torch.is_grad_enabled():
                    # There may be no valid value, and a gradient of zero needs finite operands to stay zero.
                    first = torch.where(mask.narrow(d, 0, 1), first, self._number(0, dense))
                dense = self._filled(dense, mask, first, is_zero)
        return dense

    def gradient_masked(self) -> PaddedValue:
        """Return this value with the gradient of its padding masked."""
        mask = self.mask() if self.is_tracked else None
        if mask is None:
            return self
        assert self.sizes is not None
        tracker = GradientTracker(is_masked=True)
        return replace(self, dense=masked_gradient(self.dense, mask, self.sizes, tracker.arrives_zero), tracker=tracker)

    def gradient_tracked(self) -> PaddedValue:
        """Return this value with a tracker of whether its gradient is zero in its padding."""
        return replace(self, tracker=GradientTracker()) if self.is_tracked else self

    def gradient_is_zero_if(self, *results: PaddedValue) -> None:
        """State that this call's gradient of an operand is zero in its padding if the gradients of some results are."""
        if self.tracker is not None:
            self.tracker.conditions.append([r.tracker or GradientTracker() for r in results])

    def layout(self) -> Layout:
        """Return the properties by which rules decide."""
        return _layout(self.dims, self.dtype, self.dense.device, self.fill, self.view, repr(self.fill))

    def as_view(self, view: View) -> PaddedValue:
        """Return this value, marked as a view of this kind."""
        return PaddedValue(self.dense, self.dims, self.sizes, self.fill, view, self.tracker)

    def like(self, dense: Tensor, fill: Fill | None = None) -> PaddedValue:
        """Return a value with another storage of the same shape, and the same padding."""
        sizes = self.sizes if self.sizes is None else self.sizes.to(dense.device)
        return PaddedValue(dense, self.dims, sizes, fill)


def masked_gradient(dense: Tensor, mask: Tensor, sizes: TrueSizes, is_zero: IsZero | None = None) -> Tensor:
    """Return a storage with a gradient of zero where a mask of true sizes, which broadcasts to it, is False.

    The backward calls `is_zero` to ask if the incoming gradient is zero there already.
    """
    if type(dense) in LAZY_TYPES:
        return mask_gradient(dense, mask, dense)
    zero = sizes.fill(0.0, dense.dtype, dense.device)
    return opaque(MaskGradient.apply, dense, mask, None, zero, is_zero)  # type: ignore[no-any-return]


def opaque(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call a function that a recording of the rule repeats as a whole, not what it calls."""
    if noting.recording is None:
        return function(*args)
    with without_overrides():
        out = function(*args)
    noting.recording(function, args, {}, out)
    return out


def unpadded_value(dense: Tensor) -> PaddedValue:
    """Return a tensor without padding as a value."""
    value = PaddedValue(dense, static_dims(dense.shape))
    value._padded_dims = []
    return value


def result(dense: Tensor, dims: Sequence[Factors], sizes: TrueSizes | None, fill: Fill | None = None) -> PaddedValue:
    """Return a rule's result, after a check that its dims match its storage.

    Raises:
        UnsupportedCall: a length may differ from row to row, and no dim of rows remains.
    """
    dims = tuple(dims)
    assert tuple(map(bucket_of, dims)) == dense.shape, (dims, dense.shape)
    if sizes is not None and sizes.rows is not None:
        factors = [factor for factors in dims for factor in factors]
        if sizes.rows == 1:
            dims = _of_one_row(dims)
        elif any(sizes.is_ragged(factor.size) for factor in factors):
            dims = tuple(_rows_apart(d, sizes.rows) for d in dims)
            if sum(factor.size == rows_symbol() for d in dims for factor in d) != 1:
                raise UnsupportedCall(
                    "the rows of a ragged batch, whose lengths differ, are mixed, repeated or cut by it"
                )
    return PaddedValue(dense, dims, sizes if sizes is None else sizes.to(dense.device), fill)


def reduced_result(out: PyTree, x: PaddedValue, reduced: Sequence[int], keepdim: bool) -> PyTree:
    """Return the results of a reduction of `x`, with the padding of the dims that remain."""
    if keepdim:
        dims: list[Factors] = [static_dims([1])[0] if d in reduced else f for d, f in enumerate(x.dims)]
    else:
        dims = [f for d, f in enumerate(x.dims) if d not in reduced]
    if not any(not f.is_static for factors in dims for f in factors):
        return tree_map_only(Tensor, unpadded_value, out)
    return tree_map_only(Tensor, lambda t: result(t, dims, x.sizes), out)


def _rows_apart(factors: Factors, rows: int) -> Factors:
    """Split a dim so that the rows of a ragged batch are a factor of their own, even if it was flattened."""
    each = rows_symbol()
    if not any(f.size.has(each) and f.size != each for f in factors):
        return factors
    parts = [
        (Factor(rows, each), static(f.bucket // rows)) if f.size == each * (f.bucket // rows) else (f,) for f in factors
    ]
    return tuple(factor for part in parts for factor in part)


def _of_one_row(dims: Sequence[Factors]) -> tuple[Factors, ...]:
    """Return the dims of a batch of one row, whose lengths need no dim of rows to refer to."""
    rows = rows_symbol()
    own = (Factor(1, rows),)
    if sum(f.size.has(rows) for factors in dims for f in factors) == 1 and own in dims:
        return tuple(dims)
    at = next((d for d, f in enumerate(dims) if f == own), None)
    without = [merged([Factor(f.bucket, as_expression(f.size).subs(rows, 1)) for f in factors]) for factors in dims]
    if at is None:
        at = next((d for d, factors in enumerate(without) if not factors), None)
    return tuple(own if d == at else factors or (static(1),) for d, factors in enumerate(without))


class ScatteredDim(UnsupportedCall):
    """A dim whose valid positions must lie in another way: come first, where it was flattened from several dims.

    Args:
        value: a value.
        dim: the dim.
        factors: those of the other way; by default one in which the valid positions come first.
    """

    def __init__(self, value: PaddedValue, dim: int, factors: Factors = ()) -> None:
        super().__init__(f"dim {dim} was flattened from several dims and its valid positions lie scattered in it")
        self.value, self.dim = value, dim
        self.factors = factors or padded_dim(value.shape[dim], size_of(value.dims[dim]))


def prefix_size(value: PaddedValue, dim: int) -> Size:
    """Return the true size of a dim whose valid positions come first.

    Raises:
        ScatteredDim: the valid positions lie scattered, as after a flatten.
    """
    if len(value.dims[dim]) != 1:
        raise ScatteredDim(value, dim)
    return value.dims[dim][0].size


def size_in_rows(value: PaddedValue, dim: int) -> Size:
    """Return `prefix_size` of a dim that isn't the rows of a ragged batch."""
    size = prefix_size(value, dim)
    if size.has(rows_symbol()):
        raise UnsupportedCall("it adds, splits or repeats the rows of a ragged batch")
    return size


def known_sizes(value: PaddedValue, dim: int) -> tuple[int, ...]:
    """Return the true size of a padded dim, one for each row of a ragged batch; none where the host knows none."""
    sizes = value.sizes
    if not value.is_padded(dim) or sizes is None or not sizes.known_on_host:
        return ()
    return tuple(max(n, 0) for n in sizes.each_on_host(size_of(value.dims[dim])))


def _same_number(a: Fill | None, b: Number) -> bool:
    is_equal = isinstance(a, int | float) and a == b and math.copysign(1, a) == math.copysign(1, b)
    return is_equal or (a != a and b != b)


def _as_dtype(value: Number, dtype: torch.dtype) -> Number:
    if dtype.is_complex:
        return value
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
