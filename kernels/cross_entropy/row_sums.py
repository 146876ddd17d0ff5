"""The running sums of rows of logits that statistics are made of, and the gradient of the logits.

`row_statistics_kernel.py` has the formulas. They are computed by its kernels, or in plain torch: the reference that the
kernels are tested against, which runs on a CPU and in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.logits_block import GRADIENT, STATISTICS, Block, launch_options, uses_kernels
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.kernels.runtime.launcher import launching_on


@dataclass(frozen=True)
class StatisticsOptions:
    """The transform of the logits, and the statistics that take work of their own.

    Args:
        softcap: logits become `softcap * tanh(logits / softcap)`.
        temperature: logits are divided by it, after the softcap.
        entropy: whether to compute the negative entropy.
        argmax: whether to find the largest class.
    """

    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    argmax: bool = False


class LogitStatistics(NamedTuple):
    """Statistics of N rows of logits, float32 (float64 for float64 logits).

    Args:
        log_sum_exp: (N,).
        target_logits: (T, N), the transformed logits of T given classes a row.
        log_probabilities: (T, N), of the same classes.
        negative_entropy: (N,), sum_k p_k log p_k; None where it was not requested.
        expectation: (N,), sum_k p_k v_k; None without a vector.
        argmax: (N,) int64, the first of the largest classes; None where it was not requested.
    """

    log_sum_exp: Tensor
    target_logits: Tensor
    log_probabilities: Tensor
    negative_entropy: Tensor | None
    expectation: Tensor | None
    argmax: Tensor | None


class Upstream(NamedTuple):
    """The gradients of the statistics; None for one without."""

    log_sum_exp: Tensor | None
    target_logits: Tensor | None
    log_probabilities: Tensor | None
    negative_entropy: Tensor | None
    expectation: Tensor | None
    argmax: None


class _Factors(NamedTuple):
    """The factors of the gradient, (N,) each: a, b and e of `row_statistics_kernel`, and (T, N) of given classes."""

    of_softmax: Tensor
    of_entropy: Tensor
    of_vector: Tensor
    of_targets: Tensor


class RowSums:
    """The running sums of N rows of logits, which blocks of columns are folded into.

    Args:
        options: the transform of the logits, and what to compute.
        targets: (T, N) int64, the given classes.
        vector: (V,), or None.
        classes: V.
        like: a tensor of the dtype and device of the logits.
        kernels: whether to use Triton kernels; None: on a GPU, except for float64.

    Raises:
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.
    """

    def __init__(
        self,
        options: StatisticsOptions,
        targets: Tensor,
        vector: Tensor | None,
        classes: int,
        like: Tensor,
        kernels: bool | None = None,
    ) -> None:
        self.options, self.targets, self.kernels = options, targets.contiguous(), uses_kernels(like, kernels)
        self.dtype = arithmetic_dtype(like.dtype)
        self.vector = None if vector is None else vector.detach().contiguous()
        _check_classes(self.targets, classes)
        count = targets.shape[1]

        def zeros(needed: bool) -> Tensor:
            return torch.zeros(count if needed else 0, dtype=self.dtype, device=like.device)

        self.row_max, self.sum_exp = zeros(True).fill_(-torch.inf), zeros(True)
        self.sum_exp_logit, self.sum_exp_vector = zeros(options.entropy), zeros(vector is not None)
        self.argmax = torch.zeros(count if options.argmax else 0, dtype=torch.int64, device=like.device)
        self.target_logits = torch.zeros(targets.shape, dtype=self.dtype, device=like.device)

    def _transformed(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return z and dz / dy, in the dtype of the computation."""
        y, temperature, softcap = logits.to(self.dtype), self.options.temperature, self.options.softcap
        if softcap is None:
            return y / temperature, 1 / temperature
        t = torch.tanh(y / softcap)
        return softcap * t / temperature, (1 - t * t) / temperature

    def fold(self, block: Block) -> None:
        """Fold a block with all rows into the sums."""
        if not block.logits.numel():
            return
        if self.kernels:
            self._fold_by_kernel(block)
            return
        z, _ = self._transformed(block.logits)
        (begin, end), top = block.columns, z.amax(1)
        if self.options.argmax:
            self.argmax.copy_(torch.where(top > self.row_max, begin + z.argmax(1), self.argmax))
        row_max = torch.maximum(self.row_max, top)
        shift = torch.where(row_max == -torch.inf, 0.0, row_max)
        scale, shifted = (self.row_max - shift).exp(), z - shift[:, None]
        e = shifted.exp()
        if self.options.entropy:
            moved = torch.where(self.sum_exp > 0, (self.row_max - shift) * self.sum_exp, 0.0)
            self.sum_exp_logit.add_(moved).mul_(scale).add_(torch.where(e > 0, e * shifted, 0.0).sum(1))
        if self.vector is not None:
            self.sum_exp_vector.mul_(scale).add_(e @ self.vector[begin:end].to(self.dtype))
        self.sum_exp.mul_(scale).add_(e.sum(1))
        self.row_max.copy_(row_max)
        here = (self.targets >= begin) & (self.targets < end)
        found = z.t().gather(0, torch.where(here, self.targets - begin, 0))
        self.target_logits.copy_(torch.where(here, found, self.target_logits))

    def _fold_by_kernel(self, block: Block) -> None:
        from subtensors.kernels.cross_entropy.row_statistics_kernel import row_statistics_kernel

        logits = block.logits
        rows, columns = logits.shape
        with launching_on(logits.device):
            row_statistics_kernel[(-(-rows // STATISTICS.rows),)](
                *(logits, logits.stride(0), self.targets, logits if self.vector is None else self.vector),
                *(self.row_max, self.sum_exp, self.sum_exp_logit, self.sum_exp_vector, self.argmax),
                *(self.target_logits, rows, rows, block.first_column, columns, *self._scalars),
                **self._flags,
                HAS_ARGMAX=self.options.argmax,
                ROWS=STATISTICS.rows,
                **launch_options(STATISTICS, columns),
            )

    @property
    def _scalars(self) -> tuple[float, float]:
        softcap = self.options.softcap
        return (1.0 if softcap is None else float(softcap)), 1.0 / self.options.temperature

    @property
    def _flags(self) -> dict[str, object]:
        return {
            "TARGETS": self.targets.shape[0],
            "HAS_ENTROPY": self.options.entropy,
            "HAS_VECTOR": self.vector is not None,
            "HAS_SOFTCAP": self.options.softcap is not None,
        }

    def statistics(self) -> LogitStatistics:
        """Return the statistics, every column folded in."""
        log_sum = self.sum_exp.log()
        # A row with an infinite logit has an infinite sum, as in torch; inf - inf would be NaN.
        log_sum_exp = torch.where(self.row_max.isinf(), self.row_max, self.row_max + log_sum)
        # Subtract the largest logit first: for a confident row the difference is small, and keeps its bits.
        log_probabilities = (self.target_logits - self.row_max) - log_sum
        entropy = self.sum_exp_logit / self.sum_exp - log_sum if self.options.entropy else None
        expectation = None if self.vector is None else self.sum_exp_vector / self.sum_exp
        argmax = self.argmax if self.options.argmax else None
        return LogitStatistics(log_sum_exp, self.target_logits, log_probabilities, entropy, expectation, argmax)

    def factors(self, upstream: Upstream) -> _Factors:
        """Return the factors of the gradient for gradients of the statistics."""
        statistics = self.statistics()
        zero = torch.zeros_like(self.row_max)
        of_softmax = zero if upstream.log_sum_exp is None else upstream.log_sum_exp.to(self.dtype)
        of_targets, of_entropy, of_vector = torch.zeros_like(self.target_logits), zero, zero
        if upstream.log_probabilities is not None:
            of_targets = upstream.log_probabilities.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_targets.sum(0)
        if upstream.target_logits is not None:
            of_targets = of_targets + upstream.target_logits.to(self.dtype)
        if upstream.negative_entropy is not None and statistics.negative_entropy is not None:
            of_entropy = upstream.negative_entropy.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_entropy * statistics.negative_entropy
        if upstream.expectation is not None and statistics.expectation is not None:
            of_vector = upstream.expectation.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_vector * statistics.expectation
        return _Factors(of_softmax.contiguous(), of_entropy, of_vector, of_targets)

    def write_gradient(self, block: Block, factors: _Factors, into: Tensor) -> None:
        """Write the gradient of a block with all rows; `into` may be its logits."""
        logits = block.logits
        if not logits.numel():
            return
        # A row with an infinite logit: see `statistics`.
        log_sum = self.sum_exp.masked_fill(self.row_max.isinf(), 1.0).log()
        if self.kernels:
            self._write_by_kernel(block, factors, into, log_sum)
            return
        z, slope = self._transformed(logits)
        begin, end = block.columns
        log_p = (z - self.row_max[:, None]) - log_sum[:, None]
        factor = factors.of_softmax[:, None].expand_as(z)
        if self.options.entropy:
            factor = factor + factors.of_entropy[:, None] * torch.where(log_p == -torch.inf, 0.0, log_p)
        if self.vector is not None:
            factor = factor + factors.of_vector[:, None] * self.vector[begin:end].to(self.dtype)
        gradient = log_p.exp() * factor
        for target, of_target in zip(self.targets, factors.of_targets, strict=True):
            here = (target >= begin) & (target < end)
            place = torch.where(here, target - begin, 0)[:, None]
            gradient.scatter_add_(1, place, torch.where(here, of_target, 0.0)[:, None])
        into.copy_(gradient * slope)

    def _write_by_kernel(self, block: Block, factors: _Factors, into: Tensor, log_sum: Tensor) -> None:
        from subtensors.kernels.cross_entropy.row_statistics_kernel import row_gradient_kernel

        logits = block.logits
        rows, columns = logits.shape
        options = launch_options(GRADIENT, columns)
        with launching_on(logits.device):
            row_gradient_kernel[(rows, -(-columns // options["BLOCK"]))](
                *(logits, logits.stride(0), into, into.stride(0), self.targets),
                *(logits if self.vector is None else self.vector, self.row_max, log_sum, *factors),
                *(rows, block.first_column, columns, *self._scalars),
                **self._flags,
                **options,
            )


def _check_classes(targets: Tensor, classes: int) -> None:
    """Raise IndexError for a target that is no class, on a CPU; on a GPU torch's device assertion."""
    if not targets.numel():
        return
    invalid = ((targets < 0) | (targets >= classes)).any()
    if targets.device.type != "cpu":
        invalid.new_zeros(1).gather(0, invalid.long()[None])
    elif invalid:
        found = targets[(targets < 0) | (targets >= classes)][0].item()
        raise IndexError(f"index {found} is out of bounds for dimension 1 with size {classes}")
