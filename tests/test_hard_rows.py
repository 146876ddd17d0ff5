"""What rows with hard targets count for: the kernel finds what torch does, one launch for all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering

from subtensors.kernels import hard_rows as module
from subtensors.kernels.hard_rows import hard_rows, hard_rows_by_kernel


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
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, equal_nan=True)


@each_kernel_lowering
def test_a_target_that_is_no_class_counts_for_nothing_until_torch_finds_it(lowering: Lowering) -> None:
    target = torch.tensor([5, 0, -7, -100, 1], device=lowering.device)
    found = hard_rows_by_kernel(target, None, 5, -100, True)
    assert found.target.tolist() == [-1, 0, -1, -1, 1]
    assert found.share.tolist() == [0, 0.5, 0, 0, 0.5]
