"""`PaddedTensor`: a tensor whose true size varies, stored at a bucket size that doesn't."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.type_interaction import LAZY_TYPES, MASKED_TYPES
from subtensors.dispatch.padded.gradient_masking import GradientTracker
from subtensors.dispatch.padded.padded_value import EDGE_FILL, Fill, PaddedValue
from subtensors.dispatch.padded.true_sizes import HostSize, TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import dynamo, dynamo_rules
from subtensors.sizes.dims import Dim


class PaddedTensor(Tensor):
    """A tensor padded to bucket sizes: ops act on its real part, for any program made of supported ops.

    `shape` is the bucket shape, which kernels, graphs and compilers see; the true sizes are data, in a small tensor on
    the device. What stands in the padding never reaches a real element, nor does its gradient reach a parameter.

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
    _dims: tuple[Factors, ...]
    _sizes: TrueSizes | None
    _fill: Fill | None
    _view: Literal["", "alias", "copy"]
    _arrival: GradientTracker | None
    _written: int | None = None
    _origin: Any = None
    _plain_views: Sequence[Any] = ()
    _copies: Sequence[Any] = ()

    @staticmethod
    def __new__(cls, t: Tensor, dims: Mapping[int, Dim | int]) -> PaddedTensor:
        """`st.pad(t, dims)`."""
        from subtensors.padded.padding import pad

        return pad(t, dims)

    def __init__(self, t: Tensor, dims: Mapping[int, Dim | int]) -> None:
        pass

    @property
    def dense(self) -> Tensor:
        """The padded storage, of the bucket shape, tracked by autograd. The contents of the padding are undefined."""
        from subtensors.padded.autograd import dense_of

        return dense_of(self)

    def mask(self) -> Tensor:
        """The mask of valid elements.

        Returns:
            A bool tensor of the bucket shape, True where an element is valid.

        Example:
            >>> import subtensors as st
            >>> st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)}).mask()
            tensor([ True,  True,  True, False])
        """
        from subtensors.padded.autograd import mask_of

        return mask_of(self)

    def count(self, dim: int) -> Tensor:
        """The true size of a dim, on the device: what to divide by, never `shape[dim]`.

        Args:
            dim: a dim, from the end if negative.

        Returns:
            () int64; for a ragged dim (rows,).

        Example:
            >>> import subtensors as st
            >>> x = st.pad(torch.ones(3), {0: st.Dim("n", max=8, buckets=4)})
            >>> x.sum() / x.count(0)
            tensor(1.)
        """
        from subtensors.padded.autograd import count_of

        return count_of(self, dim)

    @property
    def logical_shape(self) -> tuple[HostSize, ...]:
        """The true shape; a ragged dim gives its lengths. Waits for the device where the host doesn't know the sizes.

        Example:
            >>> import subtensors as st
            >>> st.pad([torch.ones(2), torch.ones(3)], {0: st.Dim("n", max=8, buckets=4)}).logical_shape
            (2, (2, 3))
        """
        return tuple(self._host_size(factors) for factors in self._dims)

    def unpad(self) -> Any:
        """The logical data.

        Returns:
            A tensor of the true shape; for a ragged batch a list of tensors, one a row. Tracked by autograd.

        Raises:
            RuleError: under `torch.compile`, where the true size is unknown.

        Example:
            >>> import subtensors as st
            >>> st.pad(torch.arange(3), {0: st.Dim("n", max=8, buckets=4)}).exp().unpad().shape
            torch.Size([3])
        """
        from subtensors.padded.padding import unpad

        return unpad(self)

    def _host_size(self, factors: Factors) -> HostSize:
        size = size_of(factors)
        if self._sizes is None or not is_padded(factors):
            return size_on_host(size, {})
        if not self._sizes.is_ragged(size):
            return size_on_host(size, self._sizes.assignment(row=0))
        return tuple(size_on_host(size, self._sizes.assignment(row)) for row in range(self._sizes.rows or 0))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
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

    def tolist(self) -> Any:
        """The logical data as nested lists."""
        data = self.unpad()
        return [row.tolist() for row in data] if isinstance(data, list) else data.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The logical data as an array.

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
            new = wrap(PaddedValue(copy.deepcopy(self._dense, memo), self._dims, sizes, self._fill))
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (
            self._dense.detach(),
            *self._context(),
            self._sizes and self._sizes.values,
            self.requires_grad,
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and not LAZY_TYPES.isdisjoint(types):
            return NotImplemented
        if torch.compiler.is_dynamo_compiling():
            # Dynamo records the call unchanged; the compiler later runs it outside of Dynamo, and it gets past this.
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return _calls().call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _calls().dispatch(func, args, kwargs or {})

    def _context(self) -> tuple[Any, ...]:
        symbols, buckets = (self._sizes.symbols, self._sizes.buckets) if self._sizes else ((), ())
        return self._dims, symbols, buckets, self._fill

    def _stable_hash_for_caching(self) -> str:
        """The hash of the metadata that compiled code cached on disk depends on."""
        return hashlib.sha256(repr(self._context()).encode()).hexdigest()

    @property
    def _true_sizes(self) -> Tensor:
        assert self._sizes is not None
        return self._sizes.values

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_dense", "_true_sizes"] if self._sizes else ["_dense"], self._context()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> PaddedTensor:
        dims, symbols, buckets, fill = context
        values = inner_tensors.get("_true_sizes")
        sizes = None if values is None else TrueSizes(symbols, buckets, values)
        return wrap(PaddedValue(inner_tensors["_dense"], dims, sizes, fill))

    def __coerce_same_metadata_as_tangent__(self, expected: Any, expected_type: type | None = None) -> Any:
        """Return this gradient with the padding that a compiled backward was traced for."""
        if expected_type is Tensor:
            return self._dense
        dims, symbols, _, fill = expected
        if dims != self._dims or self._sizes is None or symbols != self._sizes.symbols:
            return None
        value = value_of(self)
        if fill == EDGE_FILL:
            return wrap(value.like(value.edge_filled(), fill))
        return wrap(value.like(value.filled(fill if isinstance(fill, int | float) else 0.0), fill))


@functools.cache
def _calls() -> Any:
    """The module that runs calls on PaddedTensors; imported late, since it imports this one, and the rules with it."""
    from subtensors.padded import torch_function

    return torch_function


def wrap(value: PaddedValue) -> PaddedTensor:
    """A PaddedTensor of a value, without an autograd connection between the two."""
    dense = value.dense
    out = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        PaddedTensor,
        dense.shape,
        strides=dense.stride(),
        storage_offset=dense.storage_offset(),
        dtype=dense.dtype,
        device=dense.device,
    )
    out._dense, out._dims, out._sizes, out._fill, out._view = dense, value.dims, value.sizes, value.fill, value.view
    out._arrival = value.tracker
    if value.fill == EDGE_FILL:
        # A write to real values leaves the padding as it is, and what was repeated there is no longer.
        out._written = dense._version
    return out  # type: ignore[no-any-return]


def value_of(x: PaddedTensor) -> PaddedValue:
    """The value of a PaddedTensor as the rules see it."""
    return PaddedValue(x._dense, x._dims, x._sizes, fill_of(x), x._view, x._arrival)


def fill_of(x: PaddedTensor) -> Fill | None:
    """The known contents of a PaddedTensor's padding; None if they are unknown, as after a write."""
    is_stale = x._written is not None and x._dense._version != x._written
    return None if is_stale else x._fill


def _rebuild(
    dense: Tensor, dims: Any, symbols: Any, buckets: Any, fill: Any, values: Tensor | None, requires_grad: bool
) -> PaddedTensor:
    sizes = None if values is None else TrueSizes(symbols, buckets, values)
    out = wrap(PaddedValue(dense, dims, sizes, fill))
    out.requires_grad_(requires_grad)
    return out


def _run_whole_in_graphs() -> None:
    """Allow `dense_of`, `mask_of` and `count_of` in Dynamo's graphs as calls that it doesn't trace into."""
    from subtensors.padded import autograd

    for function in (autograd.dense_of, autograd.mask_of, autograd.count_of):
        torch.compiler.allow_in_graph(function)


dynamo.compile_methods_only_inlined(PaddedTensor)
dynamo_rules.on_first_compile(PaddedTensor, _run_whole_in_graphs)
MASKED_TYPES.add(PaddedTensor)
