"""Row and column means of many matrices: the kernels against torch, matrix by matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering

from subtensors.kernels.fused.row_column_means import reference, row_column_means

SHAPES = [(1, 1), (3, 5), (65, 33), (1, 700), (700, 1), (33, 129), (200, 40)]


def check(shapes: list[tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]
    truth = reference([x.double() for x in matrices])
    plain, ours = reference(matrices), row_column_means(matrices)
    for exact, theirs, mine in zip(truth, plain, ours, strict=True):
        for e, t, m in zip(exact, theirs, mine, strict=True):
            assert (m.shape, m.dtype) == (t.shape, t.dtype)
            error, allowed = (m - e).abs().max(), 1.5 * (t - e).abs().max()
            # In float64 the truth is rounded too, once for each level of pairwise summation.
            roundings = 2 if dtype != torch.float64 else 2 * max(*t.shape, 8).bit_length() + 8
            assert error <= allowed + roundings * torch.finfo(m.dtype).eps * e.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@each_kernel_lowering
def test_the_kernels_give_the_means_of_many_matrices(dtype: torch.dtype, lowering: Lowering) -> None:
    check(SHAPES, dtype, lowering.device)


@each_kernel_lowering
@given(shapes=some.lists(some.tuples(some.integers(1, 150), some.integers(1, 150)), min_size=1, max_size=3))
def test_matrices_of_any_shapes_give_their_means(shapes: list[tuple[int, int]], lowering: Lowering) -> None:
    check(shapes, torch.float32, lowering.device)


@pytest.mark.gpu
def test_large_matrices_are_right_and_deterministic() -> None:
    x = torch.randn(100_000, 640, device="cuda")
    (rows,), (columns,) = row_column_means([x])
    torch.testing.assert_close(rows, x.square().mean(1, keepdim=True))
    torch.testing.assert_close(columns, x.square().mean(0, keepdim=True))
    again = row_column_means([x])
    assert torch.equal(again[0][0], rows)
    assert torch.equal(again[1][0], columns)
