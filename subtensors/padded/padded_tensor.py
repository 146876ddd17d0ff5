"""`PaddedTensor`: a tensor whose true size varies, stored at a bucket size that doesn't.

The other files of this folder import this one, which imports none of them. A method that needs one of their functions
finds it in `handlers`, where they register it at import.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
import torch
from torch import Tensor

from subtensors.arguments import whole_number
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.lazy_storage import is_lazy, traced_storage
from subtensors.dispatch.ops.plain_types import MASKED_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import EDGE_FILL, Fill, Layout, PaddedValue, View, unpadded_value
from subtensors.dispatch.padded.size_conditions import HostSize
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import SizeTuples, as_tuples, from_tuples, size_symbol
from subtensors.dispatch.torch_internals import dynamo_rules
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    import sympy

Metadata: TypeAlias = "tuple[tuple[Factors, ...], tuple[sympy.Symbol, ...], tuple[int, ...], Fill | None]"
"""The parts of a PaddedTensor that a compiler may hold: dims, the symbols of its sizes, their buckets, and its fill."""


class _Handlers:
    """The functions behind some methods of `PaddedTensor`, each set at import by the file that defines it."""

    torch_function: Callable[[Callable[..., PyTree], Args, Kwargs], PyTree]
    torch_dispatch: Callable[[Callable[..., PyTree], Args, Kwargs], PyTree]
    dense: Callable[[PaddedTensor], Tensor]
    pad: Callable[[Tensor, Mapping[int, Dim | int]], PaddedTensor]
    unpad: Callable[[PaddedTensor], Tensor | list[Tensor]]
    realize: Callable[[PaddedTensor], PaddedTensor]


handlers = _Handlers()


@dataclass(eq=False)
class ViewSource:
    """The origin of a view: its base, and the call that takes it.

    Args:
        base: returns the base; None if nothing refers to it any more, since a copied view doesn't keep it alive.
        func, call: the function, and its arguments.
        place: the value among these that stands for the base: the base, or a reference that doesn't keep it alive.
        position: the index of the view among the tensors that the call returns.
        versions: the versions of the base, and of the bases of that, when the view was taken.
        latest: the view as last retaken; None if it was never retaken.
    """

    base: Callable[[], PaddedTensor | None]
    func: Callable[..., PyTree]
    call: tuple[Args, Kwargs]
    place: PaddedTensor | weakref.ref[PaddedTensor]
    position: int
    versions: tuple[int, ...]
    latest: PaddedTensor | None = None

    def view(self, x: PaddedTensor) -> Tensor:
        """Take the view of another tensor in place of the base."""
        args, kwargs = tree_map_only((PaddedTensor, weakref.ref), lambda t: x if t is self.place else t, self.call)
        result: Tensor = tree_find(Tensor, self.func(*args, **kwargs))[self.position]
        return result


class PaddedTensor(Tensor):
    """A tensor padded to bucket sizes: ops act on its valid part, for any program made of supported ops.

    `shape` is the bucket shape, which kernels, graphs and compilers see; the true sizes are data, in a small tensor on
    the device. Values in the padding never reach a valid element, nor does their gradient reach a parameter.

    Args:
        t: a tensor of true sizes; see `st.pad`, which also takes a list.
        dims: for each padded dim its `st.Dim`.

    Raises:
        SizeError: a size is out of its Dim's range, or one Dim has two sizes.

    Example:
        >>> import subtensors as st
        >>> x = st.PaddedTensor(torch.ones(2, 3), {1: st.Dim("seq", max=16, buckets=4)})
        >>> x.shape, x.logical_shape
        (torch.Size([2, 4]), (2, 3))
        >>> x.sum().item(), x.mean(1).tolist()
        (6.0, [1.0, 1.0])
    """

    _dense: Tensor
    _layout: Layout
    _sizes: TrueSizes | None
    _tracker: GradientTracker | None = None
    _fill_version: int | None = None
    """The version of the storage that `_fill` describes; None where no write makes it stale."""
    _view_source: ViewSource | None = None
    _plain_views: Sequence[weakref.ref[Tensor]] = ()
    _copied_views: Sequence[weakref.ref[PaddedTensor]] = ()
    _known_shape: tuple[tuple[Factors, ...], TrueSizes | None, torch.Size] | None = None
    """The shape that was last asked for, with what it was made of."""

    @staticmethod
    def __new__(cls, t: Tensor, dims: Mapping[int, Dim | int]) -> PaddedTensor:
        """`st.pad(t, dims)`."""
        return handlers.pad(t, dims)

    def __init__(self, t: Tensor, dims: Mapping[int, Dim | int]) -> None:
        pass

    @property
    def _dims(self) -> tuple[Factors, ...]:
        return self._layout.dims

    @property
    def _fill(self) -> Fill | None:
        return self._layout.fill

    @property
    def _view(self) -> View:
        return self._layout.view

    @property
    def dense(self) -> Tensor:
        """The padded storage, of the bucket shape, tracked by autograd. The contents of the padding are undefined."""
        return handlers.dense(self)

    def mask(self) -> Tensor:
        """The mask of valid elements.

        Returns:
            A bool tensor of the bucket shape, True where an element is valid.

        Example:
            >>> import subtensors as st
            >>> st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)}).mask()
            tensor([ True,  True,  True, False])
        """
        return unwrap(self).mask_of_all().clone()

    def count(self, dim: int) -> Tensor:
        """The true size of a dim, on the device: what to divide by, never `shape[dim]`.

        Args:
            dim: a dim, from the end if negative.

        Returns:
            () int64; for a ragged dim (rows,).

        Raises:
            TypeError: `dim` is no int.
            IndexError: no such dim.

        Example:
            >>> import subtensors as st
            >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
            >>> x.sum() / x.count(0)
            tensor(1.)
        """
        d, rank = whole_number("dim", dim), self._dense.dim()
        if not -rank <= d < rank:
            raise IndexError(f"dim {d} of a PaddedTensor of {rank} dims")
        size = size_of(self._dims[d])
        if self._sizes is None or not is_padded(self._dims[d]):
            return torch.full((), int(size), dtype=torch.int64, device=self._dense.device)
        return self._sizes.of(size).clone()

    @property
    def logical_shape(self) -> tuple[HostSize, ...]:
        """The true shape; a ragged dim gives its lengths. Waits for the device where the host doesn't know the sizes.

        Example:
            >>> import subtensors as st
            >>> st.pad([torch.ones(2), torch.ones(3)], {0: st.Dim("n", max=8, buckets=4)}).logical_shape
            (2, (2, 3))
        """
        sizes = self._sizes
        each = [(size_of(factors), is_padded(factors)) for factors in self._dims]
        return tuple(sizes.on_host(size) if sizes and padded else int(size) for size, padded in each)

    def unpad(self) -> Tensor | list[Tensor]:
        """The unpadded data.

        Returns:
            A tensor of the true shape; for a ragged batch a list of tensors, one a row. Tracked by autograd.

        Raises:
            RuleError: under `torch.compile`, where the true size is unknown.

        Example:
            >>> import subtensors as st
            >>> st.pad(torch.arange(3), {0: st.Dim("n", max=8, buckets=4)}).exp().unpad().shape
            torch.Size([3])
        """
        return handlers.unpad(self)

    def realize(self) -> PaddedTensor:
        """Compute the storage of a tensor that was chunked; any other tensor is returned unchanged.

        Example:
            >>> import subtensors as st
            >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
            >>> st.chunk(x, rows=2).mul(2).realize().sum()
            tensor(6.)
        """
        return handlers.realize(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        padded = [
            f"{d}: {' x '.join(str(f.size) for f in factors)}"
            for d, factors in enumerate(self._dims)
            if is_padded(factors)
        ]
        known = self._sizes is not None and self._sizes.known_on_host
        shape = f"{list(self.shape)}, true shape {self.logical_shape}" if known else f"{list(self.shape)}"
        grad = ", requires_grad" if self.requires_grad else ""
        return (
            f"PaddedTensor({shape}, padded on {{{', '.join(padded)}}}, {str(self.dtype).removeprefix('torch.')} "
            f"{self.device}{grad})"
        )

    __str__ = __repr__
    __format__ = object.__format__

    def __dir__(self) -> list[str]:
        # Torch's would ask for every attribute, some of which warn.
        return sorted({*object.__dir__(self)} - {"volatile", "__cuda_array_interface__"})

    def tolist(self) -> Any:
        """The unpadded data as nested lists."""
        data = self.unpad()
        return [row.tolist() for row in data] if isinstance(data, list) else data.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The unpadded data as an array.

        Args:
            force: also if the tensor requires grad, or is on a device.

        Raises:
            RuleError: the tensor is a ragged batch, whose rows are separate arrays.

        Example:
            >>> import subtensors as st
            >>> st.pad(torch.arange(3), {0: st.Dim("n", max=8, buckets=4)}).numpy()
            array([0, 1, 2])
        """
        data = self.unpad()
        if isinstance(data, list):
            raise RuleError("a ragged batch is no array: [row.numpy() for row in x.unpad()] gives one a row")
        return data.numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedTensor:
        if id(self) not in memo:
            sizes = None
            if self._sizes is not None:
                # Tensors of one copied pytree go on sharing their sizes.
                sizes = memo.setdefault(id(self._sizes), self._sizes.clone())
                memo.setdefault(id(memo), []).append(self._sizes)
            value = PaddedValue(copy.deepcopy(self._dense, memo), self._dims, sizes, self._fill)
            memo[id(self)] = make_padded(value).requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., PaddedTensor], tuple[object, ...]]:
        symbols, buckets = (self._sizes.symbols, self._sizes.buckets) if self._sizes else ((), ())
        return _rebuild, (
            self._dense.detach(),
            tuple(tuple((f.bucket, as_tuples(f.size)) for f in factors) for factors in self._dims),
            tuple(map(str, symbols)),
            buckets,
            self._fill,
            self._sizes and self._sizes.values,
            self.requires_grad,
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        return handlers.torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        return handlers.torch_dispatch(func, args, kwargs or {})

    def _metadata(self) -> Metadata:
        symbols, buckets = (self._sizes.symbols, self._sizes.buckets) if self._sizes else ((), ())
        return self._dims, symbols, buckets, self._fill

    def _stable_hash_for_caching(self) -> str:
        """The hash of the metadata that compiled code cached on disk depends on."""
        return hashlib.sha256(repr(self._metadata()).encode()).hexdigest()

    @property
    def _true_sizes(self) -> Tensor:
        assert self._sizes is not None
        return self._sizes.values

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        if is_lazy(self._dense) and traced_storage(self._dense) is None:
            raise RuleError("a chunked PaddedTensor is no argument of compiled code: hand over its realize()")
        return ["_dense", "_true_sizes"] if self._sizes else ["_dense"], self._metadata()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], metadata: Metadata, outer_size: object, outer_stride: object
    ) -> PaddedTensor:
        dims, symbols, buckets, fill = metadata
        values = inner_tensors.get("_true_sizes")
        sizes = None if values is None else TrueSizes(symbols, buckets, values)
        return make_padded(PaddedValue(inner_tensors["_dense"], dims, sizes, fill))

    def __coerce_same_metadata_as_tangent__(
        self, expected: Metadata, expected_type: type | None = None
    ) -> Tensor | None:
        """Return this gradient with the padding that a compiled backward was traced for."""
        if expected_type is Tensor:
            return self._dense
        dims, symbols, _, fill = expected
        if dims != self._dims or self._sizes is None or symbols != self._sizes.symbols:
            return None
        value = unwrap(self)
        number = fill if isinstance(fill, int | float) else 0.0
        return make_padded(value.like(value.edge_filled() if fill == EDGE_FILL else value.filled(number), fill))


def make_padded(value: PaddedValue) -> PaddedTensor:
    """A PaddedTensor of a value, without an autograd connection between the two."""
    return wrap_layout(value.dense, value.layout(), value.sizes, value.tracker)


_make_wrapper: Callable[..., PaddedTensor] = Tensor._make_wrapper_subclass


def wrap_layout(
    dense: Tensor, layout: Layout, sizes: TrueSizes | None, tracker: GradientTracker | None = None
) -> PaddedTensor:
    """`make_padded` of a value with this layout."""
    shape, dtype, device = dense.shape, layout.dtype, layout.device
    if type(dense) is Tensor and dense.is_contiguous() and not dense.storage_offset():
        out = _make_wrapper(PaddedTensor, shape, dtype=dtype, device=device)
    else:
        strides, offset = dense.stride(), dense.storage_offset()
        out = _make_wrapper(PaddedTensor, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device)
    out._dense, out._sizes, out._layout = dense, sizes, layout
    if tracker is not None:
        out._tracker = tracker
    if layout.fill == EDGE_FILL:
        # A write to valid values leaves the padding unchanged, so it no longer repeats the edge.
        out._fill_version = dense._version
    return out


def unwrap(x: Tensor) -> PaddedValue:
    """The value of a tensor as the rules see it."""
    if not isinstance(x, PaddedTensor):
        return unpadded_value(x)
    return PaddedValue(x._dense, x._dims, x._sizes, fill_of(x), x._view, x._tracker)


def fill_of(x: PaddedTensor) -> Fill | None:
    """The known contents of a PaddedTensor's padding; None if they are unknown, as after a write."""
    return x._fill if x._fill_version is None or x._dense._version == x._fill_version else None


def _rebuild(
    dense: Tensor,
    dims: Sequence[Sequence[tuple[int, SizeTuples]]],
    symbols: Sequence[str],
    buckets: tuple[int, ...],
    fill: Fill | None,
    values: Tensor | None,
    requires_grad: bool,
) -> PaddedTensor:
    """Return a pickled PaddedTensor."""
    sizes = None if values is None else TrueSizes(tuple(map(size_symbol, symbols)), buckets, values)
    factors = tuple(tuple(Factor(bucket, from_tuples(size)) for bucket, size in dim) for dim in dims)
    return make_padded(PaddedValue(dense, factors, sizes, fill)).requires_grad_(requires_grad)  # type: ignore[return-value]


# A PaddedTensor is pickled as tensors, numbers and text.
torch.serialization.add_safe_globals([_rebuild])


dynamo_rules.declare(PaddedTensor)
MASKED_TYPES.add(PaddedTensor)
