"""Protocols of the launches that `fused_graph` and `dynamic_scalars` record, by which they know `dispatch/fused`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from subtensors.kernels.fused.launch import Prelude

Words: TypeAlias = npt.NDArray[np.int64]


class NotRecordable(Exception):
    """Fused calls can't be replayed with dynamic scalars and addresses; the message says why."""


class LaunchGrid(Protocol):
    """The grid of a launch over tensors of given sizes at any addresses: `kernels.fused.launch.Grid` and its like."""

    count: int
    sizes: Words

    @property
    def table_size(self) -> int:
        """The number of words in the table that `rows` returns."""
        ...

    def rows(self, pointers: Words) -> Words:
        """Return the pointer table of these addresses."""
        ...

    def workspace(self, key: int) -> object:
        """Allocate the workspace of the launches with this key."""
        ...

    def forget(self, stream: int) -> None:
        """Free the workspace of this key."""
        ...

    def launch(
        self,
        table: int,
        scalars: int,
        seed: int,
        outputs: Sequence[Tensor],
        stream: int,
        workspace: int,
        prelude: Prelude | None = None,
    ) -> None:
        """Launch with a table and scalars at these addresses of the device, after or with the prelude."""
        ...


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
    def grid(self) -> LaunchGrid:
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

    def as_prelude(self, table: int, workspace: int) -> Prelude | None:
        """Return the launch as a prelude of the next one; None if it must be made by itself."""
        ...
