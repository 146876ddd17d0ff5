"""Looking at some tensors now and then, at others each time, so that all of them are seen within so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from torch import Tensor

from subtensors.dispatch import torch_private

FEW = 16
"""So many tensors are looked at in each step."""
_EVERY = 8
_A_TURN = 128


def turns(count: int) -> list[slice | None]:
    """Which of so many tensors each step looks at, for as many steps as it takes to see them all.

    Of few tensors all, in each step. Else a part in every eighth step, which costs less than fewer in each: what is
    looked at together is read from memory together.

    Example:
        >>> turns(3)
        [slice(0, 3, None)]
        >>> turns(129)[::8], len(turns(129))
        ([slice(0, 128, None), slice(128, 256, None)], 16)
    """
    if count <= FEW:
        return [slice(0, count)]
    parts = [slice(start, start + _A_TURN) for start in range(0, count, _A_TURN)]
    return [turn for part in parts for turn in (part, *[None] * (_EVERY - 1))]


class Rounds:
    """Tensors that should stay where they are, looked at by turns.

    Args:
        tensors: in any number.

    Example:
        >>> import torch
        >>> tensors = [torch.ones(2) for _ in range(3)]
        >>> rounds = Rounds(tensors)
        >>> rounds.steps, rounds.next_have_moved()
        (1, False)
        >>> tensors[2].data = torch.ones(2)
        >>> rounds.next_have_moved()
        True
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._guard = torch_private.AddressGuard(tensors)
        self._tensors = list(tensors)
        places = list(range(len(self._tensors)))
        parts = [None if turn is None else places[turn] for turn in turns(len(places))]
        self.steps = len(parts)
        """Within so many looks each tensor is seen."""
        self._parts = cycle(parts)

    def next_have_moved(self) -> bool:
        """Has one of those whose turn it is moved?"""
        part = next(self._parts)
        return part is not None and not self._guard.match_at(self._tensors, part)
