"""Cross entropy with all its options, as a few numbers a row of the logits.

With L, p, z as in `softmax_gradient_kernel.py`, V classes, label smoothing e and class weights w (1 where not given),
the loss of a row is

    t (m L - sum_k w_k q_k z_k) + s (M L - sum_k w_k z_k) + r L^2

    class target y:        q_k = [k = y],  t = (1 - e) w_y,  m = 1, and w_k q_k is written [k = y] from here on
    soft target q:                         t = 1 - e,        m = sum_k w_k q_k
    both:                  s = e / V,  M = sum_k w_k,  r = z_loss;   an ignored row has t = s = r = 0

and its gradient (t m + s M + 2 r L) p_k - t w_k q_k - s w_k. Everything here is a vector of N rows; only the kernels
read tensors as large as the logits. The options mean what they mean in `torch.nn.functional.cross_entropy`.
For class targets one kernel computes the weights of the rows, where torch would launch a dozen: here the GPU waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.kernels.runtime.launcher import cached_launcher

REDUCTIONS = ("mean", "sum", "none")

BLOCK, WARPS = 8192, 32
"""The fastest block of rows on an H200, for 16384 rows."""

MAX_KERNEL_ROWS = 2**16
"""The most rows that one program loops over; with more, the logits take far longer than the host does."""


@dataclass(frozen=True)
class CrossEntropy:
    """The options of a cross entropy: those of torch's own, and three that language models add.

    Args:
        ignore_index: rows with this class target do not count.
        class_weight: (V,), floating point; one weight per class.
        label_smoothing: in [0, 1]; the share of the uniform distribution in the target.
        z_loss: the factor of L^2, L the log-sum-exp of a row. Its mean is over rows that are not ignored, even where
            class weights make the mean of the cross entropy a weighted one.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        temperature: logits are divided by it, after the softcap.
        reduction: "mean" over all valid targets, "sum", or "none" for one loss per row.

    Raises:
        ValueError: an option outside its range.

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


class RowStatistics(NamedTuple):
    """The statistics of each row's logits that the loss needs, each (N,).

    Args:
        row_max: the largest z.
        sum_exp: sum of exp(z - row_max).
        target_logit: sum of w q z; z of the target for class targets.
        logit_sum: sum of w z; not updated without label smoothing.
    """

    row_max: Tensor
    sum_exp: Tensor
    target_logit: Tensor
    logit_sum: Tensor

    @staticmethod
    def uninitialized(count: int, dtype: torch.dtype, device: torch.device) -> RowStatistics:
        """Return memory for the statistics of rows that a kernel writes in one go."""
        return RowStatistics(*torch.empty(4, count, dtype=dtype, device=device).unbind())

    def log_sum_exp(self) -> Tensor:
        """L, (N,)."""
        return self.row_max + self.sum_exp.log()


class GradientFactors(NamedTuple):
    """The factors of the gradient, each (N,): (grad_softmax + grad_z_loss L) p - grad_target w q - grad_smoothing w."""

    grad_softmax: Tensor
    grad_z_loss: Tensor
    grad_target: Tensor
    grad_smoothing: Tensor


class ClassTargets(NamedTuple):
    """The class targets, weights and loss shares of all rows.

    A row whose target y is a class and not ignored has the weight w_y (1 without class weights), any other row 0. A
    row's share is its weight divided by the sum of all weights, or its weight where the losses are summed.

    Args:
        class_indices: (N,) int64, -1 for an ignored row.
        weight: (N,), of each row.
        share: (N,), of each row in the loss.
        totals: (2,), the sum of the weights, and the number of rows that are not ignored.
        has_invalid: (1,) int64, 1 if a target is no class and no error was raised for it yet; None: all are classes.
    """

    class_indices: Tensor
    weight: Tensor
    share: Tensor
    totals: Tensor
    has_invalid: Tensor | None = None

    def check_class_indices(self) -> None:
        """Raise torch's own error for a target that is no class: on a GPU the device assertion of an invalid gather."""
        if self.has_invalid is not None:
            self.totals[:1].gather(0, self.has_invalid)


class RowLoss:
    """The loss of N rows as a function of their statistics, and the factors of its gradient.

    Args:
        options: the options of the cross entropy.
        target: (N,) int64 class indices, or (N, V) floating point distributions.
        classes: V.
        dtype: of the computation, float32 or float64.
        kernels: whether a Triton kernel computes the weights of the rows.

    Raises:
        ValueError: shapes that do not fit together, or soft targets with an index to ignore.
        IndexError: a class target that is no class and not ignored, as in torch; on a GPU torch's device assertion.
    """

    def __init__(
        self, options: CrossEntropy, target: Tensor, classes: int, dtype: torch.dtype, kernels: bool = False
    ) -> None:
        self.options, self.dtype = options, dtype
        weight = options.class_weight
        if weight is not None and weight.shape != (classes,):
            raise ValueError(f"class_weight must have the shape ({classes},); got {tuple(weight.shape)}")
        weight = None if weight is None else weight.detach().to(dtype).contiguous()
        self.class_weight = weight
        """(V,), in the dtype of the computation, or None."""
        self.class_targets: ClassTargets | None = None
        """None for soft targets."""
        self.soft: Tensor | None = None
        """(N, V), a distribution a row; None for class targets."""
        self.weight_sum = float(classes) if weight is None else weight.sum()
        smoothing, count = options.label_smoothing, target.shape[0]
        self.rows = count
        self.target_mass: Tensor | float = 1.0
        if target.dim() == 1:
            mean = options.reduction == "mean"
            rows = class_target_rows(target, weight, classes, options.ignore_index, mean, dtype, kernels)
            self.class_targets, self.target_scale, self._totals = rows, rows.weight, rows.totals
        else:
            if target.shape[1:] != (classes,) or not target.is_floating_point():
                raise ValueError(
                    f"soft targets are floating point of the shape ({count}, {classes}); "
                    f"got {target.dtype} of {tuple(target.shape)}"
                )
            if options.ignore_index >= 0:
                raise ValueError(f"soft targets have no index to ignore; got ignore_index={options.ignore_index}")
            self.soft = target.detach()
            self.target_mass = _weighted_sum(self.soft, weight, dtype)
            self.target_scale = torch.ones_like(self.target_mass)
            self._totals = self.target_mass.new_full((2,), count)
        if self.has_smoothing:
            self.target_scale = (1 - smoothing) * self.target_scale
        self.smoothing_scale = smoothing / classes

    @property
    def has_smoothing(self) -> bool:
        """Return whether labels are smoothed, so that every class has a share in the target."""
        return self.options.label_smoothing > 0

    @property
    def has_z_loss(self) -> bool:
        """Return whether the loss has a z-loss, a penalty on the log-sum-exp."""
        return self.options.z_loss != 0

    @property
    def _is_plain(self) -> bool:
        """Return whether the loss is the cross entropy with the targets and nothing else."""
        return not self.has_smoothing and not self.has_z_loss

    @cached_property
    def valid(self) -> Tensor | None:
        """The mask of rows that are not ignored, (N,); None for soft targets, which all count."""
        return None if self.class_targets is None else self.class_targets.class_indices >= 0

    def _zero_ignored(self, rows: Tensor) -> Tensor:
        """Return the values of rows with 0 for ignored rows, even where those are infinite."""
        return rows if self.valid is None else torch.where(self.valid, rows, 0.0)

    def loss(self, statistics: RowStatistics) -> Tensor:
        """Return the loss of rows with these statistics: (N,) where nothing is reduced, otherwise 0-d."""
        class_targets = self.class_targets
        if class_targets is not None:
            class_targets.check_class_indices()
            if class_targets.has_invalid is not None and self._is_plain and self.options.reduction != "none":
                mean = self.options.reduction == "mean"
                return class_target_loss_by_kernel(class_targets, *statistics[:3], mean)
        log_sum, target_logit = statistics.sum_exp.log(), statistics.target_logit
        # Subtract the largest logit first: for a confident row the difference is small, and keeps its bits.
        if self.soft is None:
            rows = self.target_scale * (log_sum - (target_logit - statistics.row_max))
        else:
            mass = self.target_mass
            rows = self.target_scale * (mass * log_sum - (target_logit - mass * statistics.row_max))
        if self.has_smoothing:
            log_sum_exp = statistics.row_max + log_sum
            rows = rows + self.smoothing_scale * (self.weight_sum * log_sum_exp - statistics.logit_sum)
        parts = [self._zero_ignored(rows)]
        if self.has_z_loss:
            parts.append(self._zero_ignored(self.options.z_loss * (statistics.row_max + log_sum).square()))
        if self.options.reduction == "none":
            return sum(parts[1:], parts[0])
        sums = [part.sum() for part in parts]
        if self.options.reduction == "mean":
            sums = [part / count for part, count in zip(sums, self._totals.unbind(), strict=False)]
        return sum(sums[1:], sums[0])

    def gradient_factors(self, upstream: Tensor | None) -> GradientFactors:
        """Return the factors of the gradient of the loss, times `upstream`: (N,) for reduction "none", otherwise 0-d.

        A factor that the options have no use for is another one's tensor, which is not read.
        """
        if self.class_targets is not None and upstream is None and self._is_plain:
            return GradientFactors(*[self.class_targets.share] * 4)
        count = 2 if self.has_z_loss else 1
        mean = self.options.reduction == "mean"
        scales = [1 / d if mean else torch.ones_like(d) for d in self._totals.unbind()[:count]]
        if upstream is not None:
            scales = [scale * upstream.to(self.dtype) for scale in scales]
        # Where all rows are ignored the mean is 0 / 0, and the gradient still zero.
        grad_loss = self._zero_ignored(scales[0].expand_as(self.target_scale))
        grad_target = grad_loss * self.target_scale
        grad_softmax = grad_smoothing = grad_z_loss = grad_target
        if self.valid is None:
            grad_softmax = grad_target * self.target_mass
        if self.has_smoothing:
            grad_smoothing = grad_loss * self.smoothing_scale
            grad_softmax = grad_softmax + grad_smoothing * self.weight_sum
        if self.has_z_loss:
            grad_z_loss = 2 * self.options.z_loss * self._zero_ignored(scales[1].expand_as(self.target_scale))
        return GradientFactors(grad_softmax, grad_z_loss, grad_target, grad_smoothing)


def _weighted_sum(soft: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return sum_k w_k q_k, (N,), a few rows at a time so that no copy of the targets is made in another dtype."""
    if weight is None:
        return soft.sum(1, dtype=dtype)
    step = max(1, 2**22 // max(1, soft.shape[1]))
    parts = [part.to(dtype) @ weight for part in soft.split(step)]
    return torch.cat(parts) if parts else soft.new_zeros(0, dtype=dtype)


def class_target_rows(
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    kernels: bool = False,
) -> ClassTargets:
    """Return the targets, weights and loss shares of all rows.

    Args:
        target: (N,) int64.
        class_weight: (V,), in `dtype`, or None.
        classes: V.
        ignore_index: rows with this target do not count.
        mean: whether the losses are averaged rather than added.
        dtype: of the computation.
        kernels: whether to use a Triton kernel, which ignores invalid targets until `check_class_indices`.

    Raises:
        IndexError: on a CPU, a target that is no class and not ignored; on a GPU torch's device assertion.

    Example:
        >>> class_target_rows(torch.tensor([1, -100, 0]), None, 2, -100, True, torch.float32).share
        tensor([0.5000, 0.0000, 0.5000])
    """
    if kernels and dtype == torch.float32 and target.dtype == torch.int64 and 0 < target.shape[0] <= MAX_KERNEL_ROWS:
        return class_target_rows_by_kernel(target, class_weight, classes, ignore_index, mean)
    valid = target != ignore_index
    # The weight of each row, 0 for an ignored one; torch raises its own error for an invalid target.
    if target.is_cuda:  # nll_loss would make the expanded tensor contiguous on a GPU; gather has the same assertion
        ones = torch.ones(1, dtype=dtype, device=target.device).expand(classes)
        table = ones if class_weight is None else class_weight
        weight = torch.where(valid, table.gather(0, torch.where(valid, target, 0).long()), 0.0)
    else:
        minus_one = torch.full((1, 1), -1.0, dtype=dtype, device=target.device).expand(target.shape[0], classes)
        weight = F.nll_loss(minus_one, target, class_weight, reduction="none", ignore_index=ignore_index)
    total = weight.sum()
    share = torch.where(valid, weight * (1 / total), 0.0) if mean else weight
    count = total if class_weight is None else valid.sum().to(dtype)
    return ClassTargets(torch.where(valid, target, -1).long(), weight, share, torch.stack([total, count]))


def class_target_rows_by_kernel(
    target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int, mean: bool
) -> ClassTargets:
    """`class_target_rows` in float32 by the kernel."""
    count = target.shape[0]
    indices = torch.empty(count + 1, dtype=torch.int64, device=target.device)
    numbers = torch.empty(2 * count + 2, dtype=torch.float32, device=target.device)
    weights, shares, totals = numbers.split_with_sizes((count, count, 2))
    cached_launcher("cross_entropy.class_targets_kernel", "class_target_rows_kernel")(
        1,
        (target, target if class_weight is None else class_weight, indices, weights, shares, totals),
        *(target.stride(0), count, classes, ignore_index),
        HAS_CLASS_WEIGHT=class_weight is not None,
        MEAN=mean,
        **_launch_options(count),
    )
    return ClassTargets(indices[:count], weights, shares, totals, indices[count:])


def class_target_loss_by_kernel(
    rows: ClassTargets, row_max: Tensor, sum_exp: Tensor, target_logit: Tensor, mean: bool
) -> Tensor:
    """Return the sum or mean of the losses of all rows (float32, 0-d), given their `RowStatistics`."""
    count, loss = rows.class_indices.shape[0], torch.empty((), dtype=torch.float32, device=row_max.device)
    tensors = (rows.class_indices, rows.weight, rows.totals, row_max, sum_exp, target_logit, loss)
    launch = cached_launcher("cross_entropy.class_targets_kernel", "class_target_loss_kernel")
    launch(1, tensors, count, MEAN=mean, **_launch_options(count))
    return loss


def _launch_options(count: int) -> dict[str, int]:
    """Return the block size and the warps of the single program, fewer for few rows."""
    block = min(BLOCK, max(128, 1 << (count - 1).bit_length()))
    return {"BLOCK": block, "num_warps": max(4, WARPS * block // BLOCK)}
