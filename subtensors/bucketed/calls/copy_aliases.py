"""Copies of results that alias other tensors, so that the caller may write to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from subtensors.padded.padded_tensor import PaddedTensor


def callers_own(results: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the leaves of a result: padded ones cut to their valid part, and copies of those that alias others.

    Args:
        results: leaves of any kind.
        others: the program's arguments and state.

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
    """Return the address of a tensor's storage; None if it has none, or if `x` is no tensor."""
    try:
        return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None
    except (RuntimeError, NotImplementedError):  # a sparse one, or a subclass of many
        return None
