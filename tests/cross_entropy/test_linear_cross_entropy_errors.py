"""Linear + cross entropy raises errors for invalid arguments, with their values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cross_entropy_cases import example
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(12, 4)}, r"hidden is \(N, H\) and weight \(V, H\); got \(12, 4\) and \(23, 5\)"),
        ({"target": torch.zeros(11, dtype=torch.int64)}, r"target is \(12,\) or \(12, V\); got \(11,\)"),
        ({"target": torch.ones(12, 22)}, r"floating point of the shape \(12, 23\); got torch.float32 of \(12, 22\)"),
        ({"bias": torch.ones(22)}, r"bias must have the shape \(23,\); got \(22,\)"),
        ({"bias": torch.ones(23, dtype=torch.float64)}, "one floating-point dtype; got"),
    ],
)
def test_mismatched_arguments_are_refused_with_their_values(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(example(), **change).ours()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rows": 0}, "rows must be at least 1; got 0"),
        ({"rows": 3, "columns": 3}, "not both; got rows=3, columns=3"),
        ({"accumulate": "quick"}, "accumulate must be 'exact' or 'fast'; got 'quick'"),
    ],
)
def test_invalid_schedules_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example().ours(**keywords)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of mean, sum, none; got 'average'"),
        ({"softcap": 0.0}, r"softcap must be positive; got 0\.0"),
        ({"temperature": -1.0}, r"temperature must be positive; got -1\.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossEntropy(**options)


def test_class_weights_of_another_size_and_an_index_to_ignore_in_soft_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"class_weight must have the shape \(23,\); got \(22,\)"):
        example(class_weight=torch.ones(22)).ours()
    soft = replace(example(ignore_index=3), target=torch.ones(12, 23))
    with pytest.raises(ValueError, match="soft targets have no index to ignore; got ignore_index=3"):
        soft.ours()
