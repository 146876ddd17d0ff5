"""The lists that a parameter group hands to the fused call, kept from step to step while they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.groups import Elements

State = dict[str, Any]
"""One parameter's entry in `optimizer.state`."""


def are_same(now: Collection[object], before: Collection[object]) -> bool:
    """Do both hold the very same objects, in the same order?"""
    return len(now) == len(before) and all(map(is_, now, before))


@dataclass
class Batch:
    """Parameters of a group that one fused call updates: of one device, all with masters or all without."""

    indices: list[int] | None
    """Where they are in the group; None: they are all of it."""
    device: torch.device
    is_complex: bool
    params: Elements
    states: list[State]
    columns: dict[str, Elements]
    """State entry -> it for each parameter; only entries that these parameters have."""

    def __post_init__(self) -> None:
        self._places = self._first_places()

    def is_current(self) -> bool:
        """Do the parameters' states still hold these tensors?"""
        try:
            held = all(all(map(is_, map(itemgetter(name), self.states), c)) for name, c in self.columns.items())
        except KeyError:
            return False
        return held and self._first_places() == self._places

    def _first_places(self) -> list[int]:
        # Asking every tensor where its memory is would cost more than the rest of the step. What moves memory under a
        # tensor that stays (an offload through `.data`) moves all of the state, so the first of each column tells.
        return [column[0].data_ptr() for column in self.columns.values()]


@dataclass
class GroupLists:
    """The batches of one parameter group, and what they were made for."""

    params: list[Tensor]
    has_grad: list[bool]
    entries: tuple[str, ...]
    has_masters: bool
    batches: list[Batch]

    def is_current(
        self, params: Collection[Tensor], has_grad: list[bool], entries: tuple[str, ...], has_masters: bool
    ) -> bool:
        """Do the lists fit a step with these parameters, gradients and state entries?"""
        return (
            has_grad == self.has_grad
            and entries == self.entries
            and has_masters == self.has_masters
            and are_same(params, self.params)
            and all(batch.is_current() for batch in self.batches)
        )


def as_real(tensors: Iterable[Tensor]) -> Elements:
    """Complex tensors as pairs of reals, sharing memory."""
    return Elements([torch.view_as_real(t) for t in tensors])
