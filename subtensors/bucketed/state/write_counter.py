"""Whether tensors are written to, as torch counts it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from subtensors.padded.padded_tensor import PaddedTensor


class Writes:
    """What is written to some tensors from now on.

    Args:
        tensors: plain or padded; those that were made in inference mode have no count, and tell nothing.

    Example:
        >>> import torch
        >>> x = torch.zeros(2)
        >>> writes = Writes([x])
        >>> writes.any(), x.add_(1), writes.any()
        (False, tensor([1., 1.]), True)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        whole = [x._dense if isinstance(x, PaddedTensor) else x for x in tensors]
        self._versions = [(t, t._version) for t in whole if not t.is_inference()]

    def any(self) -> bool:
        """Was one of them written to?"""
        return any(t._version != version for t, version in self._versions)
