"""The running sums of rows of logits that statistics are made of, and the gradient of the logits.

`row_statistics_kernel.py` has the formulas. They are computed by its kernels, or in plain torch: the reference that the
kernels are tested against, which runs on a CPU and in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy import logits_block
from subtensors.kernels.cross_entropy.logits_block import Block, BlockLaunch, uses_kernels
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard
from subtensors.kernels.runtime.launcher import cached_launcher

_BEHIND_ALL = 2**63 - 1
"""The largest class of a part whose largest logit is not that of the row."""


@dataclass(frozen=True)
class StatisticsOptions:
    """The transform of the logits, and the statistics that take work of their own.

    Args:
        softcap: logits become `softcap * tanh(logits / softcap)`.
        temperature: logits are divided by it, after the softcap.
        entropy: whether to compute the negative entropy.
        argmax: whether to find the largest class.
        smoothing: whether to add up the logits, weighted by class.
        exact_entropy: whether a logit of -inf makes the entropy NaN, as p log p is then; otherwise it adds 0.
    """

    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    argmax: bool = False
    smoothing: bool = False
    exact_entropy: bool = False


class ClassMap(NamedTuple):
    """A map of the logits by class, after their transform: offsets are added to them, or replace masked ones.

    Args:
        offsets: (V,), contiguous, in the dtype of the computation.
        masked: (V,) bool, contiguous.
        is_scaled: whether the scales of rows multiply what it gives, rather than what it takes.
    """

    offsets: Tensor
    masked: Tensor
    is_scaled: bool = False


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


class Factors(NamedTuple):
    """The factors of the gradient, (N,) each: as `row_statistics_kernel` has them, after the logarithm of the sums."""

    log_sum: Tensor
    of_softmax: Tensor
    of_entropy: Tensor
    of_vector: Tensor
    of_targets: Tensor
    """(T, N), of the given classes; (1, N), of soft targets."""
    of_smoothing: Tensor

    def rows(self, begin: int, end: int) -> Factors:
        """Return views of the factors of rows [begin, end)."""
        return Factors(*[t[..., begin:end] for t in self])


class RowSums:
    """The running sums of N rows of logits, which blocks of columns are folded into.

    After blocks that lie class by class, and where other processes have more classes, `complete` ends them.

    Args:
        options: the transform of the logits, and what to compute.
        targets: (T, N) int64, the given classes; -1 is none.
        vector: (V,), or None.
        like: a tensor of the dtype and device of the logits.
        kernels: whether to use Triton kernels; None: on a GPU, except for float64.
        soft: (N, V), distributions in place of given classes, of which there are none then; or None.
        class_weight: (V,), the weights of logits in sums with distributions or without; None: ones.
        scale: (N,), by which the transformed logits of a row are multiplied; None: ones.
        class_map: of the logits of all rows, or None.
    """

    def __init__(
        self,
        options: StatisticsOptions,
        targets: Tensor,
        vector: Tensor | None,
        like: Tensor,
        kernels: bool | None = None,
        soft: Tensor | None = None,
        class_weight: Tensor | None = None,
        scale: Tensor | None = None,
        class_map: ClassMap | None = None,
    ) -> None:
        self.options, self.targets, self.kernels = options, targets.contiguous(), uses_kernels(like, kernels)
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.vector = None if vector is None else vector.detach().contiguous()
        self.soft = soft if soft is None or soft.stride(1) == 1 else soft.contiguous()
        self.class_weight, self.class_map = class_weight, class_map
        self.scale = None if scale is None else scale.detach().contiguous()
        given, count = targets.shape

        def zeros(needed: bool) -> Tensor:
            return torch.zeros(count if needed else 0, dtype=self.dtype, device=like.device)

        self.row_max, self.sum_exp = zeros(True).fill_(-torch.inf), zeros(True)
        self.sum_exp_logit, self.sum_exp_vector = zeros(options.entropy), zeros(vector is not None)
        self.argmax = torch.zeros(count if options.argmax else 0, dtype=torch.int64, device=like.device)
        self.target_logits = torch.zeros(given + (soft is not None), count, dtype=self.dtype, device=like.device)
        """(T, N), the transformed logits of the given classes; (1, N), their weighted sums with soft targets."""
        self.logit_sum = zeros(options.smoothing)
        self._parts = 1
        """The number of sums of a row, one behind the other: kernels fold each part of the columns into its own."""
        self.scale_grad = zeros(scale is not None)
        """(N,), the gradient of the scale, of the blocks whose gradient was written since `factors`."""

    @property
    def _totals(self) -> tuple[Tensor, ...]:
        sums = (self.row_max, self.sum_exp, self.sum_exp_logit, self.sum_exp_vector, self.argmax)
        return (*sums, self.target_logits, self.logit_sum)

    def reset(self, begin: int, end: int) -> None:
        """Forget what was folded into rows [begin, end)."""
        for total in self._totals:
            total[..., begin:end].fill_(-torch.inf if total is self.row_max else 0)

    def _transformed(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return u and du / dy, in the dtype of the computation."""
        y, temperature, softcap = logits.to(self.dtype), self.options.temperature, self.options.softcap
        if softcap is None:
            return y / temperature, 1 / temperature
        t = torch.tanh(y / softcap)
        return softcap * t / temperature, (1 - t * t) / temperature

    def _mapped(self, u: Tensor, block: Block) -> Tensor:
        """Return the logits of a block, transformed, after the scale of rows and the map by class."""
        own, columns, classes = slice(*block.rows), slice(*block.columns), self.class_map
        scale = 1.0 if self.scale is None else self.scale[own, None]
        if classes is None:
            return u * scale
        before, after = (1.0, scale) if classes.is_scaled else (scale, 1.0)
        return (torch.where(classes.masked[columns], 0.0, u * before) + classes.offsets[columns]) * after

    def _weights(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Return the class weights of a block, and its weighted distributions or None."""
        begin, end = block.columns
        weight = torch.ones(end - begin, dtype=self.dtype, device=block.logits.device)
        if self.class_weight is not None:
            weight = self.class_weight[begin:end].to(self.dtype)
        soft = None if self.soft is None else self.soft[slice(*block.rows), begin:end].to(self.dtype)
        return weight, None if soft is None else weight * soft

    def fold(self, block: Block) -> None:
        """Fold a block into the sums of its rows."""
        if not block.logits.numel():
            return
        if self.kernels:
            self._fold_by_kernel(block)
            return
        for part in block.slices():
            self._fold_by_reference(part)

    def _fold_by_reference(self, block: Block) -> None:
        z = self._mapped(self._transformed(block.logits)[0], block)
        (begin, end), own, top = block.columns, slice(*block.rows), z.amax(1)
        row_max, sum_exp, sum_exp_logit, sum_exp_vector, argmax, target_logits, logit_sum = (
            total[..., own] for total in self._totals
        )
        if self.options.argmax:
            found = begin + z.argmax(1)
            is_first = (top > row_max) | ((top == row_max) & (found < argmax))  # in any order of blocks
            argmax.copy_(torch.where(is_first, found, argmax))
        shifted = z - self._rescale(own, torch.maximum(row_max, top))[:, None]
        e = shifted.exp()
        if self.options.entropy:
            counted = e * shifted if self.options.exact_entropy else torch.where(e > 0, e * shifted, 0.0)
            sum_exp_logit.add_(counted.sum(1))
        if self.vector is not None:
            sum_exp_vector.add_(e @ self.vector[begin:end].to(self.dtype))
        sum_exp.add_(e.sum(1))
        targets = self.targets[:, own]
        here = (targets >= begin) & (targets < end)
        found = z.t().gather(0, torch.where(here, targets - begin, 0))
        weight, soft = self._weights(block)
        if soft is None:
            target_logits.copy_(torch.where(here, found, target_logits))
        else:
            target_logits.add_((soft * z).sum(1))
        if self.options.smoothing:
            logit_sum.add_((weight * z).sum(1))

    def _rescale(self, own: slice, new_max: Tensor) -> Tensor:
        """Rescale sums of exp(z - row_max) to exp(z - new_max), and return the shift: that, or 0 where it is -inf."""
        row_max, sum_exp, sum_exp_logit, sum_exp_vector = (total[own] for total in self._totals[:4])
        shift = torch.where(new_max == -torch.inf, 0.0, new_max)
        moved = (row_max - shift).masked_fill_(sum_exp == 0, 0.0)
        if self.options.entropy:
            sum_exp_logit.addcmul_(moved, sum_exp)
        scale = moved.exp_()
        for total in (sum_exp, sum_exp_logit, sum_exp_vector):
            if total.numel():
                total.mul_(scale)
        row_max.copy_(new_max)
        return shift

    def complete(self, shard: VocabularyShard | None = None) -> None:
        """Fold the sums of all parts into one a row; and, where other processes have more classes, theirs."""
        if self._parts > 1:
            for name in self._divided:
                total: Tensor = getattr(self, name)
                setattr(self, name, total.view(*total.shape[:-1], self._parts, total.shape[-1] // self._parts))
            self._rescale_all(self.row_max.amax(0))
            for name in self._divided:
                total = getattr(self, name)
                # By now all parts of a row have its maximum.
                setattr(self, name, total.amin(-2) if name in ("row_max", "argmax") else total.sum(-2))
            self._parts = 1
        if shard is None:
            return
        self._rescale_all(shard.largest(self.row_max, self.targets))
        if self.options.argmax:
            shard.reduced(self.argmax, "MIN")
        totals = [t for t in (*self._totals[1:4], *self._totals[5:]) if t.numel()]
        sums = shard.reduced(torch.cat([t.flatten() for t in totals]), "SUM").split([t.numel() for t in totals])
        for total, folded in zip(totals, sums, strict=True):
            total.copy_(folded.view_as(total))

    def _rescale_all(self, new_max: Tensor) -> None:
        """Rescale the sums of all rows to another largest logit; the class of a smaller one comes after all others."""
        if self.options.argmax:
            self.argmax.masked_fill_(self.row_max < new_max, _BEHIND_ALL)
        self._rescale(slice(None), new_max)

    @property
    def _divided(self) -> list[str]:
        """The names of the sums that each part of the columns has; a given class is in one part alone."""
        names = ["row_max", "sum_exp", "sum_exp_logit", "sum_exp_vector", "argmax", "logit_sum"]
        names += [] if self.soft is None else ["target_logits"]
        return [name for name in names if getattr(self, name).numel()]

    def _divide(self, parts: int) -> None:
        """Add empty sums until each of so many parts of the columns has its own."""
        for name in self._divided:
            total: Tensor = getattr(self, name)
            more = total.shape[-1] // self._parts * (parts - self._parts)
            empty = total.new_full((), -torch.inf if name == "row_max" else 0).expand(*total.shape[:-1], more)
            setattr(self, name, torch.cat([total, empty], -1))
        self._parts = parts

    def _fold_by_kernel(self, block: Block) -> None:
        launch = BlockLaunch.of(block, logits_block.STATISTICS, logits_block.STATISTICS_BY_CLASS, is_sum=True)
        if launch.grid[1] > self._parts:
            self._divide(launch.grid[1])
        operands, soft_stride = self._operands(block)
        cached_launcher("cross_entropy.row_statistics_kernel", "row_statistics_kernel")(
            math.prod(launch.grid),
            (block.logits, *operands, *(total[..., block.first_row :] for total in self._totals)),
            *(*block.logits.stride(), soft_stride, *launch.rows, self.targets.shape[1], block.first_column),
            *(*launch.columns, *self._scalars),
            **self._flags,
            HAS_ARGMAX=self.options.argmax,
            BY_CLASS=block.is_by_class,
            **launch.options,
        )

    def _operands(self, block: Block) -> tuple[tuple[Tensor, ...], int]:
        """Return targets, vector, distributions, class weights and maps, and the stride of the distributions.

        The logits are in place of those that are absent.
        """
        logits, own = block.logits, slice(*block.rows)
        soft = logits if self.soft is None else self.soft[own, slice(*block.columns)]
        weight = logits if self.class_weight is None else self.class_weight
        vector = logits if self.vector is None else self.vector
        scale = logits if self.scale is None else self.scale[own]
        offsets, masked = (logits, logits) if self.class_map is None else self.class_map[:2]
        masked = masked.view(torch.uint8) if masked.dtype == torch.bool else masked
        return (self.targets[:, own], vector, soft, weight, scale, offsets, masked), soft.stride(0)

    @property
    def _scalars(self) -> tuple[float, float]:
        softcap = self.options.softcap
        return (1.0 if softcap is None else float(softcap)), 1.0 / self.options.temperature

    @property
    def _flags(self) -> dict[str, object]:
        return {
            "TARGETS": self.targets.shape[0],
            "HAS_ENTROPY": self.options.entropy,
            "EXACT_ENTROPY": self.options.exact_entropy,
            "HAS_VECTOR": self.vector is not None,
            "SOFT_TARGETS": self.soft is not None,
            "HAS_CLASS_WEIGHT": self.class_weight is not None,
            "HAS_SMOOTHING": self.options.smoothing,
            "HAS_SOFTCAP": self.options.softcap is not None,
            "HAS_SCALE": self.scale is not None,
            "HAS_OFFSETS": self.class_map is not None,
            "SCALES_OFFSETS": self.class_map is not None and self.class_map.is_scaled,
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

    def factors(self, upstream: Sequence[Tensor | None]) -> Factors:
        """Return the factors of the gradient for gradients of the statistics, None for one without."""
        statistics = self.statistics()
        log_sum_exp, target_logits, log_probabilities, negative_entropy, expectation, _ = upstream
        zero = torch.zeros_like(self.row_max)
        of_softmax = zero if log_sum_exp is None else log_sum_exp.to(self.dtype)
        of_targets, of_entropy, of_vector = torch.zeros_like(self.target_logits), zero, zero
        if log_probabilities is not None:
            of_targets = log_probabilities.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_targets.sum(0)
        if target_logits is not None:
            of_targets = of_targets + target_logits.to(self.dtype)
        if negative_entropy is not None and statistics.negative_entropy is not None:
            of_entropy = negative_entropy.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_entropy * statistics.negative_entropy
        if expectation is not None and statistics.expectation is not None:
            of_vector = expectation.to(self.dtype).contiguous()
            of_softmax = of_softmax - of_vector * statistics.expectation
        # A row with an infinite logit: see `statistics`.
        log_sum = self.sum_exp.masked_fill(self.row_max.isinf(), 1.0).log()
        self.scale_grad.zero_()
        return Factors(log_sum, of_softmax.contiguous(), of_entropy, of_vector, of_targets, zero)

    def write_gradient(self, block: Block, factors: Factors, into: Tensor) -> None:
        """Write the gradient of a block; `into` may be its logits. `factors` are of all rows."""
        if not block.logits.numel():
            return
        if self.kernels:
            self._write_by_kernel(block, factors.rows(*block.rows), into)
            return
        for part, gradient in zip(block.slices(), block._replace(logits=into).slices(), strict=True):
            self._write_by_reference(part, factors.rows(*part.rows), gradient.logits)

    def _write_by_reference(self, block: Block, factors: Factors, into: Tensor) -> None:
        own = slice(*block.rows)
        u, slope = self._transformed(block.logits)
        z = self._mapped(u, block)
        begin, end = block.columns
        log_p = (z - self.row_max[own, None]) - factors.log_sum[:, None]
        factor = factors.of_softmax[:, None].expand_as(z)
        if self.options.entropy:
            factor = factor + factors.of_entropy[:, None] * torch.where(log_p == -torch.inf, 0.0, log_p)
        if self.vector is not None:
            factor = factor + factors.of_vector[:, None] * self.vector[begin:end].to(self.dtype)
        gradient = log_p.exp() * factor
        weight, soft = self._weights(block)
        if soft is not None:
            gradient += factors.of_targets[0][:, None] * soft
        if self.options.smoothing:
            gradient += factors.of_smoothing[:, None] * weight
        for target, of_target in zip(self.targets[:, own], factors.of_targets, strict=False):
            here = (target >= begin) & (target < end)
            place = torch.where(here, target - begin, 0)[:, None]
            gradient.scatter_add_(1, place, torch.where(here, of_target, 0.0)[:, None])
        if self.class_map is not None:
            gradient.masked_fill_(self.class_map.masked[begin:end], 0.0)
        if self.scale is not None:
            self.scale_grad[own] += (gradient * u).sum(1)
            gradient *= self.scale[own, None]
        into.copy_(gradient * slope)

    def _write_by_kernel(self, block: Block, factors: Factors, into: Tensor) -> None:
        logits, has_scale = block.logits, self.scale is not None
        launch = BlockLaunch.of(block, logits_block.GRADIENT, logits_block.GRADIENT_BY_CLASS, is_sum=False)
        scale_grads = self.scale_grad.new_empty(launch.grid[1] if has_scale else 0, len(logits))
        operands, soft_stride = self._operands(block)
        cached_launcher("cross_entropy.row_statistics_kernel", "row_gradient_kernel")(
            math.prod(launch.grid),
            (logits, into, scale_grads, *operands, self.row_max[slice(*block.rows)], *factors),
            *(*logits.stride(), *into.stride(), soft_stride, *launch.rows, self.targets.shape[1], block.first_column),
            *(*launch.columns, *self._scalars),
            **self._flags,
            BY_CLASS=block.is_by_class,
            **launch.options,
        )
        if has_scale:
            self.scale_grad[slice(*block.rows)] += scale_grads.sum(0)


def check_classes(targets: Tensor, classes: int) -> None:
    """Raise IndexError for a target that is no class, on a CPU; on a GPU torch's device assertion."""
    if not targets.numel():
        return
    invalid = ((targets < 0) | (targets >= classes)).any()
    try:
        invalid.new_zeros(1).gather(0, invalid.long()[None])
    except RuntimeError:
        found = targets[(targets < 0) | (targets >= classes)][0].item()
        raise IndexError(f"index {found} is out of bounds for dimension 1 with size {classes}") from None
