"""Results that the caller may write to: in memory of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from subtensors.padded.padded_tensor import PaddedTensor


def callers_own(results: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The leaves of a result: of padded ones the real part, of what shares memory with others a copy.

    Args:
        results: leaves of any kind.
        others: what the program was given and reads.

    Example:
        >>> import torch
        >>> x = torch.ones(2)
        >>> [t is x for t in callers_own([x, x[:1]], [])], [t is x for t in callers_own([x], [x])]
        ([True, False], [False])
    """
    theirs = set(map(_memory, others)) - {None}
    return [_own(x, theirs) for x in results]


def _own(x: Any, theirs: Collection[Any]) -> Any:
    if not isinstance(x, PaddedTensor):
        return x.clone() if isinstance(x, Tensor) and _memory(x) in theirs else x
    part = x.unpad()
    return [row.clone() for row in part] if isinstance(part, list) else part.clone()


def _memory(x: Any) -> int | None:
    """Where the memory of a tensor begins; None where there is none."""
    try:
        return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None
    except (RuntimeError, NotImplementedError):  # a sparse one, or a subclass of many
        return None
