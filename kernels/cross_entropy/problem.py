"""The operands and options of a linear layer with cross entropy, shared by its two orders: by rows and by columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, GradientFactors, RowLoss, RowStatistics
from subtensors.kernels.cross_entropy.logits_block import Block, BlockOps, block_ops, uses_kernels
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype


class GradFlags(NamedTuple):
    """The gradients to compute; one that is not needed costs nothing."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class LossAndGradients(NamedTuple):
    """The result of `linear_cross_entropy`: the loss, and each gradient that was asked for."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass
class Problem:
    """A linear layer with cross entropy: the operands, the options, and the gradients to compute.

    The values per row take many small kernels. They are computed on first use, which is after the first logits: the
    GPU runs a matrix product while the host prepares them.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    options: CrossEntropy
    needs: GradFlags
    upstream: Tensor | None
    weight_grad_dtype: torch.dtype
    kernels: bool | None
    writes_whole_rows: bool = False
    """Whether the gradient of a row is written as soon as the row has been read."""

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which sums are kept."""
        return arithmetic_dtype(self.hidden.dtype)

    @cached_property
    def terms(self) -> RowLoss:
        """The loss as a function of the statistics of rows."""
        kernels = uses_kernels(self.hidden, self.kernels)
        return RowLoss(self.options, self.target, self.weight.shape[0], self.compute, kernels)

    @cached_property
    def statistics(self) -> RowStatistics:
        """Those of the rows, as far as logits were seen."""
        memory = RowStatistics.unwritten if self.writes_whole_rows else RowStatistics.none
        return memory(self.hidden.shape[0], self.compute, self.hidden.device)

    @cached_property
    def factors(self) -> GradientFactors:
        """Those of the gradient of the logits."""
        return self.terms.gradient_factors(self.upstream)

    @cached_property
    def ops(self) -> BlockOps:
        """The operations on blocks of logits."""
        return block_ops(self.terms, self.hidden, self.kernels)

    def block(self, memory: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Block:
        """The block of these rows and columns at the beginning of some memory."""
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
        """Compute all logits of rows [begin, end) in memory of as many rows, or more."""
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
        """Memory for the gradient of the weight, where it is wanted."""
        if not self.needs.weight:
            return None
        return torch.empty(self.weight.shape, dtype=self.weight_grad_dtype, device=self.weight.device)

    def bias_grad(self) -> Tensor | None:
        """Zeros to add the gradient of the bias to, where it is wanted."""
        if not self.needs.bias:
            return None
        return torch.zeros(self.weight.shape[0], dtype=self.compute, device=self.weight.device)

    def result(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> LossAndGradients:
        """The loss, and these gradients in the dtypes of what they are of."""
        loss = self.terms.loss(self.statistics)
        hidden, bias = (None if t is None else t.to(self.hidden.dtype) for t in (hidden, bias))
        return LossAndGradients(loss, hidden, weight, bias)
