"""Kernels on blocks of logits agree with their torch reference, also where logits are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chunked_programs import class_by_class
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor

from subtensors.kernels.cross_entropy import logits_block
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, RowLoss, RowStatistics
from subtensors.kernels.cross_entropy.linear_cross_entropy import LossPasses
from subtensors.kernels.cross_entropy.logits_block import Block, Tile, padded_rows

DEFAULTS = {name: getattr(logits_block, name) for name in ("WHOLE_ROWS", "LONG_ROWS", "STATISTICS", "GRADIENT")}


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Any:
    """Make tiles so small that a row has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_block, "WHOLE_ROWS", Tile(128, 4))
        patch.setattr(logits_block, "LONG_ROWS", Tile(256, 4))
        patch.setattr(logits_block, "MIN_LONG_COLUMNS", 500)
        patch.setattr(logits_block, "STATISTICS", Tile(128, 4, rows=4))
        patch.setattr(logits_block, "GRADIENT", Tile(128, 4))
        patch.setattr(logits_block, "PROGRAMS_BY_CLASS", (4, 8))
        yield


@some.composite
def logits(draw: Any) -> Tensor:
    """Rows of a few hundred logits, some of them not finite."""
    rows, columns = draw(some.integers(1, 9)), draw(some.integers(2, 700))
    generator = torch.Generator().manual_seed(draw(some.integers(0, 2**31)))
    values = torch.randn(rows, columns, generator=generator) * draw(some.sampled_from([1.0, 30.0]))
    for value in draw(some.lists(some.sampled_from([torch.inf, -torch.inf, torch.nan]), max_size=2)):
        values[draw(some.integers(0, rows - 1)), draw(some.integers(0, columns - 1))] = value
    if draw(some.booleans()):
        values[draw(some.integers(0, rows - 1))] = -torch.inf
    return values


@some.composite
def losses(draw: Any, rows: int, columns: int, device: str) -> tuple[CrossEntropy, Tensor]:
    generator = torch.Generator().manual_seed(draw(some.integers(0, 2**31)))
    if draw(some.booleans()):
        target = torch.rand(rows, columns, generator=generator)
    else:
        target = torch.randint(columns, (rows,), generator=generator)
        target[torch.rand(rows, generator=generator) < 0.2] = -100
    options = CrossEntropy(
        class_weight=torch.rand(columns, generator=generator).to(device) if draw(some.booleans()) else None,
        label_smoothing=draw(some.sampled_from([0.0, 0.1])),
        z_loss=draw(some.sampled_from([0.0, 0.1])),
        softcap=draw(some.sampled_from([None, 5.0])),
        temperature=draw(some.sampled_from([1.0, 0.5])),
        reduction="sum",
    )
    return options, target.to(device)


@dataclass(frozen=True)
class Truth:
    """Results for rows of logits in float64, and the size of the terms that each is a sum of.

    A result in float32 may err by `ROUNDINGS` roundings of those: as many as tanh, exp and a division leave on a term,
    and additions on a sum, where they don't all go one way. Where terms cancel, the result itself is far smaller.
    A softmax value below the smallest normal number may be zero, and what it is multiplied by with it.
    """

    log_sum_exp: Tensor
    target_logit: Tensor
    logit_sum: Tensor
    gradient: Tensor
    log_sum_exp_terms: Tensor
    target_logit_terms: Tensor
    logit_sum_terms: Tensor
    gradient_terms: Tensor
    softmax_factor: Tensor
    """The factor of the softmax in the gradient, (rows, 1)."""

    @staticmethod
    def of(values: Tensor, options: CrossEntropy, target: Tensor) -> Truth:
        wide = RowLoss(options, target, values.shape[1], torch.float64)
        passes, block = LossPasses(wide, values.device, kernels=False, complete=True), Block(values.double())
        statistics, z = passes.statistics, passes.sums._transformed(block.logits)[0]
        weight, targets = passes.sums._weights(block)
        if targets is None:
            assert wide.class_targets is not None
            indices = wide.class_targets.class_indices
            targets = (indices[:, None] == torch.arange(values.shape[1], device=values.device)) * 1.0
        size = z.abs().nan_to_num(0.0, 0.0)  # what is infinite is infinite, or counts for nothing
        factors = wide.gradient_factors(None)
        passes.fold_and_write_gradient(block, factors)
        log_sum_exp = statistics.log_sum_exp()
        softmax = (z - log_sum_exp[:, None]).exp()
        scale = 1 + statistics.row_max.abs() + (softmax * size).sum(1)
        grad_softmax = factors.grad_softmax[:, None].abs()
        if wide.has_z_loss:
            grad_softmax = grad_softmax + (factors.grad_z_loss * log_sum_exp)[:, None].abs()
        parts = grad_softmax * softmax * (1 + size + scale[:, None]) + factors.grad_target[:, None].abs() * targets
        parts = parts + factors.grad_smoothing[:, None].abs() * weight if wide.has_smoothing else parts
        return Truth(
            *(log_sum_exp, statistics.target_logit, statistics.logit_sum, block.logits, scale),
            *((targets * size).sum(1), (weight * size).sum(1), parts / options.temperature),
            grad_softmax / options.temperature,
        )


ROUNDINGS = 8


def assert_near(mine: Tensor, truth: Tensor, terms: Tensor, flushed: Tensor | float = 0.0) -> None:
    """The result errs by no more than roundings of its terms, and one of its own where it is stored in fewer bits.

    `flushed` is how many of the smallest normal number may be missing, beside one.
    """
    finite = truth.isfinite() & terms.isfinite()
    torch.testing.assert_close(mine[~finite].double(), truth[~finite], equal_nan=True)
    single, stored = torch.finfo(torch.float32), torch.finfo(mine.dtype)
    allowed = ROUNDINGS * single.eps * terms + stored.eps * (truth.abs() / 2 + stored.tiny)
    allowed = allowed + single.tiny * (1 + flushed)
    over = ((mine.double() - truth).abs() / allowed)[finite]
    assert not over.numel() or over.max() <= 1, f"{over.max()} times the error allowed"


def assert_near_truth(statistics: RowStatistics, gradient: Tensor, truth: Truth, has_smoothing: bool) -> None:
    assert_near(statistics.log_sum_exp(), truth.log_sum_exp, truth.log_sum_exp_terms)
    assert_near(statistics.target_logit, truth.target_logit, truth.target_logit_terms)
    if has_smoothing:
        assert_near(statistics.logit_sum, truth.logit_sum, truth.logit_sum_terms)
    assert_near(gradient, truth.gradient, truth.gradient_terms, truth.softmax_factor)


def within_poison(values: Tensor) -> Tensor:
    """The same values as a view into memory that is NaN on both sides of each row."""
    around = torch.full((values.shape[0], values.shape[1] + 7), torch.nan, device=values.device)
    around[:, 3:-4] = values
    return around[:, 3:-4]


@each_kernel_lowering
@given(data=some.data(), values=logits())
def test_statistics_and_gradient_of_complete_rows_take_one_launch(
    lowering: Lowering, data: Any, values: Tensor
) -> None:
    values = values.to(lowering.device)
    rows, columns = values.shape
    options, target = data.draw(losses(rows, columns, lowering.device))
    row_loss, truth = RowLoss(options, target, columns, torch.float32), Truth.of(values, options, target)
    factors = row_loss.gradient_factors(None)
    for kernels in (True, False):
        passes, block = LossPasses(row_loss, values.device, kernels, complete=True), Block(within_poison(values))
        with np.errstate(all="ignore"):
            passes.fold_and_write_gradient(block, factors)
        assert_near_truth(passes.statistics, block.logits, truth, row_loss.has_smoothing)
        around = block.logits.as_strided((rows, columns + 7), (columns + 7, 1), 0)
        assert around[:, :3].isnan().all()
        assert around[:, -4:].isnan().all()


@each_kernel_lowering
def test_large_logits_err_as_in_plain_torch_but_for_a_subnormal_softmax(
    lowering: Lowering,
) -> None:
    # The share of 6.8528 is 9.8e-39, which the GPU's power of two makes zero; its gradient would be a normal number.
    values = torch.tensor([[-7.5437, 50.6134, 6.8528, 14.0291], [4.5887, 70.7133, 47.2439, 72.2093]])
    values, target = values.to(lowering.device), torch.tensor([3, 1], device=lowering.device)
    options = CrossEntropy(reduction="sum", temperature=0.5)
    row_loss, truth = RowLoss(options, target, 4, torch.float32), Truth.of(values, options, target)
    leaf = values.clone().requires_grad_()
    F.cross_entropy(leaf / options.temperature, target, reduction="sum").backward()
    assert leaf.grad is not None
    plain_error = (leaf.grad - truth.gradient).abs()
    passes, block = LossPasses(row_loss, values.device, kernels=True, complete=True), Block(within_poison(values))
    passes.fold_and_write_gradient(block, row_loss.gradient_factors(None))
    assert_near_truth(passes.statistics, block.logits, truth, has_smoothing=False)
    one_rounding = torch.finfo(torch.float32).eps * truth.gradient.abs()
    lost = truth.softmax_factor * torch.finfo(torch.float32).tiny
    error = (block.logits - truth.gradient).abs()
    assert (error <= 1.5 * plain_error.amax(1, keepdim=True) + one_rounding + lost).all()


@each_kernel_lowering
@given(data=some.data(), values=logits(), cut=some.floats(0, 1), is_by_class=some.booleans())
def test_blocks_of_columns_are_folded_into_statistics_then_get_their_gradient(
    lowering: Lowering, data: Any, values: Tensor, cut: float, is_by_class: bool
) -> None:
    values = values.to(lowering.device)
    rows, columns = values.shape
    options, target = data.draw(losses(rows, columns, lowering.device))
    row_loss, truth = RowLoss(options, target, columns, torch.float32), Truth.of(values, options, target)
    factors = row_loss.gradient_factors(None)
    first = max(1, int(cut * columns))
    for kernels in (True, False):
        passes, whole = LossPasses(row_loss, values.device, kernels), within_poison(values)
        apart = torch.full_like(whole, torch.nan)
        if is_by_class:
            apart = whole = class_by_class(values)
        end = padded_rows(rows) if is_by_class else None
        blocks = [Block(whole[:, :first], 0, 0, end)] + [Block(whole[:, first:], 0, first, end)] * (first < columns)
        with np.errstate(all="ignore"):
            for block in reversed(blocks) if is_by_class else blocks:
                passes.sums.fold(block)
            passes.sums.complete()
            for block in blocks:
                into = apart[:, slice(*block.columns)]
                passes.sums.write_gradient(block, passes.factors(factors), into)
        assert_near_truth(passes.statistics, apart, truth, row_loss.has_smoothing)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [20011, 70001])
def test_long_rows_agree_on_a_gpu(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_block, "MIN_LONG_COLUMNS", 2**16)
    for name, tile in DEFAULTS.items():
        monkeypatch.setattr(logits_block, name, tile)
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(1000, columns, generator=generator, device="cuda").to(dtype)
    target = torch.randint(columns, (1000,), generator=generator, device="cuda")
    options = CrossEntropy(label_smoothing=0.1, z_loss=0.01)
    row_loss, truth = RowLoss(options, target, columns, torch.float32), Truth.of(values, options, target)
    for kernels in (True, False):
        passes, block = LossPasses(row_loss, values.device, kernels, complete=True), Block(values.clone())
        passes.fold_and_write_gradient(block, row_loss.gradient_factors(None))
        assert_near_truth(passes.statistics, block.logits, truth, has_smoothing=True)
