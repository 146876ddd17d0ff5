"""The logits of a linear layer, a block at a time: computed, folded into row statistics, overwritten by their gradient.

A block is some rows and some columns of the matrix of logits. `Problem` holds what all blocks share: the operands, the
options, and the statistics of the rows. The operations on a block are Triton kernels or their torch reference, which
the kernels are tested against and which runs on a CPU and in float64; it makes temporaries of the block's size, the
kernels make none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import (
    GradientFactors,
    RowLoss,
    RowStatistics,
    Targets,
)
from subtensors.kernels.runtime.custom_ops import has_kernel
from subtensors.kernels.runtime.launcher import CachedLauncher, launching_on


class LossAndGradients(NamedTuple):
    """The result of `linear_cross_entropy`: the loss, and each gradient that was requested."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class GradFlags(NamedTuple):
    """The gradients to compute; one that is not needed costs nothing."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class Block(NamedTuple):
    """A block of the logits.

    Args:
        logits: (rows, columns), rows of one stride and adjacent columns.
        first_row, first_column: its position in the matrix of all logits.
    """

    logits: Tensor
    first_row: int = 0
    first_column: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows among all rows, [begin, end)."""
        return self.first_row, self.first_row + self.logits.shape[0]

    @property
    def columns(self) -> tuple[int, int]:
        """Its columns among all columns, [begin, end)."""
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
        """Fold a block with every column of its rows, and write its gradient; their statistics are overwritten."""


class ReferenceOps:
    """The formulas in plain torch.

    Args:
        row_loss: the loss of all rows.
    """

    def __init__(self, row_loss: RowLoss) -> None:
        self.row_loss, self.options = row_loss, row_loss.options

    def _transformed_logits(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return z and dz / dy, in the dtype of the computation."""
        y, temperature = logits.to(self.row_loss.dtype), self.options.temperature
        if self.options.softcap is None:
            return y / temperature, 1 / temperature
        t = torch.tanh(y / self.options.softcap)
        return self.options.softcap * t / temperature, (1 - t * t) / temperature

    def _targets(self, block: Block) -> tuple[Tensor, Tensor | float]:
        """Return w q (or [k = y] for class targets) and w of a block."""
        targets = self.row_loss.targets.rows(*block.rows)
        begin, end = block.columns
        weight = 1.0 if targets.class_weight is None else targets.class_weight[begin:end]
        if targets.soft is not None:
            return weight * targets.soft[:, begin:end].to(self.row_loss.dtype), weight
        assert targets.class_indices is not None
        classes = torch.arange(begin, end, device=block.logits.device)
        return (targets.class_indices[:, None] == classes).to(self.row_loss.dtype), weight

    def fold(self, block: Block, statistics: RowStatistics) -> None:
        """Fold a block into the statistics of all rows, in place."""
        z, _ = self._transformed_logits(block.logits)
        targets, weight = self._targets(block)
        own = statistics.rows(*block.rows)
        row_max = torch.maximum(own.row_max, z.amax(1))
        shift = torch.where(row_max == -torch.inf, 0.0, row_max)
        own.sum_exp.mul_((own.row_max - shift).exp()).add_((z - shift[:, None]).exp().sum(1))
        own.row_max.copy_(row_max)
        if self.row_loss.targets.soft is None:  # an infinite logit of another class must not make NaN of 0 * inf
            own.target_logit.add_(torch.where(targets > 0, z, 0.0).sum(1))
        else:
            own.target_logit.add_((targets * z).sum(1))
        if self.row_loss.has_smoothing:
            own.logit_sum.add_((weight * z).sum(1))

    def write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors, into: Tensor) -> None:
        """Write the gradient of a block."""
        z, slope = self._transformed_logits(block.logits)
        targets, weight = self._targets(block)
        factor, of_rows = factors.rows(*block.rows), statistics.rows(*block.rows)
        softmax = (z - of_rows.row_max[:, None] - of_rows.sum_exp.log()[:, None]).exp()
        gradient = factor.grad_softmax[:, None] * softmax
        if self.row_loss.has_z_loss:
            gradient += (factor.grad_z_loss * of_rows.log_sum_exp())[:, None] * softmax
        gradient -= factor.grad_target[:, None] * targets
        if self.row_loss.has_smoothing:
            gradient -= factor.grad_smoothing[:, None] * weight
        into.copy_(gradient * slope)

    def fold_and_write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors) -> None:
        """Fold a block with every column of its rows, and write its gradient."""
        statistics.rows(*block.rows).reset()
        self.fold(block, statistics)
        self.write_gradient(block, statistics, factors, block.logits)


@cache
def softmax_gradient_launch() -> CachedLauncher:
    """Return the launch of the kernel that takes complete rows."""
    from subtensors.kernels.cross_entropy.softmax_gradient_kernel import softmax_gradient_kernel

    return CachedLauncher(softmax_gradient_kernel)


@dataclass(frozen=True)
class Tile:
    """The columns and rows that a program reads at once, and its warps."""

    columns: int
    warps: int
    rows: int = 1


WHOLE_ROWS, LONG_ROWS, STATISTICS, GRADIENT = Tile(8192, 16), Tile(16384, 32), Tile(2048, 4, rows=2), Tile(2048, 4)
"""The fastest of those that were measured on an H200."""

MIN_LONG_COLUMNS = 2**16
"""The columns from which on a row is long."""


class KernelOps:
    """The same formulas by Triton kernels, in place and in float32.

    Args:
        row_loss: the loss of all rows.
    """

    def __init__(self, row_loss: RowLoss) -> None:
        self.row_loss = row_loss
        options = row_loss.options
        self.scalars = (1.0 if options.softcap is None else float(options.softcap), 1.0 / options.temperature)
        self.flags = {
            "SOFT_TARGETS": row_loss.targets.soft is not None,
            "HAS_CLASS_WEIGHT": row_loss.targets.class_weight is not None,
            "HAS_SMOOTHING": row_loss.has_smoothing,
            "HAS_SOFTCAP": options.softcap is not None,
        }

    def _operands(self, block: Block) -> tuple[Tensor | int, ...]:
        """Return the leading arguments of a kernel on the rows of a block."""
        logits, targets = block.logits, self.row_loss.targets.rows(*block.rows)
        if targets.soft is not None:
            targets = targets._replace(soft=targets.soft[:, slice(*block.columns)])
        soft, weight, class_indices = self._target_operands(logits, targets)
        return logits, logits.stride(0), soft, soft.stride(0), weight, class_indices

    def _target_operands(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
        """Return distributions, class weights and class indices, with the logits in place of absent ones."""
        soft = targets.soft
        if soft is None:
            soft = logits
        elif soft.stride(1) != 1:
            soft = soft.contiguous()
        weight = logits if targets.class_weight is None else targets.class_weight
        return soft, weight, logits if targets.class_indices is None else targets.class_indices

    def fold(self, block: Block, statistics: RowStatistics) -> None:
        """Fold a block into the statistics of all rows, in place."""
        from subtensors.kernels.cross_entropy.softmax_gradient_kernel import statistics_kernel

        rows, columns = block.logits.shape
        with launching_on(block.logits.device):
            statistics_kernel[(-(-rows // STATISTICS.rows),)](
                *self._operands(block),
                *statistics.rows(*block.rows),
                *(rows, block.first_column, columns, *self.scalars),
                ROWS=STATISTICS.rows,
                **self.flags,
                **launch_options(STATISTICS, columns),
            )

    def write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors, into: Tensor) -> None:
        """Write the gradient of a block."""
        from subtensors.kernels.cross_entropy.softmax_gradient_kernel import gradient_kernel

        rows, columns = block.logits.shape
        factor, of_rows = factors.rows(*block.rows), statistics.rows(*block.rows)
        grad_softmax = factor.grad_softmax
        if self.row_loss.has_z_loss:
            grad_softmax = grad_softmax + factor.grad_z_loss * of_rows.log_sum_exp()
        options = launch_options(GRADIENT, columns)
        with launching_on(into.device):
            gradient_kernel[(rows, -(-columns // options["BLOCK"]))](
                *self._operands(block),
                *(into, into.stride(0), of_rows.row_max, of_rows.sum_exp),
                *(grad_softmax, factor.grad_target, factor.grad_smoothing),
                *(block.first_column, columns, *self.scalars),
                **self.flags,
                **options,
            )

    def fold_and_write_gradient(self, block: Block, statistics: RowStatistics, factors: GradientFactors) -> None:
        """Fold a block with every column of its rows, and write its gradient."""
        logits = block.logits
        rows, columns = logits.shape
        soft, weight, class_indices = self._target_operands(logits, self.row_loss.targets)
        # The kernel takes all rows and the first of them: a slice of each operand would take longer than the launch.
        softmax_gradient_launch()(
            rows,
            (logits, soft, weight, class_indices, *statistics, *factors),
            *(logits.stride(0), soft.stride(0), block.first_row, columns, *self.scalars),
            **self.flags,
            HAS_Z_LOSS=self.row_loss.has_z_loss,
            **launch_options(LONG_ROWS if columns >= MIN_LONG_COLUMNS else WHOLE_ROWS, columns),
        )


def launch_options(tile: Tile, columns: int) -> dict[str, int]:
    """Return the block size and the warps; a block narrower than the tile gets a narrower tile."""
    width = min(tile.columns, max(128, 1 << (columns - 1).bit_length()))
    return {"BLOCK": width, "num_warps": max(1, tile.warps * width // tile.columns)}


def uses_kernels(tensor: Tensor, kernels: bool | None = None) -> bool:
    """Return `kernels`, or by default whether Triton kernels work on the tensor: on a GPU, except for float64.

    >>> uses_kernels(torch.ones(3))
    False
    """
    return has_kernel(tensor, (torch.float16, torch.bfloat16, torch.float32)) if kernels is None else kernels


def product_into(result: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Compute result = a @ b, or result += a @ b, each element summed in float32 (float64 for such operands).

    Args:
        result: (m, n), of the operands' dtype or float32.
        a: (m, k).
        b: (k, n).
        accumulate: whether to add to the values of the result.
    """
    if result.dtype == a.dtype:
        if accumulate:
            result.addmm_(a, b)
        else:
            torch.mm(a, b, out=result)
    elif result.is_cuda:
        if accumulate:
            torch.addmm(result, a, b, out_dtype=result.dtype, out=result)
        else:
            torch.mm(a, b, out_dtype=result.dtype, out=result)
    else:  # only GPUs have a GEMM with a wider result
        product_into(result, a.to(result.dtype), b.to(result.dtype), accumulate)


def block_ops(row_loss: RowLoss, logits: Tensor, kernels: bool | None = None) -> BlockOps:
    """Return the operations on blocks of these logits; `kernels` as in `uses_kernels`."""
    return KernelOps(row_loss) if uses_kernels(logits, kernels) else ReferenceOps(row_loss)


@dataclass
class LinearHead:
    """A linear layer whose logits are computed a block at a time.

    Args:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,), or None.
        needs: the gradients to compute.
        weight_grad_dtype: of the gradient of the weight.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    needs: GradFlags
    weight_grad_dtype: torch.dtype

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which sums are kept: float32, or float64 for float64 operands."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def block(self, memory: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Block:
        """Return the block of these rows and columns at the beginning of some memory."""
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        return Block(memory[: height * width].view(height, width), rows[0], columns[0])

    def logits(self, memory: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Block:
        """Compute a block of logits at the beginning of some memory."""
        block = self.block(memory, rows, columns)
        begin, end = columns
        weight, bias = self.weight[begin:end].t(), None if self.bias is None else self.bias[begin:end]
        self._multiply(self.hidden[slice(*rows)], weight, bias, block.logits)
        return block

    def logits_of_rows(self, memory: Tensor, begin: int, end: int) -> Block:
        """Compute all logits of rows [begin, end) in memory of at least as many rows."""
        logits = memory if end - begin == memory.shape[0] else memory[: end - begin]
        self._multiply(self.hidden[begin:end], self._weight_by_column, self.bias, logits)
        return Block(logits, begin)

    @cached_property
    def _weight_by_column(self) -> Tensor:
        return self.weight.t()

    @staticmethod
    def _multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
        if bias is None:
            torch.mm(hidden, weight, out=logits)
        else:
            torch.addmm(bias, hidden, weight, out=logits)

    def weight_grad(self) -> Tensor | None:
        """Return memory for the gradient of the weight; None where it is not needed."""
        if not self.needs.weight:
            return None
        return torch.empty(self.weight.shape, dtype=self.weight_grad_dtype, device=self.weight.device)

    def bias_grad(self) -> Tensor | None:
        """Return zeros to add the gradient of the bias to; None where it is not needed."""
        if not self.needs.bias:
            return None
        return torch.zeros(self.weight.shape[0], dtype=self.compute_dtype, device=self.weight.device)
