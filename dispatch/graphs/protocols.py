"""Protocols of the launches that `fused_graph` and `dynamic_scalars` record, by which they know `dispatch/fused`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from subtensors.kernels.fused.launch import Grid

Words: TypeAlias = npt.NDArray[np.int64]


class NotRecordable(Exception):
    """Fused calls can't be replayed with dynamic scalars and addresses; the message says why."""


class HasScalars(Protocol):
    """An executor of launches with dynamic scalars: `TritonExecutor`."""

    @property
    def scalars(self) -> Sequence[Callable[[Sequence[float]], float]]:
        """The functions that compute the dynamic scalars from the numbers of the call."""
        ...

    @property
    def kinds(self) -> Sequence[type[float] | type[int]]:
        """The Python types of the dynamic scalars, then of the tensors on the host."""
        ...


class Recordable(HasScalars, Protocol):
    """An executor of launches that can be recorded: `TritonExecutor` and its like."""

    @property
    def grid(self) -> Grid:
        """The grid of a launch."""
        ...

    @property
    def hosts(self) -> Sequence[int]:
        """The indices of the parameters that are on the host."""
        ...

    @property
    def observed(self) -> Collection[int]:
        """The parameters whose versions autograd checks."""
        ...

    @property
    def stores(self) -> Mapping[int, int]:
        """For each parameter that is written, the bytes of an element; negative for one with a number per tensor."""
        ...

    @property
    def is_seeded(self) -> bool:
        """Return whether the launch rounds stochastically."""
        ...

    @property
    def seed(self) -> Tensor:
        """The seed to pass to a launch that does not round stochastically."""
        ...

    def new_arenas(self) -> list[Tensor]:
        """Allocate memory for the outputs of a launch."""
        ...
