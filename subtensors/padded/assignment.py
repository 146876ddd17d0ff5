"""`x[...] = value`: written where the same indexing of a tensor of positions says.

Torch writes through a view of `x`. Where autograd follows `x`, or the view had to be copied since it counts from the
true end, there is none to write through. Then the elements of `x` are numbered, the numbers indexed as `x` is, and the
values scattered to them; what was indexed beyond the true end goes to a position that is cut off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.padded.padded_value import Inexpressible, Padded, plain
from subtensors.dispatch.padded.pointwise import broadcast, gradient_safe
from subtensors.dispatch.size_factors import bucket_of
from subtensors.padded.padded_tensor import PaddedTensor, value_of, wrap
from subtensors.padded.wrapping import followed
from subtensors.padded.writes import write_back


def assign(x: PaddedTensor, index: Any, value: Any) -> None:
    """Write values at an index.

    Args:
        x: what is written to.
        index: as in `x[index]`.
        value: a number, or a tensor that broadcasts.

    Raises:
        RuleError: there is no rule for such an index.

    Example:
        >>> import subtensors as st
        >>> x = st.pad(torch.zeros(5), {0: st.Dim("n", max=8, buckets=8)})
        >>> assign(x, slice(-2, None), 1)
        >>> x.tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0]
    """
    whole = followed(x)
    numbers = torch.arange(whole.dense.numel(), device=whole.dense.device).view(whole.shape)
    picked: Any = wrap(whole.like(numbers))[index]
    at = value_of(picked) if isinstance(picked, PaddedTensor) else plain(picked)
    new = _value(value, whole.dense)
    dims, sizes = broadcast([at, new])
    if len(dims) != at.dim():
        raise Inexpressible(f"a value of {new.dim()} dims is written at an index that gives {at.dim()}")
    shape = list(map(bucket_of, dims))
    end = whole.dense.numel()
    targets = Padded(at.dense.expand(shape), dims, sizes).filled(end).reshape(-1)
    values = gradient_safe(new, dims, shape, sizes).expand(shape).reshape(-1).to(whole.dense.dtype)
    flat = torch.constant_pad_nd(whole.dense.reshape(-1), (0, 1)).scatter(0, targets, values)
    write_back(x, replace(whole, dense=flat[:end].view(whole.shape), fill=None))


def _value(value: Any, like: Tensor) -> Padded:
    if isinstance(value, PaddedTensor):
        return followed(value)
    return plain(torch.as_tensor(value, device=like.device) if isinstance(value, Tensor) else like.new_tensor(value))
