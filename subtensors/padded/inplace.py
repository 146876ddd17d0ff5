"""In-place writes: new values are written into the argument's memory, and its padding keeps its contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.padded_value import PaddedValue, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast, gradient_safe
from subtensors.dispatch.padded.true_sizes import merge_sizes
from subtensors.dispatch.sizes.dim_factors import bucket_of
from subtensors.padded.autograd import followed, wrapped
from subtensors.padded.padded_tensor import PaddedTensor, value_of, wrap
from subtensors.padded.views import refresh_copies, refuse_plain_views


def copied_whole(target: Tensor, source: Tensor) -> bool:
    """Copy a storage onto one of the same padding, which compiled code does at its end.

    Returns:
        True if `target.copy_(source)` was such a copy, and is done; False if their padding differs in place or
        contents, or gradients are involved.
    """
    if not isinstance(target, PaddedTensor) or not isinstance(source, PaddedTensor) or target._view == "copy":
        return False
    records = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    if records or (target._dims, target._fill) != (source._dims, source._fill) or target.dtype != source.dtype:
        return False
    merge_sizes([x._sizes for x in (target, source) if x._sizes is not None])
    with torch._C.DisableTorchFunctionSubclass():
        target._dense.copy_(source._dense)
    refresh_copies(target)
    return True


def write_real(target: PaddedTensor, new: PaddedValue) -> None:
    """Write into the memory of a view; its padding keeps its contents."""
    if new.dims != target._dims and new.padded_dims:
        raise UnsupportedCall(f"a view of {target._dims} takes no values of {new.dims}")
    mask = value_of(target).mask()
    dense = new.dense if mask is None else torch.where(mask, new.dense, target._dense)
    target._dense.copy_(dense)


def write_back(outer: Tensor, new: PaddedValue) -> None:
    """Give an argument that a call wrote to its new value; its padding keeps its contents."""
    if not isinstance(outer, PaddedTensor):
        if new.padded_dims:
            raise RuleError(
                "a plain tensor cannot take a PaddedTensor's values in place, since it could not say which of them "
                "are real; pad it on the same Dims first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            outer.copy_(new.dense) if outer.shape == new.shape else outer.resize_(new.shape).copy_(new.dense)
        return
    if new.dims != outer._dims and new.padded_dims:
        raise RuleError(f"in place, a PaddedTensor keeps its true sizes: it has {outer._dims}, the result {new.dims}")
    mask = value_of(outer).mask()
    dense = new.dense if mask is None else torch.where(mask, new.dense, outer._dense.detach())
    value = replace(value_of(outer), dense=dense, tracker=None)
    recording = torch.is_grad_enabled() and (dense.requires_grad or outer.requires_grad)
    if outer._view == "copy" or (recording and outer._view):
        base = outer._origin.held() if outer._origin is not None else None
        if base is not None:
            write_view(base, outer._origin.view, value)
            return
        if outer._view == "alias":
            raise RuleError(
                "this view of a PaddedTensor was taken where autograd doesn't follow, and is not written to where it "
                "does: write to the whole, x[...] = value, or to a clone of the view"
            )
    if recording:
        refuse_plain_views(outer)
    with torch._C.DisableTorchFunctionSubclass():
        if recording:
            outer.copy_(wrapped(value))
        else:
            outer._dense.copy_(dense)
    refresh_copies(outer)


def write_view(x: PaddedTensor, view: Callable[[PaddedTensor], Any], new: PaddedValue) -> None:
    """Write through a view, also where gradients are recorded, or where the view is a copy.

    The elements of `x` are numbered, the view is taken of the numbers, and the values are scattered to those positions.
    Values beyond the true end go to an extra position, which is cut off.

    Args:
        x: what is written to.
        view: takes the view.
        new: the values, which broadcast to the view.

    Raises:
        RuleError: there is no rule for such a view.
    """
    whole = followed(x)
    numbers = torch.arange(whole.dense.numel(), device=whole.dense.device).view(whole.shape)
    picked = view(wrap(whole.like(numbers)))
    at = value_of(picked) if isinstance(picked, PaddedTensor) else unpadded_value(picked)
    dims, sizes = broadcast([at, new])
    if len(dims) != at.dim():
        raise UnsupportedCall(f"a value of {new.dim()} dims is written at an index that gives {at.dim()}")
    shape = list(map(bucket_of, dims))
    end = whole.dense.numel()
    targets = PaddedValue(at.dense.expand(shape), dims, sizes).filled(end).reshape(-1)
    values = gradient_safe(new, dims, shape, sizes).expand(shape).reshape(-1).to(whole.dense.dtype)
    flat = torch.constant_pad_nd(whole.dense.reshape(-1), (0, 1)).scatter(0, targets, values)
    write_back(x, replace(whole, dense=flat[:end].view(whole.shape), fill=None, tracker=None))
