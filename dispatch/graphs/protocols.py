"""Protocols of launches that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from subtensors.kernels.fused.launch import Prelude

Words = np.ndarray[Any, np.dtype[np.int64]]


class NotRecordable(Exception):
    """These calls can't be replayed with live numbers and addresses; the message says why."""


class Swept(Protocol):
    """Tensors of given sizes that a launch sweeps over, wherever they are: `kernels.fused.launch.Grid` and its like."""

    count: int
    sizes: Words

    @property
    def table_size(self) -> int:
        """The number of words in the table that `rows` returns."""
        ...

    def rows(self, pointers: Words) -> Words:
        """The table of these addresses."""
        ...

    def workspace(self, key: int) -> object:
        """Memory of its own for launches of this number."""
        ...

    def forget(self, stream: int) -> None:
        """Free the workspace of this number."""
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
        """Launch with a table and numbers that are on the device at these addresses, after or with the prelude."""
        ...


class Numbered(Protocol):
    """An executor of launches with live numbers: `TritonExecutor`."""

    @property
    def scalars(self) -> Sequence[Callable[[Sequence[float]], float]]:
        """The functions that compute the live numbers from the numbers of the call."""
        ...

    @property
    def kinds(self) -> Sequence[type[float] | type[int]]:
        """The Python types of the live numbers, then of the tensors on the host."""
        ...


class Recordable(Numbered, Protocol):
    """An executor of launches that can be recorded: `TritonExecutor` and its like."""

    @property
    def grid(self) -> Swept:
        """The tensors that a launch sweeps over."""
        ...

    @property
    def hosts(self) -> Sequence[int]:
        """The indices of the parameters that are on the host."""
        ...

    @property
    def observed(self) -> Collection[int]:
        """The parameters whose versions autograd counts."""
        ...

    @property
    def stores(self) -> Mapping[int, int]:
        """For each parameter that is written, the bytes of an element; negative for those of a number per tensor."""
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
        """Memory for the outputs of a launch."""
        ...

    def as_prelude(self, table: int, workspace: int) -> Prelude | None:
        """The launch as one that the next may be made together with; None where it is one by itself."""
        ...
