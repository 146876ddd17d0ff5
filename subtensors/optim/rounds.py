"""Looking at some tensors a step, at others each time, so that all of them are seen within so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from torch import Tensor

from subtensors.dispatch import torch_private


class Rounds:
    """Tensors that should stay where they are, looked at by turns.

    Args:
        tensors: in any number.
        a_turn: how many are looked at together.

    Example:
        >>> import torch
        >>> tensors = [torch.ones(2) for _ in range(3)]
        >>> rounds = Rounds(tensors, a_turn=2)
        >>> rounds.turns, rounds.next_have_moved(), rounds.next_have_moved()
        (2, False, False)
        >>> tensors[2].data = torch.ones(2)
        >>> rounds.next_have_moved(), rounds.next_have_moved()
        (False, True)
    """

    def __init__(self, tensors: Sequence[Tensor], a_turn: int) -> None:
        self._guard = torch_private.AddressGuard(tensors)
        self._tensors = list(tensors)
        parts = [list(range(len(tensors)))[start : start + a_turn] for start in range(0, len(tensors), a_turn)] or [[]]
        self.turns = len(parts)
        """After so many looks each tensor was seen."""
        self._parts = cycle(parts)

    def next_have_moved(self) -> bool:
        """Has one of those whose turn it is moved?"""
        return not self._guard.match_at(self._tensors, next(self._parts))
