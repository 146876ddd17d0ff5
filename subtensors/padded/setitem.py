"""`x[...] = value`: written through the view that the index takes, whether there is one or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.padded.padded_value import PaddedValue, unpadded_value
from subtensors.padded.autograd import followed
from subtensors.padded.inplace import write_view
from subtensors.padded.padded_tensor import PaddedTensor


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
    write_view(x, lambda whole: whole[index], _value(value, x._dense))


def _value(value: Any, like: Tensor) -> PaddedValue:
    if isinstance(value, PaddedTensor):
        return followed(value)
    return unpadded_value(
        torch.as_tensor(value, device=like.device) if isinstance(value, Tensor) else like.new_tensor(value)
    )
