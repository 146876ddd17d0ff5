"""Weight gradients summed over chunks are as exact as one product, for any number of chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering, each_lowering
from torch import Tensor

from subtensors.kernels.cross_entropy import compensated_sum
from subtensors.kernels.cross_entropy import linear_cross_entropy as kernel
from subtensors.kernels.cross_entropy.compensated_sum import (
    GradientSum,
    compensated_add,
    compensated_add_by_kernel,
)
from subtensors.kernels.cross_entropy.linear_cross_entropy import Problem, linear_cross_entropy

ROWS, WIDTH, CLASSES = 512, 24, 96


def relative(actual: Tensor, truth: Tensor) -> float:
    """The norm of the error over the norm of the truth."""
    return float((actual.double() - truth).norm() / truth.norm())


def problem(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(CLASSES, WIDTH, generator=generator) * WIDTH**-0.5
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device)


@pytest.mark.parametrize("chunks", [2, 7, 64, 512])
@pytest.mark.parametrize(
    ("by", "dtype"),
    [
        ("rows", torch.bfloat16),
        ("rows", torch.float16),
        ("rows", torch.float32),
        ("columns", torch.bfloat16),
        ("columns", torch.float16),
    ],
)
def test_the_exact_gradients_err_no_more_than_the_unchunked_ones(
    device: str, by: str, dtype: torch.dtype, chunks: int
) -> None:
    hidden, weight, target = problem(device, dtype)
    truth = linear_cross_entropy(hidden.double(), weight.double(), target)
    whole = linear_cross_entropy(hidden, weight, target)
    size = -(-(ROWS if by == "rows" else CLASSES) // chunks)
    chunked = linear_cross_entropy(
        hidden, weight, target, rows=size if by == "rows" else None, columns=size if by == "columns" else None
    )
    for name in ("hidden", "weight"):
        mine, theirs, true = (getattr(result, name) for result in (chunked, whole, truth))
        assert relative(mine, true) <= 1.2 * relative(theirs, true), name


def test_the_fast_weight_gradient_errs_more_with_every_chunk(device: str) -> None:
    hidden, weight, target = problem(device, torch.bfloat16)
    truth = linear_cross_entropy(hidden.double(), weight.double(), target).weight
    assert truth is not None
    errors = []
    for rows in (ROWS, 32, 1):
        gradient = linear_cross_entropy(hidden, weight, target, rows=rows, accumulate="fast").weight
        assert gradient is not None
        errors.append(relative(gradient, truth))
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] > 2 * errors[0]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 1), (41, 3), (1, 5), (200, 7)])
def test_products_that_cancel_leave_no_error(
    device: str, dtype: torch.dtype, shape: tuple[int, int], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compensated_sum, "FIRST_STRETCH", 16)  # so that stretches double a few times
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(4, shape[0], generator=generator).to(device, dtype) for _ in range(2))
    other = torch.randn(4, shape[1], generator=generator).to(device, dtype)
    result = torch.full(shape, torch.nan, dtype=dtype, device=device)
    factors = (64, 64, -64, -64)
    total = GradientSum(result.float() if wide else result, exact=not wide, kernels=False)
    total.add_product(small.t(), other)
    for factor in factors:
        total.add_product((factor * large).t(), other)
    result = total.take().to(dtype)
    assert result.dtype == dtype
    truth = small.double().t() @ other.double()
    at_most = 128 * (large.abs().double().t() @ other.abs().double())  # what was summed on the way
    slack = 8 * torch.finfo(torch.float32).eps * at_most + torch.finfo(dtype).eps * truth.abs()
    assert ((result - truth).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_buffer_takes_two_bytes_an_element(dtype: torch.dtype) -> None:
    result = torch.empty(100, 30, dtype=dtype)
    total = GradientSum(result, exact=True, kernels=False)
    assert total.buffer is not None
    assert total.buffer.nbytes == 2 * result.numel()


@pytest.mark.parametrize(("exact", "dtype"), [(False, torch.bfloat16), (False, torch.float32), (True, torch.float64)])
def test_a_wide_result_needs_no_buffer(exact: bool, dtype: torch.dtype) -> None:
    assert GradientSum(torch.empty(3, 3, dtype=dtype), exact, kernels=False).buffer is None


added = some.builds(
    lambda seed, scale: torch.randn(3, 700, generator=torch.Generator().manual_seed(seed)) * 2.0**scale,
    some.integers(0, 2**31),
    some.integers(-60, 60),
)


@each_kernel_lowering
@given(terms=added)
def test_the_kernel_adds_like_its_reference(lowering: Lowering, terms: Tensor) -> None:
    terms = terms.to(lowering.device)
    terms[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    sums: list[Tensor] = []
    with np.errstate(all="ignore"):
        for add in (compensated_add_by_kernel, compensated_add):
            total = torch.full((700,), torch.nan, device=lowering.device)
            lost = torch.full((700,), torch.nan, dtype=torch.bfloat16, device=lowering.device)
            for i in range(3):
                add(terms[i], total, lost, i == 0)
                sums.append(total.clone())
    for mine, reference in zip(sums[:3], sums[3:], strict=True):
        # The interpreter truncates to bfloat16, so what is kept may differ by one of its roundings.
        torch.testing.assert_close(mine, reference, rtol=2**-23, atol=0, equal_nan=True)


@each_lowering
def test_rounding_errors_of_float32_sums_are_kept(lowering: Lowering) -> None:
    add = compensated_add if lowering is Lowering.TORCH else compensated_add_by_kernel
    total = torch.full((3,), torch.nan, device=lowering.device)
    lost = torch.full((3,), torch.nan, dtype=torch.bfloat16, device=lowering.device)
    ones, tiny = torch.ones(3, device=lowering.device), torch.full((3,), 2.0**-26, device=lowering.device)
    tiny[1], tiny[2] = torch.inf, torch.nan
    with np.errstate(all="ignore"):
        for i in range(9):
            add(ones if i == 0 else tiny, total, lost, i == 0)
    assert total[0] == 1 + 8 * 2**-26  # each of the eight is below half a rounding of one
    assert total[1] == torch.inf
    assert total[2].isnan()


@pytest.mark.parametrize("count", [40, 400])
@pytest.mark.parametrize("rows", [5, 6, 12, 40])
def test_first_chunks_are_longer_within_the_same_memory_if_that_saves_chunks(
    rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "TILE", 4)
    hidden, weight, target = torch.randn(count, 96), torch.randn(320, 96), torch.randint(320, (count,))
    chunks: list[tuple[int, int]] = []
    logits_of = Problem.logits_of_rows

    def noted(operands: Any, memory: Tensor, begin: int, end: int) -> Any:
        chunks.append((begin, end))
        return logits_of(operands, memory, begin, end)

    monkeypatch.setattr(Problem, "logits_of_rows", noted)
    found = linear_cross_entropy(hidden, weight, target, rows=rows)
    assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == count
    assert len(chunks) < count / rows or rows == 40
    in_pieces = max((end for begin, end in chunks if end - begin > rows), default=0)
    for begin, end in chunks:
        rows_of_dx = end if end <= in_pieces else count
        assert (end - begin) * 320 + rows_of_dx * 96 <= rows * 320 + count * 96
    assert in_pieces * 96 <= rows * 320, "what is copied into dX is no larger than the logits, which are freed by then"
    whole = linear_cross_entropy(hidden.double(), weight.double(), target)
    for actual, expected in zip(found[:3], whole[:3], strict=True):
        torch.testing.assert_close(actual, expected, check_dtype=False)
