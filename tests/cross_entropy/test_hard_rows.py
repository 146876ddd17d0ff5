"""What rows with hard targets count for: the kernel finds what torch does, one launch for all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering

from subtensors.kernels.cross_entropy import class_targets as module
from subtensors.kernels.cross_entropy.class_targets import hard_loss_by_kernel, hard_rows, hard_rows_by_kernel


@pytest.fixture(autouse=True, scope="module")
def short_blocks() -> Any:
    """So short that a program goes through several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 128)
        yield


@each_kernel_lowering
@given(
    rows=some.integers(1, 400),
    classes=some.integers(1, 50),
    ignored=some.sampled_from([-100, 0, 3]),
    share=some.sampled_from([0.0, 0.3, 1.0]),
    weighed=some.booleans(),
    mean=some.booleans(),
    strided=some.booleans(),
)
def test_the_kernel_finds_what_torch_does(
    lowering: Lowering, rows: int, classes: int, ignored: int, share: float, weighed: bool, mean: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < share] = ignored
    target = target.to(lowering.device)
    if strided:
        target = torch.stack([target, target], 1)[:, 0]
    weight = torch.rand(classes, generator=generator).to(lowering.device) if weighed else None
    with np.errstate(all="ignore"):  # the mean over no rows
        found = hard_rows_by_kernel(target, weight, classes, ignored, mean)
    expected = hard_rows(target, weight, classes, ignored, mean, torch.float32)
    assert torch.equal(found.target, expected.target)
    assert torch.equal(found.weight, expected.weight)
    for mine, theirs in ((found.share, expected.share), (found.totals, expected.totals)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, equal_nan=True)
    found.refuse_strangers()


@each_kernel_lowering
def test_a_target_that_is_no_class_counts_for_nothing_until_torch_finds_it(lowering: Lowering) -> None:
    target = torch.tensor([5, 0, -7, -100, 1], device=lowering.device)
    found = hard_rows_by_kernel(target, None, 5, -100, True)
    assert found.target.tolist() == [-1, 0, -1, -1, 1]
    assert found.share.tolist() == [0, 0.5, 0, 0, 0.5]
    assert found.strangers is not None
    assert found.strangers.tolist() == [1]
    if lowering.device == "cpu":  # on a GPU the assertion ends the process
        with pytest.raises(RuntimeError, match="out of bounds"):
            found.refuse_strangers()


@each_kernel_lowering
@given(
    rows=some.integers(1, 400),
    share=some.sampled_from([0.0, 0.3]),
    weighed=some.booleans(),
    mean=some.booleans(),
    infinite=some.booleans(),
)
def test_the_loss_of_all_rows_is_torchs(
    lowering: Lowering, rows: int, share: float, weighed: bool, mean: bool, infinite: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 7, generator=generator) * 10
    target = torch.randint(7, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < share] = -100
    if infinite:
        logits[target == -100] = torch.inf
    weight = torch.rand(7, generator=generator) if weighed else None
    target = target.to(lowering.device)
    weight = None if weight is None else weight.to(lowering.device)
    top = logits.amax(1)
    picked = logits.gather(1, target.cpu().clamp_min(0)[:, None])[:, 0]
    total = (logits - top[:, None]).exp().sum(1)
    with np.errstate(all="ignore"):  # the mean over no rows
        counts = hard_rows_by_kernel(target, weight, 7, -100, mean)
        found = hard_loss_by_kernel(counts, *[x.to(lowering.device) for x in (top, total, picked)], mean).cpu()
    weights = counts.weight.cpu().double()
    count = weights.sum() if mean else 1
    valid = target.cpu() != -100
    wide = [x.double()[valid] for x in (total.log(), picked, top)]
    expected = (weights[valid] * (wide[0] - (wide[1] - wide[2]))).sum() / count
    # Each number is rounded, and so are the sums that it is in: half of `eps` each time.
    times = 3 + rows.bit_length()
    added = (weights[valid] * sum(x.abs() for x in wide)).sum() / count
    roundings = times * torch.finfo(torch.float32).eps / 2 * added
    assert (found - expected).abs() <= roundings or (found.isnan() and expected.isnan())
