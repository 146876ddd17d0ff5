"""Cross entropy with all its options, as a few numbers a row of the logits.

With L, p, z as in `softmax_gradient`, V classes, label smoothing e and class weights w (1 where not given), the loss of
a row is

    t (m L - sum_k w_k q_k z_k) + s (M L - sum_k w_k z_k) + r L^2

    hard target y:   q_k = [k = y],  t = (1 - e) w_y,  m = 1, and w_k q_k is written [k = y] from here on
    soft target q:                   t = 1 - e,        m = sum_k w_k q_k
    both:            s = e / V,  M = sum_k w_k,  r = z_loss;   an ignored row has t = s = r = 0

and its gradient (t m + s M + 2 r L) p_k - t w_k q_k - s w_k. Everything here is a vector of N rows; what is as large as
the logits is read by the kernels alone. The options mean what they mean in `torch.nn.functional.cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.class_targets import ClassTargets, hard_loss_by_kernel, hard_rows

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class CrossEntropy:
    """The options of a cross entropy: those of torch's own, and three that language models add.

    Args:
        ignore_index: rows with this hard target do not count.
        class_weight: (V,), floating point; one weight per class.
        label_smoothing: in [0, 1]; the share of the uniform distribution in the target.
        z_loss: the factor of L^2, L the log-sum-exp of a row. Its mean is over rows that are not ignored, even where
            class weights make the mean of the cross entropy a weighted one.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        temperature: logits are divided by it, after the softcap.
        reduction: "mean" over all valid targets, "sum", or "none" for one loss per row.

    Raises:
        ValueError: an option outside its range.

    >>> CrossEntropy(softcap=30.0).temperature
    1.0
    >>> CrossEntropy(label_smoothing=2.0)
    Traceback (most recent call last):
    ...
    ValueError: label_smoothing must be between 0 and 1; got 2.0
    """

    ignore_index: int = -100
    class_weight: Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {self.reduction!r}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be between 0 and 1; got {self.label_smoothing}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive; got {self.softcap}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive; got {self.temperature}")


class Targets(NamedTuple):
    """The target of each row and the weight of each class, in the form that the kernels read.

    Args:
        hard: (N,) int64 class indices, -1 for an ignored row; None for soft targets.
        soft: (N, V) floating point, a distribution a row; None for hard targets.
        class_weight: (V,) in the dtype of the computation, or None.
    """

    hard: Tensor | None
    soft: Tensor | None
    class_weight: Tensor | None

    def rows(self, begin: int, end: int) -> Targets:
        """Those of rows [begin, end)."""
        hard, soft = (None if t is None else t[begin:end] for t in (self.hard, self.soft))
        return Targets(hard, soft, self.class_weight)


class RowStatistics(NamedTuple):
    """The statistics of each row's logits that the loss needs, each (N,).

    Args:
        top: the largest z.
        total: sum of exp(z - top).
        picked: sum of w q z; z of the target where that is hard.
        summed: sum of w z; not updated without label smoothing.
    """

    top: Tensor
    total: Tensor
    picked: Tensor
    summed: Tensor

    @staticmethod
    def none(count: int, dtype: torch.dtype, device: torch.device) -> RowStatistics:
        """Those of rows of which no column was seen."""
        top, *zeros = torch.zeros(4, count, dtype=dtype, device=device).unbind()
        return RowStatistics(top.fill_(-torch.inf), *zeros)

    @staticmethod
    def unwritten(count: int, dtype: torch.dtype, device: torch.device) -> RowStatistics:
        """Memory for those of rows that will be written at once."""
        return RowStatistics(*torch.empty(4, count, dtype=dtype, device=device).unbind())

    def forget(self) -> RowStatistics:
        """Itself, as of rows of which no column was seen."""
        self.top.fill_(-torch.inf)
        for zeros in (self.total, self.picked, self.summed):
            zeros.zero_()
        return self

    def rows(self, begin: int, end: int) -> RowStatistics:
        """Views of those of rows [begin, end)."""
        return RowStatistics(*[t[begin:end] for t in self])

    def log_normaliser(self) -> Tensor:
        """L, (N,)."""
        return self.top + self.total.log()


class GradientFactors(NamedTuple):
    """The numbers of the gradient (on_softmax + on_square L) p - on_target w q - on_all w of each row, each (N,)."""

    on_softmax: Tensor
    on_square: Tensor
    on_target: Tensor
    on_all: Tensor

    def rows(self, begin: int, end: int) -> GradientFactors:
        """Views of those of rows [begin, end)."""
        return GradientFactors(*[t[begin:end] for t in self])


class RowLoss:
    """The loss of N rows as a function of their statistics, and the factors of its gradient.

    Args:
        options: which cross entropy.
        target: (N,) int64 class indices, or (N, V) floating point distributions.
        classes: V.
        dtype: of the computation, float32 or float64.
        kernels: whether what rows count for is found by a Triton kernel.

    Raises:
        ValueError: shapes that do not fit together, or soft targets with an index to ignore.
        IndexError: a hard target that is no class and not ignored, as in torch; on a GPU torch's device assertion.
    """

    def __init__(
        self, options: CrossEntropy, target: Tensor, classes: int, dtype: torch.dtype, kernels: bool = False
    ) -> None:
        self.options, self.dtype = options, dtype
        weight = options.class_weight
        if weight is not None and weight.shape != (classes,):
            raise ValueError(f"class_weight must have the shape ({classes},); got {tuple(weight.shape)}")
        weight = None if weight is None else weight.detach().to(dtype).contiguous()
        self.weight_sum = float(classes) if weight is None else weight.sum()
        smoothing, count = options.label_smoothing, target.shape[0]
        self.mass: Tensor | float = 1.0
        self._hard: ClassTargets | None = None
        if target.dim() == 1:
            mean = options.reduction == "mean"
            hard = hard_rows(target, weight, classes, options.ignore_index, mean, dtype, kernels)
            self._hard, self.targets = hard, Targets(hard.target, None, weight)
            self.on_target, self._totals = hard.weight, hard.totals
        else:
            if target.shape[1:] != (classes,) or not target.is_floating_point():
                raise ValueError(
                    f"soft targets are floating point of the shape ({count}, {classes}); "
                    f"got {target.dtype} of {tuple(target.shape)}"
                )
            if options.ignore_index >= 0:
                raise ValueError(f"soft targets have no index to ignore; got ignore_index={options.ignore_index}")
            soft = target.detach()
            self.targets = Targets(None, soft, weight)
            self.mass = _weighed_sum(soft, weight, dtype)
            self.on_target = torch.ones_like(self.mass)
            self._totals = self.mass.new_full((2,), count)
        if self.is_smoothed:
            self.on_target = (1 - smoothing) * self.on_target
        self.on_all = smoothing / classes

    @property
    def is_smoothed(self) -> bool:
        """Return whether labels are smoothed, so that every class has a share in the target."""
        return self.options.label_smoothing > 0

    @property
    def is_penalised(self) -> bool:
        """Return whether the loss has a z-loss, a penalty on the log-sum-exp."""
        return self.options.z_loss != 0

    @property
    def _is_bare(self) -> bool:
        """Return whether the loss is the cross entropy with the targets and nothing else."""
        return not self.is_smoothed and not self.is_penalised

    @cached_property
    def valid(self) -> Tensor | None:
        """The mask of rows that are not ignored, (N,); None for soft targets, which all count."""
        return None if self._hard is None else self._hard.target >= 0

    def _of_valid(self, rows: Tensor) -> Tensor:
        """Zero for ignored rows: zero times what is infinite would be no zero."""
        return rows if self.valid is None else torch.where(self.valid, rows, 0.0)

    def loss(self, statistics: RowStatistics) -> Tensor:
        """The loss of rows with these statistics: (N,) where nothing is reduced, otherwise 0-d."""
        if self._hard is not None:
            self._hard.refuse_strangers()
            if self._hard.strangers is not None and self._is_bare and self.options.reduction != "none":
                mean = self.options.reduction == "mean"
                return hard_loss_by_kernel(self._hard, statistics.top, statistics.total, statistics.picked, mean)
        log_total, picked = statistics.total.log(), statistics.picked
        # The largest logit goes first: of a row that is sure of its target little is left.
        if self.targets.soft is None:
            rows = self.on_target * (log_total - (picked - statistics.top))
        else:
            rows = self.on_target * (self.mass * log_total - (picked - self.mass * statistics.top))
        if self.is_smoothed:
            rows = rows + self.on_all * (self.weight_sum * (statistics.top + log_total) - statistics.summed)
        parts = [self._of_valid(rows)]
        if self.is_penalised:
            parts.append(self._of_valid(self.options.z_loss * (statistics.top + log_total).square()))
        if self.options.reduction == "none":
            return sum(parts[1:], parts[0])
        sums = [part.sum() for part in parts]
        if self.options.reduction == "mean":
            sums = [part / count for part, count in zip(sums, self._totals.unbind(), strict=False)]
        return sum(sums[1:], sums[0])

    def gradient_factors(self, upstream: Tensor | None) -> GradientFactors:
        """The factors of the gradient of the loss, times `upstream`: (N,) where nothing is reduced, otherwise 0-d.

        Where the options make no use of a factor, something else stands in its place.
        """
        if self._hard is not None and upstream is None and self._is_bare:
            return GradientFactors(*[self._hard.share] * 4)
        count = 2 if self.is_penalised else 1
        mean = self.options.reduction == "mean"
        scales = [1 / d if mean else torch.ones_like(d) for d in self._totals.unbind()[:count]]
        if upstream is not None:
            scales = [scale * upstream.to(self.dtype) for scale in scales]
        # Where all rows are ignored the mean is 0 / 0, and the gradient still zero.
        on_entropy = self._of_valid(scales[0].expand_as(self.on_target))
        on_target = on_entropy * self.on_target
        on_softmax = on_all = on_square = on_target
        if self.valid is None:
            on_softmax = on_target * self.mass
        if self.is_smoothed:
            on_all = on_entropy * self.on_all
            on_softmax = on_softmax + on_all * self.weight_sum
        if self.is_penalised:
            on_square = 2 * self.options.z_loss * self._of_valid(scales[1].expand_as(self.on_target))
        return GradientFactors(on_softmax, on_square, on_target, on_all)


def _weighed_sum(soft: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum_k w_k q_k, (N,), a few rows at a time so that no copy of the targets is made in another dtype."""
    if weight is None:
        return soft.sum(1, dtype=dtype)
    step = max(1, 2**22 // max(1, soft.shape[1]))
    parts = [part.to(dtype) @ weight for part in soft.split(step)]
    return torch.cat(parts) if parts else soft.new_zeros(0, dtype=dtype)
