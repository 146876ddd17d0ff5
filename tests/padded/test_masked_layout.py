"""How masked kernels walk a tensor: its mask, and the rows and columns that a layout makes of its dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from masked_checks import check_reduction
from masked_oracle import Padded, any_padded, mask_of, padded
from programs import Lowering

from subtensors.kernels.padded import masked_layout
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask


@given(any_padded([torch.float32]))
def test_the_mask_follows_its_definition(p: Padded) -> None:
    assert torch.equal(valid_mask(p.x.shape, p.extents, p.x.device).expand(p.x.shape), mask_of(p.x.shape, p.extents))


@given(any_padded([torch.float32]), some.data())
def test_a_layout_reaches_every_element_once_in_the_order_of_rows_and_columns(p: Padded, data: Any) -> None:
    dims = data.draw(some.lists(some.integers(0, p.x.dim() - 1), min_size=1, unique=True))
    x, layout = masked_layout.plan(p.x, dims, p.extents)
    (r1, r0), (c1, c0) = layout.rows, layout.columns
    walked = x.as_strided((r1, r0, c1, c0), (*layout.row_strides, *layout.column_strides))
    order = [d for d in range(x.dim()) if d not in dims] + sorted(dims)
    torch.testing.assert_close(walked.reshape(-1), p.x.permute(order).reshape(-1), rtol=0, atol=0, equal_nan=True)


def test_dimensions_that_are_apart_in_memory_are_copied_to_be_adjacent() -> None:
    p = padded((2, 3, 4, 3, 2), {1: 2, 4: 1})
    x, layout = masked_layout.plan(p.x, [0, 2, 4], p.extents)
    assert torch.equal(x.isnan(), p.x.isnan())
    assert x.stride() != p.x.stride()
    assert layout.row_shape == (3, 3)
    check_reduction(p, "sum", [0, 2, 4], Lowering.TORCH)
    check_reduction(padded((4, 2, 3), {2: 2}, order=(1, 2, 0)), "mean", [0, 2], Lowering.TORCH)


def test_views_with_gaps_or_repeats_are_copied() -> None:
    gaps = torch.arange(12.0).view(3, 4)[:, ::2]
    repeats = torch.arange(3.0)[:, None].expand(3, 2)
    for view in (gaps, repeats):
        x, _ = masked_layout.plan(view, [1], [])
        assert x.is_contiguous()
        assert torch.equal(x, view)


def test_sizes_for_a_wrong_number_of_rows_raise() -> None:
    with pytest.raises(ValueError, match=r"the sizes of dim 1 are one or one a row, \(\) or \(3,\); got \(2,\)"):
        masked_layout.plan(torch.zeros(3, 4), [1], [ValidLength(1, torch.tensor([1, 2]))])
