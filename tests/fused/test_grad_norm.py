"""The sum of squares over many tensors: one kernel against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from programs import Lowering, each_kernel_lowering
from torch import Tensor

from subtensors.kernels.fused import grad_norm
from subtensors.kernels.fused.grad_norm import GradNormGrid, reference
from subtensors.kernels.runtime.graph_lifetime import to_device

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHUNK = grad_norm.BLOCK * grad_norm.ROUNDS


def total_of(tensors: list[Tensor], device: str) -> float:
    moved = [t.to(device) for t in tensors]
    total = torch.full((), math.nan, dtype=torch.float64, device=device)
    sweep = GradNormGrid([t.numel() for t in moved], [t.dtype for t in moved], total.device, total)
    table = to_device(sweep.rows([[t.data_ptr() for t in moved]]), total.device)
    for _ in range(2):  # the second launch needs the counter that the first one reset
        sweep.launch(table.data_ptr(), 0, 0, [], 0, 0)
    return total.item()


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Every other tensor is misaligned, as a slice may be.
    return torch.randn(count + 1, generator=generator, dtype=torch.float64).to(dtype)[seed % 2 :][:count]


@each_kernel_lowering
@pytest.mark.parametrize("dtypes", [*[[dtype] for dtype in DTYPES], DTYPES], ids=str)
def test_the_kernel_adds_up_all_elements(dtypes: list[torch.dtype], lowering: Lowering) -> None:
    sizes = [1, 0, 77, 2048, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 64]
    tensors = [numbers(n, dtypes[i % len(dtypes)], i) for i, n in enumerate(sizes)]
    # In float64 only the order of additions differs.
    assert total_of(tensors, lowering.device) == pytest.approx(reference(tensors).item(), rel=1e-14)


@each_kernel_lowering
@given(sizes=some.lists(some.integers(0, 3000), min_size=1, max_size=5))
def test_tensors_of_any_sizes_are_summed(sizes: list[int], lowering: Lowering) -> None:
    tensors = [numbers(n, torch.float32, i) for i, n in enumerate(sizes)]
    assert total_of(tensors, lowering.device) == pytest.approx(reference(tensors).item(), rel=1e-14)


@each_kernel_lowering
def test_the_kernel_reads_nothing_beyond_a_tensor(lowering: Lowering) -> None:
    around = torch.full((6000,), math.nan)
    around[100:5100] = 2.0
    assert total_of([around[100:5100]], lowering.device) == 20000.0


@each_kernel_lowering
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inf_and_nan_reach_the_sum(value: float, lowering: Lowering) -> None:
    x = torch.ones(300)
    x[170] = value
    assert not math.isfinite(total_of([torch.ones(5), x], lowering.device))


@each_kernel_lowering
def test_squares_beyond_float32_do_not_overflow(lowering: Lowering) -> None:
    assert total_of([torch.full((4,), 1e30)], lowering.device) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.gpu
def test_more_chunks_than_programs_are_right_and_deterministic() -> None:
    x = torch.randn(300_000_007, device="cuda")
    first = total_of([x, x[5:1000]], "cuda")
    assert first == pytest.approx(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2, rel=1e-5)
    assert total_of([x, x[5:1000]], "cuda") == first
