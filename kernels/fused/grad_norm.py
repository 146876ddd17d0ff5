"""The sum of the squares of all elements of many tensors, by one kernel.

    total = sum_t sum_i x_t[i]^2        in float64

The tensors are cut into chunks. As many programs as the device holds share them, and each adds up its chunks in
registers; so there are few partial sums, which the program that finishes last adds up. The first kernel of another
program, over numbers per tensor that may depend on the sum, can follow in the same launch (`FusedGradNorm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.fused.codegen import Kernel
from subtensors.kernels.fused.launch import Integers, TileMap, Workspaces
from subtensors.kernels.runtime.launcher import launching_on, multiprocessors

BLOCK = 2048
"""Elements that a program reads at a time."""
ROUNDS = 8
"""Blocks a chunk."""
WARPS = 8
PROGRAMS = 4
"""Programs a multiprocessor: as many as its registers hold."""

LANES = 256
"""Tensors that a following kernel takes at a time."""

# The entry of a dtype in the table: its size; negative for bfloat16, which is as large as float16.
_KINDS = {torch.float32: 4, torch.float64: 8, torch.float16: 2, torch.bfloat16: -2}

DTYPES = frozenset(_KINDS)
"""The dtypes that the kernel sums."""


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """The sum by torch, tensor by tensor.

    Args:
        tensors: real floats of any shapes.

    Returns:
        0-d float64, on the device of the first.

    Example:
        >>> reference([torch.ones(3), torch.full((2, 2), 2.0)])
        tensor(19., dtype=torch.float64)
    """
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors]
    return torch.stack(norms).square().sum()


class GradNormGrid(Workspaces[tuple[Tensor, Tensor]]):
    """The chunks of tensors of these sizes and dtypes, and their sum of squares. Depends on no address.

    Args:
        sizes: elements of each.
        dtypes: of each, from `DTYPES`.
        device: where they are.
        total: 0-d float64 on the device, written with the sum.
    """

    def __init__(
        self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, total: Tensor
    ) -> None:
        super().__init__()
        self.device, self.total = device, total
        self.count = len(sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.kinds = np.asarray([_KINDS[dtype] for dtype in dtypes], dtype=np.int64)
        self.chunks = TileMap.of(self.sizes, BLOCK * ROUNDS, 0, device).entries
        self.programs = min(len(self.chunks), PROGRAMS * multiprocessors(device))
        present = set(dtypes)
        kinds = [dtype in present for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
        self.constants = (*kinds, ROUNDS, BLOCK)

    def _new_workspace(self) -> tuple[Tensor, Tensor]:
        """Partial sums, and the atomic counter, which launches leave at zero."""
        partials = torch.empty(self.programs, dtype=torch.int64, device=self.device)
        return partials, torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def table_size(self) -> int:
        """The number of integers that `rows` returns."""
        return 3 * self.count

    def rows(self, pointers: Sequence[Sequence[int]] | Integers) -> Integers:
        """The table: sizes, dtypes, and addresses, which are the one row of `pointers`."""
        return np.concatenate([self.sizes, self.kinds, np.asarray(pointers, dtype=np.int64).reshape(-1)])

    def launch(
        self,
        table: int,
        scalars: int,
        seed: int,
        outputs: Sequence[Tensor],
        stream: int,
        workspace: int | None,
        prelude: object = None,
    ) -> None:
        """Compute the sum, on the current stream of the device.

        The table and the workspace are as for `launch.Grid`, which alone reads the other arguments.
        """
        self.run((None,) * 7, table, workspace)

    def run(self, following: Sequence[object], table: int, workspace: int | None, **options: object) -> None:
        """Compute the sum, and after it what the kernel's arguments `next_...` to `LANES` say, as one launch."""
        from subtensors.kernels.fused.squares_kernel import grad_norm

        with launching_on(self.device):
            partials, counter = self.workspace(workspace)
            own = [t.data_ptr() for t in (self.chunks, partials, counter, self.total)]
            counts = self.count, len(self.chunks)
            grad_norm[(self.programs,)](table, *own, *counts, *following, *self.constants, num_warps=WARPS, **options)


@dataclass(frozen=True)
class FusedGradNorm:
    """A launch that is still to be made, so that the first kernel of a program can be fused into it."""

    sweep: GradNormGrid
    table: Tensor | int
    """The result of `GradNormGrid.rows` on the device, or its address."""
    workspace: int | None
    """As of `GradNormGrid.launch`."""

    def launch(self) -> None:
        """Launch the sum by itself."""
        self.sweep.launch(self._address, 0, 0, [], 0, self.workspace)

    def launch_with(self, kernel: Kernel, table: int, scalars: int, slots: int, seed: int, count: int) -> None:
        """Launch the sum, and the kernel of a tensor segment without outputs after it, as one launch.

        The addresses are those of the kernel's arguments (`segment_writer.ARGUMENTS`).
        """
        options = {"enable_reflect_ftz": False} if self.sweep.device.type == "cuda" else {}
        following = table, scalars, slots, seed, count, kernel.lanes, LANES
        self.sweep.run(following, self._address, self.workspace, **options)

    @property
    def _address(self) -> int:
        return self.table if isinstance(self.table, int) else self.table.data_ptr()
