"""The sum of squares over all gradients of an optimizer, as a step that clips takes it, against torch in float64."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import flat
from programs import Lowering, each_kernel_lowering, each_lowering
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

import subtensors as st
from subtensors.kernels.fused.launch import ROUNDS, Grid, Tiling
from subtensors.kernels.runtime import graph_lifetime
from subtensors.optim import gradient_norm

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHUNK = Tiling().block * ROUNDS


def given_gradients(gradients: list[Tensor]) -> list[Parameter]:
    """A parameter of zeros for each gradient."""
    params = [Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    return params


def total_of(tensors: list[Tensor], lowering: Lowering, steps: int = 3) -> float:
    params = given_gradients([t.to(lowering.device) for t in tensors])
    optimizer = st.optim.SGD(params, lr=0.0, max_norm=1.0)
    with lowering.running():
        for _ in range(steps):  # the third repeats the launches of the second, and needs their counters at zero
            optimizer.step()
    return optimizer._updater.norm.sum_of_squares(params[0].device).item()


def reference(tensors: list[Tensor]) -> float:
    return math.fsum(t.double().square().sum().item() for t in tensors)


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Every other tensor is misaligned, as a slice may be.
    return torch.randn(count + 1, generator=generator, dtype=torch.float64).to(dtype)[seed % 2 :][:count]


@each_lowering
@pytest.mark.parametrize("dtypes", [*[[dtype] for dtype in DTYPES], DTYPES], ids=str)
def test_all_elements_are_added_up(dtypes: list[torch.dtype], lowering: Lowering) -> None:
    sizes = [1, 0, 77, 2048, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 64]
    tensors = [numbers(n, dtypes[i % len(dtypes)], i) for i, n in enumerate(sizes)]
    # In float64 only the order of additions differs.
    assert total_of(tensors, lowering) == pytest.approx(reference(tensors), rel=1e-14)


@each_kernel_lowering
@given(sizes=some.lists(some.integers(0, 3000), min_size=1, max_size=5))
def test_tensors_of_any_sizes_are_summed(sizes: list[int], lowering: Lowering) -> None:
    tensors = [numbers(n, torch.float32, i) for i, n in enumerate(sizes)]
    assert total_of(tensors, lowering, steps=1) == pytest.approx(reference(tensors), rel=1e-14)


@each_lowering
def test_gradients_of_any_layout_are_summed(lowering: Lowering) -> None:
    x = numbers(60, torch.float32, 0)
    tensors = [x.view(6, 10).t(), x[5], x.view(10, 6)[:, ::2], x[7:8].expand(3, 4), x.view(3, 4, 5).permute(2, 0, 1)]
    assert total_of(tensors, lowering) == pytest.approx(reference(tensors), rel=1e-14)


@each_lowering
def test_nothing_beyond_a_tensor_is_read(lowering: Lowering) -> None:
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
def test_a_large_gradient_is_summed_right_and_deterministically() -> None:
    x = torch.randn(300_000_007, device="cuda")
    first = total_of([x, x[5:1000]], Lowering.CUDA)
    norms = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in (x, x[5:1000])]
    assert first == pytest.approx(sum(norm**2 for norm in norms), rel=1e-12)
    assert total_of([x, x[5:1000]], Lowering.CUDA) == first


@pytest.mark.usefixtures("kernels")
def test_a_vector_of_another_size_at_the_same_address_is_read_whole(device: str) -> None:
    """A gradient that is freed with the parameter's old size may leave its memory to the next one."""
    memory = torch.ones(8, device=device)
    p = Parameter(torch.ones(6, device=device))
    optimizer, earlier = st.optim.SGD([p], lr=1.0, max_norm=1.0), []
    for size in (6, 3, 3, 8, 8, 6, 6):
        p.grad = None
        earlier.append(p.data)
        p.data = torch.ones(size, device=device)
        p.grad = memory[:size]
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - size**-0.5))


@pytest.mark.usefixtures("kernels")
def test_a_step_with_new_gradients_repeats_the_launches_of_the_last(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = given_gradients([torch.ones(4, 3, device=device), torch.ones(5, device=device)])
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = st.optim.SGD(groups, lr=0.0, max_norm=1.0)
    for _ in range(2):
        optimizer.step()
    norm = optimizer._updater.norm
    for fusion in (norm._square, norm._add_up):
        monkeypatch.setattr(fusion, "_plan", None)
    for value in (2.0, 3.0):
        for p in params:
            assert p.grad is not None
            p.grad.fill_(value)
        optimizer.step()
        assert norm.sum_of_squares(params[0].device).item() == 17 * value**2


def launched(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of a step, in order."""
    names: list[str] = []
    launch = Grid.launch

    def named(self: Grid, *args: Any) -> None:
        names.extend(kernel.name for kernel in self.kernels.kernels)
        launch(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Grid, "launch", named)
        optimizer.step()
    return names


NORM = [f"{sum_}_{kernel}" for sum_ in ("gradient_squares", "sum_of_squares") for kernel in ("element_0", "tensor_1")]


@pytest.mark.usefixtures("kernels")
def test_the_norm_is_four_kernels_for_gradients_of_one_dtype(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(*shapes: tuple[int, ...], **options: Any) -> torch.optim.Optimizer:
        return st.optim.AdamW(given_gradients([torch.ones(shape, device=device) for shape in shapes]), **options)

    step = ["AdamW_tensor_0", "AdamW_element_0"]
    assert launched(optimizer((3, 2), (5,)), monkeypatch) == step
    assert launched(optimizer((3, 2), (5,), max_norm=1.0), monkeypatch) == NORM + step


@pytest.mark.parametrize("make", [st.optim.AdamW, st.optim.SGD])
def test_captured_steps_clip_right_while_gradients_come_go_and_move(make: Callable[..., Any]) -> None:
    """Each pattern of gradients has a recording, whose launches go on writing to their own memory."""
    shapes = [(4, 3), (5,), (2, 2)]

    def taken(is_captured: bool) -> list[Parameter]:
        params = [Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = make(params, lr=0.1, max_norm=0.5)
        if is_captured:
            optimizer.capture()
        generator = torch.Generator().manual_seed(0)
        for count in (3, 3, 2, 1, 3, 2, 2, 1, 3):
            for i, p in enumerate(params):
                g = torch.randn(p.shape, generator=generator)
                p.grad = g if i < count else None
            optimizer.step()
        return params

    with kernels_on_cpu():
        assert torch.equal(flat(taken(is_captured=True)), flat(taken(is_captured=False)))


def test_a_graph_that_others_capture_keeps_the_memory_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(gradient_norm, "is_capturing", lambda device: True)
    monkeypatch.setattr(graph_lifetime, "keep_with_graph", kept.append)
    optimizer = st.optim.SGD(given_gradients([torch.ones(5), torch.ones(3)]), lr=1.0, max_norm=1.0)
    with kernels_on_cpu():
        optimizer.step()
    assert [memory.tolist() for memory in kept[-1]] == [[5.0, 3.0], 8.0]


def test_a_step_inside_forward_mode_leaves_later_ones_to_be_captured() -> None:
    optimizer = st.optim.SGD(given_gradients([torch.ones(5)]), lr=1.0, max_norm=1.0)
    optimizer.capture()
    with kernels_on_cpu():
        with forward_ad.dual_level():
            optimizer.step()
        optimizer.step()
    assert optimizer._capture is not None
    assert (optimizer._capture.replays, optimizer._capture.eager_steps) == (1, 1)


def test_the_tiles_of_the_norm_are_freed_with_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a garbage collection: they take megabytes of a GPU's memory."""
    grids: weakref.WeakSet[Grid] = weakref.WeakSet()
    launch = Grid.launch

    def noted(self: Grid, *args: Any) -> None:
        grids.add(self)
        launch(self, *args)

    monkeypatch.setattr(Grid, "launch", noted)
    optimizer = st.optim.SGD(given_gradients([torch.ones(5)]), lr=1.0, max_norm=1.0)
    with kernels_on_cpu():
        optimizer.step()
    norm = {grid for grid in grids if "squares" in grid.kernels.program.name}
    assert len(norm) == 2
    gc.disable()
    try:
        del optimizer
        norm.clear()
        assert [grid.kernels.program.name for grid in grids if "squares" in grid.kernels.program.name] == []
    finally:
        gc.enable()
