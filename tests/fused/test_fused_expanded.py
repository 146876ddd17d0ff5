"""Rows and columns that are expanded to matrices are read in place, without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from kernels_on_cpu import kernels_on_cpu
from programs import Lowering, each_kernel_lowering
from torch import Tensor

import subtensors as st

# Several matrices a tile, several tiles a row, tiles that start within rows and matrices.
SHAPES = [(3, 5), (65, 33), (2, 3, 4), (700, 3), (3, 700), (5, 40, 30), (1, 5), (5, 1), (2, 2, 2, 300), (1, 1), (0, 3)]


@st.fused
def factored(x: Tensor, row: Tensor, column: Tensor, *, scale: float) -> Any:
    x.mul_(scale).add_(row * column)
    return (x * row).sum(), row - column


def lists(shapes: list[tuple[int, ...]], device: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-8, 8, shape, generator=generator).float().to(device)

    return (
        [random(s) for s in shapes],
        [random((*s[:-1], 1)).expand(s) for s in shapes],
        [random((*s[:-2], 1, s[-1])).expand(s) for s in shapes],
    )


def check(shapes: list[tuple[int, ...]], device: str) -> None:
    x, row, column = lists(shapes, device)
    expected = [t.clone() for t in x]
    returned = [factored(*args, scale=0.5) for args in zip(expected, row, column, strict=True)]
    with kernels_on_cpu():
        total, difference = factored(st.TensorList(x), st.TensorList(row), st.TensorList(column), scale=0.5)
    # Small multiples of a half: every sum is exact.
    for i, (t, d) in enumerate(returned):
        assert torch.equal(x[i], expected[i])
        assert torch.equal(total[i], t)
        assert torch.equal(difference[i], d)
        assert difference[i].is_contiguous()


def test_math_with_expanded_rows_and_columns_equals_torch(device: str) -> None:
    check(SHAPES, device)


@given(some.lists(some.tuples(some.integers(1, 40), some.integers(1, 40)), min_size=1, max_size=4))
def test_matrices_of_any_shape_equal_torch(shapes: list[tuple[int, ...]]) -> None:
    check(shapes, "cpu")


@each_kernel_lowering
def test_one_group_takes_matrices_of_many_shapes_and_copies_none(lowering: Lowering) -> None:
    x, row, column = map(st.TensorList, lists([(3, 5), (65, 33), (2, 3, 4)], lowering.device))
    with lowering.running():
        text = st.explain(factored, x, row, column, scale=0.5)
    assert "3 tensors" in text
    assert "copied" not in text


def test_matrices_that_are_not_contiguous_are_copied_and_right(device: str) -> None:
    x, row, column = lists([(4, 6)], device)
    x = [x[0].mT.contiguous().mT]
    expected = x[0].clone()
    factored(expected, row[0], column[0], scale=0.5)
    with kernels_on_cpu():
        factored(st.TensorList(x), st.TensorList(row), st.TensorList(column), scale=0.5)
    assert torch.equal(x[0], expected)


def test_writing_to_an_expanded_tensor_is_refused_as_torch_does(device: str) -> None:
    @st.fused
    def spoil(x: Tensor, row: Tensor) -> None:
        row.add_(x)

    x, row, _ = lists([(4, 6)], device)
    with kernels_on_cpu(), pytest.raises(RuntimeError, match="single memory location"):
        spoil(st.TensorList(x), st.TensorList(row))
