"""Snapshots of tensors that a graph reads in place: a tensor whose address, dtype or layout changed is stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.graphs.guards import IdentityGuard

HELD: dict[str, Callable[[Tensor], Any]] = {
    "address": Tensor.data_ptr,
    "device": attrgetter("device"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
    "strides": Tensor.stride,
    "conjugation": Tensor.is_conj,
    "negation": Tensor.is_neg,
}
"""The properties of a tensor that a graph depends on: by name, the function that reads it."""

_MODES = 4
"""Combinations of grad mode, inference mode and autocast that a program is called in, at most."""


def held_of(t: Tensor) -> tuple[Any, ...] | None:
    """Return the properties in `HELD` of one tensor; None if it has no address, such as a sparse one."""
    try:
        return tuple([read(t) for read in HELD.values()])
    except (RuntimeError, ValueError):  # torch's; a parameter of a lazy module has no size before the first call
        return None


class TensorSnapshot:
    """A snapshot of some tensors, to be compared with later ones.

    A guard in C++ compares all of them at once; if it reports a difference, the properties in `HELD` decide.

    Args:
        tensors: the tensors, in the order in which later ones are given too.

    Example:
        >>> w = torch.ones(2, 2)
        >>> held = TensorSnapshot([w])
        >>> w.data = w.data.t()
        >>> held.are([w]), held.first_other([w])
        (False, (0, 'strides'))
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = [held_of(t) for t in tensors]
        self._guard = IdentityGuard(tensors, _MODES) if None not in self._held else None
        with torch.no_grad():
            # Keeps the memory alive, even if `.data` is replaced.
            self._memory = [t.detach() for t, held in zip(tensors, self._held, strict=True) if held is not None]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every tensor still matches its snapshot."""
        if self._guard is not None and self._guard.matches(tensors):
            return True
        if self.first_other(tensors) is not None:
            return False
        if self._guard is not None:
            self._guard.accept_mode(tensors)
        return True

    def first_other(self, tensors: Sequence[Tensor]) -> tuple[int, str] | None:
        """Return the index of the first tensor that changed and the name of what changed; None if none did."""
        for i, (t, before) in enumerate(zip(tensors, self._held, strict=False)):
            if (now := held_of(t)) != before:
                changed = zip(HELD, now or (), before or (), strict=False)
                return i, next((name for name, a, b in changed if a != b), "memory")
        return None if len(tensors) == len(self._held) else (min(len(tensors), len(self._held)), "count")
