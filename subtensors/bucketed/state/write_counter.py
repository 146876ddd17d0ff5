"""Detection of writes to tensors by their version counters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from subtensors.padded.padded_tensor import PaddedTensor


class Writes:
    """A detector of writes to some tensors, from its creation on.

    Args:
        tensors: plain or padded; inference tensors have no version counter and are ignored.

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
        """Return whether one of the tensors was written to."""
        return any(t._version != version for t, version in self._versions)
