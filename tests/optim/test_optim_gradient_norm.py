"""The sum of the squares of many gradients: fused reductions against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_lowering
from torch import Tensor

from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused.launch import ROUNDS
from subtensors.optim.batches import Batch
from subtensors.optim.gradient_norm import WIDE, GradientNorm

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHUNK = WIDE.block * ROUNDS


def total_of(tensors: list[Tensor], lowering: Lowering) -> float:
    moved = TensorColumn([t.to(lowering.device) for t in tensors])
    batch = Batch(None, moved[0].device, False, moved, None, ())
    norm = GradientNorm()
    with lowering.running():
        for _ in range(2):  # the second launch needs the counters that the first one reset
            norm.take([(batch, moved)])
    return norm.sum_of_squares(batch.device).item()


def reference(tensors: list[Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors))


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Every other tensor is misaligned, as a slice may be.
    return torch.randn(count + 1, generator=generator, dtype=torch.float64).to(dtype)[seed % 2 :][:count]


@each_lowering
@pytest.mark.parametrize("dtypes", [*[[dtype] for dtype in DTYPES], DTYPES], ids=str)
def test_the_kernel_adds_up_all_elements(dtypes: list[torch.dtype], lowering: Lowering) -> None:
    sizes = [1, 0, 77, 2048, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 64]
    tensors = [numbers(n, dtypes[i % len(dtypes)], i) for i, n in enumerate(sizes)]
    # In float64 only the order of additions differs.
    assert total_of(tensors, lowering) == pytest.approx(reference(tensors), rel=1e-14)


@each_lowering
@given(sizes=some.lists(some.integers(0, 3000), min_size=1, max_size=5))
def test_tensors_of_any_sizes_are_summed(sizes: list[int], lowering: Lowering) -> None:
    tensors = [numbers(n, torch.float32, i) for i, n in enumerate(sizes)]
    assert total_of(tensors, lowering) == pytest.approx(reference(tensors), rel=1e-14)


@each_lowering
def test_the_kernel_reads_nothing_beyond_a_tensor(lowering: Lowering) -> None:
    around = torch.full((6000,), math.nan)
    around[100:5100] = 2.0
    assert total_of([around[100:5100]], lowering) == 20000.0


@each_lowering
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inf_and_nan_reach_the_sum(value: float, lowering: Lowering) -> None:
    x = torch.ones(300)
    x[170] = value
    assert not math.isfinite(total_of([torch.ones(5), x], lowering))


@each_lowering
def test_squares_beyond_float32_do_not_overflow(lowering: Lowering) -> None:
    assert total_of([torch.full((4,), 1e30)], lowering) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.gpu
def test_more_tiles_than_programs_are_right_and_deterministic() -> None:
    x = torch.randn(300_000_007, device="cuda")
    first = total_of([x, x[5:1000]], Lowering.CUDA)
    assert first == pytest.approx(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2, rel=1e-5)
    assert total_of([x, x[5:1000]], Lowering.CUDA) == first
