"""A context that swaps averaged weights in for the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_place_of(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> Iterator[None]:
    """A context in which each weight holds its average; on exit each gets its old value back.

    Args:
        weights: written in place.
        averages: one for each, of its shape and any dtype; not written.

    Example:
        >>> w = torch.zeros(2)
        >>> with in_place_of([w], [torch.ones(2)]):
        ...     print(w)
        tensor([1., 1.])
        >>> w
        tensor([0., 0.])
    """
    with torch.no_grad():
        trained = [w.clone() for w in weights]
        _write(weights, averages)
    try:
        yield
    finally:
        with torch.no_grad():
            _write(weights, trained)


def _write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
