"""What a graph holds of a tensor that it reads where it is: a tensor of which any of this is another was replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.tensor_guards import AddressGuard, MetadataGuard

HELD: dict[str, Callable[[Tensor], Any]] = {
    "address": Tensor.data_ptr,
    "device": attrgetter("device"),
    "dtype": attrgetter("dtype"),
    "shape": attrgetter("shape"),
    "strides": Tensor.stride,
    "conjugation": Tensor.is_conj,
    "negation": Tensor.is_neg,
}
"""By its name, how it is read."""

_MODES = 4
"""Of grad mode, inference mode and autocast so many are remembered, in which C++ finds tensors alike."""


def held_of(t: Tensor) -> tuple[Any, ...] | None:
    """All of the table for one tensor; None where it has no memory that could be held, as a sparse one."""
    try:
        return tuple([read(t) for read in HELD.values()])
    except (RuntimeError, ValueError):  # torch's; a parameter of a lazy module has no size before the first call
        return None


class Held:
    """Some tensors as they are now, to be compared with what is there later.

    C++ guards compare all of them at once, for the modes that they were made in. Where these say no, the table decides.

    Args:
        tensors: in an order that later ones come in too.

    Example:
        >>> w = torch.ones(2, 2)
        >>> held = Held([w])
        >>> w.data = w.data.t()
        >>> held.are([w]), held.first_other([w])
        (False, (0, 'strides'))
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = [held_of(t) for t in tensors]
        have_memory = None not in self._held
        self._addresses = AddressGuard(tensors) if have_memory else None
        self._alike: deque[MetadataGuard] = deque([MetadataGuard(tensors)] if have_memory else [], _MODES)
        with torch.no_grad():
            # Keeps the memory, also where `.data` is replaced.
            self._memory = [t.detach() for t, held in zip(tensors, self._held, strict=True) if held is not None]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Is of every tensor all as it was?"""
        if self._addresses is not None:
            if not self._addresses.matches(tensors):
                return False
            if any(guard.matches(tensors) for guard in self._alike):
                return True
        if self.first_other(tensors) is not None:
            return False
        if self._addresses is not None:
            self._alike.appendleft(MetadataGuard(tensors))
        return True

    def first_other(self, tensors: Sequence[Tensor]) -> tuple[int, str] | None:
        """The first tensor that is another than it was, and what of it in words; None where there is none."""
        for i, (t, before) in enumerate(zip(tensors, self._held, strict=False)):
            if (now := held_of(t)) != before:
                changed = zip(HELD, now or (), before or (), strict=False)
                return i, next((name for name, a, b in changed if a != b), "memory")
        return None if len(tensors) == len(self._held) else (min(len(tensors), len(self._held)), "count")
