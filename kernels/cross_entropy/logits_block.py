"""A block of logits: its statistics, and the gradient written over it, by Triton kernels or by their torch reference.

A block is some rows and some columns of the whole matrix of logits. The reference is what the kernels are tested
against, and what runs on a CPU and in float64; it makes temporaries of the block's size, the kernels none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import GradientFactors, RowLoss, RowStatistics, Targets
from subtensors.kernels.runtime.current_device import launching_on
from subtensors.kernels.runtime.launcher import CachedLauncher


@cache
def launch_softmax_gradient() -> CachedLauncher:
    """The launch of the kernel that takes whole rows."""
    from subtensors.kernels.cross_entropy.softmax_gradient_kernel import softmax_gradient_kernel

    return CachedLauncher(softmax_gradient_kernel)


class Block(NamedTuple):
    """Some of the logits.

    Args:
        logits: (rows, columns), rows of one stride and columns next to each other.
        first_row, first_column: where it lies in the whole.
    """

    logits: Tensor
    first_row: int = 0
    first_column: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows in the whole, [begin, end)."""
        return self.first_row, self.first_row + self.logits.shape[0]

    @property
    def columns(self) -> tuple[int, int]:
        """Its columns in the whole, [begin, end)."""
        return self.first_column, self.first_column + self.logits.shape[1]


class BlockOps(Protocol):
    """The operations on a block of logits."""

    def fold(self, block: Block, statistics: RowStatistics) -> None:
        """Fold a block into the statistics of all rows, in place."""

    def write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors, into: Tensor) -> None:
        """Write the gradient of a block; `statistics` and `factors` are of all rows, every column folded in.

        `into` has the shape of the block's logits, and may be them.
        """

    def fold_and_write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors) -> None:
        """Both, for a block with every column of its rows, whatever their statistics hold."""


class ReferenceOps:
    """The formulas in plain torch.

    Args:
        terms: of all rows.
    """

    def __init__(self, terms: RowLoss) -> None:
        self.terms, self.options = terms, terms.options

    def _squash(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """z and dz / dy, in the dtype of the computation."""
        y, temperature = logits.to(self.terms.dtype), self.options.temperature
        if self.options.softcap is None:
            return y / temperature, 1 / temperature
        t = torch.tanh(y / self.options.softcap)
        return self.options.softcap * t / temperature, (1 - t * t) / temperature

    def _targets(self, block: Block) -> tuple[Tensor, Tensor | float]:
        """w q (or the hard target's [k = y]) and w of a block."""
        targets = self.terms.targets.rows(*block.rows)
        begin, end = block.columns
        weight = 1.0 if targets.class_weight is None else targets.class_weight[begin:end]
        if targets.soft is not None:
            return weight * targets.soft[:, begin:end].to(self.terms.dtype), weight
        assert targets.hard is not None
        classes = torch.arange(begin, end, device=block.logits.device)
        return (targets.hard[:, None] == classes).to(self.terms.dtype), weight

    def fold(self, block: Block, statistics: RowStatistics) -> None:
        """Fold a block into the statistics of all rows, in place."""
        z, _ = self._squash(block.logits)
        targets, weight = self._targets(block)
        mine = statistics.rows(*block.rows)
        top = torch.maximum(mine.top, z.amax(1))
        shift = torch.where(top == -torch.inf, 0.0, top)
        mine.total.mul_((mine.top - shift).exp()).add_((z - shift[:, None]).exp().sum(1))
        mine.top.copy_(top)
        if self.terms.targets.soft is None:  # an infinite logit that is not the target's is not looked at
            mine.picked.add_(torch.where(targets > 0, z, 0.0).sum(1))
        else:
            mine.picked.add_((targets * z).sum(1))
        if self.terms.is_smoothed:
            mine.summed.add_((weight * z).sum(1))

    def write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors, into: Tensor) -> None:
        """Write the gradient of a block."""
        z, slope = self._squash(block.logits)
        targets, weight = self._targets(block)
        mine, seen = factors.rows(*block.rows), statistics.rows(*block.rows)
        share = (z - seen.top[:, None] - seen.total.log()[:, None]).exp()
        gradient = mine.on_softmax[:, None] * share
        if self.terms.is_penalised:
            gradient += (mine.on_square * seen.log_normaliser())[:, None] * share
        gradient -= mine.on_target[:, None] * targets
        if self.terms.is_smoothed:
            gradient -= mine.on_all[:, None] * weight
        into.copy_(gradient * slope)

    def fold_and_write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors) -> None:
        """Both, for a block with every column of its rows."""
        statistics.rows(*block.rows).forget()
        self.fold(block, statistics)
        self.write_gradient(block, statistics, factors, block.logits)


@dataclass(frozen=True)
class Tile:
    """Columns that a program reads at once, the rows of which it does, and the warps that share them."""

    columns: int
    warps: int
    rows: int = 1


WHOLE_ROWS, LONG_ROWS, STATISTICS, GRADIENT = Tile(8192, 16), Tile(16384, 32), Tile(2048, 4, rows=2), Tile(2048, 4)
"""The fastest of those that were measured on an H200."""

LONG = 2**16
"""Columns from which on a row is long."""


class KernelOps:
    """The same by Triton kernels, in place and in float32.

    Args:
        terms: of all rows.
    """

    def __init__(self, terms: RowLoss) -> None:
        self.terms = terms
        options = terms.options
        self.numbers = (1.0 if options.softcap is None else float(options.softcap), 1.0 / options.temperature)
        self.flags = {
            "SOFT": terms.targets.soft is not None,
            "WEIGHTED": terms.targets.class_weight is not None,
            "SMOOTHED": terms.is_smoothed,
            "CAPPED": options.softcap is not None,
        }

    def _operands(self, block: Block) -> tuple[Any, ...]:
        """Return the leading arguments of a kernel on the rows of a block."""
        logits, targets = block.logits, self.terms.targets.rows(*block.rows)
        if targets.soft is not None:
            targets = targets._replace(soft=targets.soft[:, slice(*block.columns)])
        soft, weight, hard = self._of_targets(logits, targets)
        return logits, logits.stride(0), soft, soft.stride(0), weight, hard

    def _of_targets(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
        """Distributions, class weights and class indices; in the place of what is absent something that is not read."""
        soft = logits if targets.soft is None else _with_near_columns(targets.soft)
        weight = logits if targets.class_weight is None else targets.class_weight
        return soft, weight, logits if targets.hard is None else targets.hard

    def fold(self, block: Block, statistics: RowStatistics) -> None:
        """Fold a block into the statistics of all rows, in place."""
        from subtensors.kernels.cross_entropy.softmax_gradient_kernel import statistics_kernel

        rows, columns = block.logits.shape
        mine = statistics.rows(*block.rows)
        with launching_on(block.logits.device):
            statistics_kernel[(-(-rows // STATISTICS.rows),)](
                *self._operands(block),
                *(mine.top, mine.total, mine.picked, mine.summed),
                *(rows, block.first_column, columns, *self.numbers),
                ROWS=STATISTICS.rows,
                **self._shape(STATISTICS, columns),
            )

    def write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors, into: Tensor) -> None:
        """Write the gradient of a block."""
        from subtensors.kernels.cross_entropy.softmax_gradient_kernel import gradient_kernel

        rows, columns = block.logits.shape
        mine, seen = factors.rows(*block.rows), statistics.rows(*block.rows)
        on_softmax = mine.on_softmax
        if self.terms.is_penalised:
            on_softmax = on_softmax + mine.on_square * seen.log_normaliser()
        shape = self._shape(GRADIENT, columns)
        with launching_on(into.device):
            gradient_kernel[(rows, -(-columns // shape["BLOCK"]))](
                *self._operands(block),
                *(into, into.stride(0), seen.top, seen.total, on_softmax, mine.on_target, mine.on_all),
                *(block.first_column, columns, *self.numbers),
                **shape,
            )

    def fold_and_write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors) -> None:
        """Both, for a block with every column of its rows."""
        logits = block.logits
        rows, columns = logits.shape
        soft, weight, hard = self._of_targets(logits, self.terms.targets)
        # Slices of what there is of each row would take the host longer than the launch.
        launch_softmax_gradient()(
            rows,
            (logits, soft, weight, hard, *statistics, *factors),
            *(logits.stride(0), soft.stride(0), block.first_row, columns, *self.numbers),
            **self.flags,
            PENALISED=self.terms.is_penalised,
            **self._tile(LONG_ROWS if columns >= LONG else WHOLE_ROWS, columns),
        )

    def _shape(self, tile: Tile, columns: int) -> dict[str, Any]:
        """The kernel's compile-time arguments; a block narrower than the tile gets a narrower tile."""
        return {**self.flags, **self._tile(tile, columns)}

    def _tile(self, tile: Tile, columns: int) -> dict[str, Any]:
        width = min(tile.columns, max(128, 1 << (columns - 1).bit_length()))
        return {"BLOCK": width, "num_warps": max(1, tile.warps * width // tile.columns)}


def _with_near_columns(soft: Tensor) -> Tensor:
    return soft if soft.stride(1) == 1 else soft.contiguous()


def uses_kernels(tensor: Tensor, kernels: bool | None = None) -> bool:
    """Return `kernels`, or by default whether Triton kernels work on the tensor: on a GPU, except for float64.

    >>> uses_kernels(torch.ones(3))
    False
    """
    return tensor.is_cuda and tensor.dtype != torch.float64 if kernels is None else kernels


def block_ops(terms: RowLoss, logits: Tensor, kernels: bool | None = None) -> BlockOps:
    """Return the operations on blocks of these logits.

    Args:
        terms: the loss of all rows.
        logits: any block, for its device and dtype.
        kernels: whether to use Triton kernels; None: as the device and dtype decide.
    """
    return KernelOps(terms) if uses_kernels(logits, kernels) else ReferenceOps(terms)
