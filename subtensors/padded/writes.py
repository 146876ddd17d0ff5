"""What a call wrote arrives in the memory of its argument, whose padding keeps what it held."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.errors import RuleError
from subtensors.dispatch.padded.padded_value import Inexpressible, Padded
from subtensors.dispatch.padded.true_sizes import together
from subtensors.padded.padded_tensor import PaddedTensor, value_of
from subtensors.padded.wrapping import wrapped


def copied_whole(target: Tensor, source: Tensor) -> bool:
    """Copy a storage onto one of the same padding, which a compiler asks for at the end of what it traced.

    Returns:
        Whether that is what `target.copy_(source)` is: their padding lies in the same places and holds the same.
    """
    if not isinstance(target, PaddedTensor) or not isinstance(source, PaddedTensor) or target._view == "copy":
        return False
    records = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
    if records or (target._dims, target._fill) != (source._dims, source._fill) or target.dtype != source.dtype:
        return False
    together([x._sizes for x in (target, source) if x._sizes is not None])
    with torch._C.DisableTorchFunctionSubclass():
        target._dense.copy_(source._dense)
    return True


def write_real(target: PaddedTensor, new: Padded) -> None:
    """Write into the memory that a view lies in; padding keeps what it held."""
    if new.dims != target._dims and new.padded_dims:
        raise Inexpressible(f"a view of {target._dims} takes no values of {new.dims}")
    mask = value_of(target).mask()
    dense = new.dense if mask is None else torch.where(mask, new.dense, target._dense)
    target._dense.copy_(dense)


def write_back(outer: Tensor, new: Padded) -> None:
    """Give an argument that the call wrote to its new value; its padding keeps what it held."""
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
    value = replace(value_of(outer), dense=dense)
    recording = torch.is_grad_enabled() and (dense.requires_grad or outer.requires_grad)
    if outer._view == "copy" or (recording and outer._view):
        raise RuleError(
            "a view of a PaddedTensor is not written to where autograd follows it, or where it counts from the true "
            "end and had to be copied: write to the whole, x[...] = value, or to a clone of the view"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if recording:
            outer.copy_(wrapped(value))
        else:
            outer._dense.copy_(dense)
