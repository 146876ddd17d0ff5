"""In-place writes: new values are written into the argument's memory, and its padding keeps its contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.ops.lazy_storage import fill_padding, is_lazy, traced_storage
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.padded_value import Fill, Number, PaddedValue, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, expanded
from subtensors.dispatch.padded.true_sizes import merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded
from subtensors.padded.autograd import track_storage, unwrap_with_grad, wrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor, make_padded, unwrap
from subtensors.padded.views import check_no_plain_views, refresh_copies


def try_copy_storage(target: Tensor, source: Tensor) -> bool:
    """Run `target.copy_(source)` as a copy of storages if both have the same padding, as compiled code does at its end.

    Returns:
        True if the copy is done; False if their padding differs in place or contents, or gradients are involved.
    """
    if not isinstance(target, PaddedTensor) or not isinstance(source, PaddedTensor):
        return False
    if target._view:  # the padding of a view may be valid in its base
        return False
    records = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    if records or (target._dims, target._fill) != (source._dims, source._fill) or target.dtype != source.dtype:
        return False
    merge_sizes([x._sizes for x in (target, source) if x._sizes is not None])
    with torch._C.DisableTorchFunctionSubclass():
        target._dense.copy_(source._dense)
    refresh_copies(target)
    return True


def write_valid(target: PaddedTensor, new: PaddedValue) -> None:
    """Write into the memory of a view; its padding keeps its contents."""
    if new.dims != target._dims and new.padded_dims:
        raise UnsupportedCall(f"a view of {target._dims} takes no values of {new.dims}")
    mask = unwrap(target).mask()
    dense = new.dense if mask is None else torch.where(mask, new.dense, target._dense)
    target._dense.copy_(dense)


def write_back(target: Tensor, new: PaddedValue) -> None:
    """Give an argument that a call wrote to its new value; its padding keeps its contents."""
    if not isinstance(target, PaddedTensor):
        if new.padded_dims:
            raise RuleError(
                "a plain tensor cannot take a PaddedTensor's values in place, since it could not say which of them "
                "are valid; pad it on the same Dims first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(new.dense) if target.shape == new.shape else target.resize_(new.shape).copy_(new.dense)
        return
    if new.dims != target._dims and new.padded_dims:
        if target._view or not _are_filled_in(target._dims, new.dims):
            raise RuleError(
                f"in place, a PaddedTensor keeps its true sizes: it has {target._dims}, the result {new.dims}"
            )
        # A dim of the bucket's size that nothing had said the true size of, as of a table that Python made.
        target._sizes = new.sizes
        set_layout(target, new.dims)
    mask = unwrap(target).mask()
    if is_lazy(target._dense):
        # Compiled code writes to nothing that has views, such as one that is detached.
        old = (target._dense if traced_storage(target._dense) is None else target._dense.clone()).detach()
        dense = fill_padding(new.dense, mask, old) if mask is not None and is_lazy(new.dense) else new.dense
        target._dense.copy_(dense)
        track_storage(target)
        return
    dense = new.dense if mask is None else torch.where(mask, new.dense, target._dense.detach())
    value = replace(unwrap(target), dense=dense, tracker=None)
    records = torch.is_grad_enabled() and (dense.requires_grad or target.requires_grad)
    if target._view == "copy" or (records and target._view):
        source = target._view_source
        base = source.base() if source is not None else None
        if source is not None and base is not None:
            write_view(base, source.view, value)
            return
        if target._view == "alias":
            raise RuleError(
                "this view of a PaddedTensor was taken with gradients disabled, and cannot be written to with them "
                "enabled: write to its base, x[...] = value, or to a clone of the view"
            )
    if records:
        check_no_plain_views(target)
    with torch._C.DisableTorchFunctionSubclass():
        if records:
            target.copy_(wrap_with_grad(value))
        else:
            target._dense.copy_(dense)
    refresh_copies(target)


def _are_filled_in(dims: Sequence[Factors], new: Sequence[Factors]) -> bool:
    """Return whether new dims are the same ones, but for static ones of the bucket's size, which are padded now."""
    same_shape = tuple(map(bucket_of, dims)) == tuple(map(bucket_of, new))
    return same_shape and all(a == b or not is_padded(a) for a, b in zip(dims, new, strict=True))


def write_view(x: PaddedTensor, view: Callable[[PaddedTensor], Tensor], new: PaddedValue) -> None:
    """Write through a view, also where gradients are recorded, or where the view is a copy.

    The elements of `x` are numbered, the view is taken of the numbers, and the values are scattered to those positions.
    Values beyond the true end go to an extra position, which is cut off. New values broadcast to the view.

    Raises:
        RuleError: there is no rule for such a view.
    """
    base = unwrap_with_grad(x)
    numbers = torch.arange(base.dense.numel(), device=base.dense.device).view(base.shape)
    selected = view(make_padded(base.like(numbers)))
    at = unwrap(selected)
    dims, sizes = broadcast([at, new])
    if len(dims) != at.dim():
        raise UnsupportedCall(f"a value of {new.dim()} dims is written at an index that gives {at.dim()}")
    end = base.dense.numel()
    targets = expanded(at, dims, sizes).filled(end).reshape(-1)
    values = expanded(new, dims, sizes).dense.reshape(-1).to(base.dense.dtype)
    flat = torch.constant_pad_nd(base.dense.reshape(-1), (0, 1)).scatter(0, targets, values)
    write_back(x, replace(base, dense=flat[:end].view(base.shape), fill=None, tracker=None))


def assign_at_index(x: PaddedTensor, index: PyTree, value: Number | Tensor) -> None:
    """Run `x[index] = value` through the view that the index takes, also where the index copies.

    Raises:
        RuleError: there is no rule for such an index.

    Example:
        >>> import subtensors as st
        >>> x = st.pad(torch.zeros(5), {0: st.Dim("n", max=8, buckets=8)})
        >>> assign_at_index(x, slice(-2, None), 1)
        >>> x.tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0]
    """
    if isinstance(value, PaddedTensor):
        new = unwrap_with_grad(value)
    elif isinstance(value, Tensor):
        new = unpadded_value(torch.as_tensor(value, device=x._dense.device))
    else:
        new = unpadded_value(x._dense.new_tensor(value))
    write_view(x, lambda base: base[index], new)


def set_layout(x: PaddedTensor, dims: tuple[Factors, ...], fill: Fill | None = None) -> None:
    """Set the dims and the fill of a tensor that was written to."""
    x._layout = PaddedValue(x._dense, dims, x._sizes, fill, x._view).layout()
