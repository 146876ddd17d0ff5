"""Weights and losses of rows with class targets: the kernels agree with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering

from subtensors.kernels.cross_entropy import cross_entropy as module
from subtensors.kernels.cross_entropy.cross_entropy import (
    class_target_loss_by_kernel,
    class_target_rows,
    class_target_rows_by_kernel,
)


@pytest.fixture(autouse=True, scope="module")
def short_blocks() -> Any:
    """Make blocks so short that a program loops over several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 128)
        yield


@each_kernel_lowering
@given(
    rows=some.integers(1, 400),
    classes=some.integers(1, 50),
    ignored=some.sampled_from([-100, 0, 3]),
    share=some.sampled_from([0.0, 0.3, 1.0]),
    weighted=some.booleans(),
    mean=some.booleans(),
    strided=some.booleans(),
)
def test_the_kernel_weighs_rows_as_torch_does(
    lowering: Lowering, rows: int, classes: int, ignored: int, share: float, weighted: bool, mean: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < share] = ignored
    target = target.to(lowering.device)
    if strided:
        target = torch.stack([target, target], 1)[:, 0]
    weight = torch.rand(classes, generator=generator).to(lowering.device) if weighted else None
    with np.errstate(all="ignore"):  # the mean over no rows
        found = class_target_rows_by_kernel(target, weight, classes, ignored, mean)
    expected = class_target_rows(target, weight, classes, ignored, mean, torch.float32)
    assert torch.equal(found.class_indices, expected.class_indices)
    assert torch.equal(found.weight, expected.weight)
    for mine, theirs in ((found.share, expected.share), (found.totals, expected.totals)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, equal_nan=True)
    found.check_class_indices()


@each_kernel_lowering
def test_an_invalid_target_is_ignored_until_the_class_indices_are_checked(lowering: Lowering) -> None:
    target = torch.tensor([5, 0, -7, -100, 1], device=lowering.device)
    found = class_target_rows_by_kernel(target, None, 5, -100, True)
    assert found.class_indices.tolist() == [-1, 0, -1, -1, 1]
    assert found.share.tolist() == [0, 0.5, 0, 0, 0.5]
    assert found.has_invalid is not None
    assert found.has_invalid.tolist() == [1]
    if lowering.device == "cpu":  # on a GPU the assertion ends the process
        with pytest.raises(RuntimeError, match="out of bounds"):
            found.check_class_indices()


@each_kernel_lowering
@given(
    rows=some.integers(1, 400),
    share=some.sampled_from([0.0, 0.3]),
    weighted=some.booleans(),
    mean=some.booleans(),
    infinite=some.booleans(),
)
def test_the_loss_of_all_rows_is_that_of_torch(
    lowering: Lowering, rows: int, share: float, weighted: bool, mean: bool, infinite: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 7, generator=generator) * 10
    target = torch.randint(7, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < share] = -100
    if infinite:
        logits[target == -100] = torch.inf
    weight = torch.rand(7, generator=generator) if weighted else None
    target = target.to(lowering.device)
    weight = None if weight is None else weight.to(lowering.device)
    row_max = logits.amax(1)
    target_logit = logits.gather(1, target.cpu().clamp_min(0)[:, None])[:, 0]
    sum_exp = (logits - row_max[:, None]).exp().sum(1)
    with np.errstate(all="ignore"):  # the mean over no rows
        counts = class_target_rows_by_kernel(target, weight, 7, -100, mean)
        found = class_target_loss_by_kernel(
            counts, *[x.to(lowering.device) for x in (row_max, sum_exp, target_logit)], mean
        ).cpu()
    weights = counts.weight.cpu().double()
    count = weights.sum() if mean else 1
    valid = target.cpu() != -100
    wide = [x.double()[valid] for x in (sum_exp.log(), target_logit, row_max)]
    expected = (weights[valid] * (wide[0] - (wide[1] - wide[2]))).sum() / count
    # Each number is rounded, and so are the sums that it is in: half of `eps` each time.
    times = 3 + rows.bit_length()
    added = (weights[valid] * sum(x.abs() for x in wide)).sum() / count
    roundings = times * torch.finfo(torch.float32).eps / 2 * added
    assert (found - expected).abs() <= roundings or (found.isnan() and expected.isnan())
