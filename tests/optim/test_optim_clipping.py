"""`max_norm=`: a step that clips is `torch.nn.utils.clip_grad_norm_` followed by the step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from device_waits import waits_are_errors
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import SHAPES, MakeOptimizer, assert_as_accurate, exact_maker, flat, random_tensors, start, take_steps
from optimizers import TORCH_NAMES, WITH_STATE
from small_models import loss_of, model, ones
from torch import Tensor
from torch.nn import Parameter

import subtensors as st


def trained(
    make: MakeOptimizer, values: list[Tensor], dtype: torch.dtype, steps: int, max_norm: float | None = None
) -> list[Parameter]:
    """`steps` steps in `dtype`, with torch's clipping before each where `max_norm` is given."""
    params = [Parameter(v.detach().to(dtype, copy=True)) for v in values]
    optimizer = make(params)
    if max_norm is not None:
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(params, max_norm) and None)
    take_steps(optimizer, params, values, range(steps))
    return params


EPS = torch.finfo(torch.float32).eps


def share(max_norm: float, norm: float) -> float:
    """How much of a gradient of such a norm torch's clipping leaves."""
    return min(1.0, max_norm / (norm + 1e-6))


@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("name", [*TORCH_NAMES, "Lion", "LAMB"])
def test_a_step_that_clips_ends_where_torch_does_after_clipping(name: str, max_norm: float, device: str) -> None:
    values = start(device, torch.float32)
    kwargs: dict[str, Any] = {"lr": 0.01, **WITH_STATE[name]}
    reference: Any = (
        exact_maker(name, kwargs) if name in TORCH_NAMES else lambda p: getattr(st.optim, name)(p, **kwargs)
    )
    theirs = trained(reference, values, torch.float32, 10, max_norm)
    truth = trained(reference, values, torch.float64, 10, max_norm)
    ours = trained(lambda p: getattr(st.optim, name)(p, max_norm=max_norm, **kwargs), values, torch.float32, 10)
    assert_as_accurate(ours, theirs, truth, torch.float32)


def test_the_kernels_of_a_step_that_clips_end_where_torch_does() -> None:
    values = start("cpu", torch.float32, [(7,), (), (0,), (3, 5), (1030,)])
    theirs = trained(exact_maker("AdamW", {}), values, torch.float32, 3, 0.1)
    truth = trained(exact_maker("AdamW", {}), values, torch.float64, 3, 0.1)
    with kernels_on_cpu():
        ours = trained(lambda p: st.optim.AdamW(p, max_norm=0.1), values, torch.float32, 3)
    assert_as_accurate(ours, theirs, truth, torch.float32)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_a_matrix_optimizer_that_clips_ends_where_it_does_after_torchs_clipping(name: str, kernels: bool) -> None:
    values = start("cpu", torch.float32, [(3, 5), (4, 4), (5, 3)])
    cls = getattr(st.optim, name)
    expected = trained(lambda p: cls(p, lr=0.01), values, torch.float64, 3, 0.1)
    with kernels_on_cpu() if kernels else nullcontext():
        ours = trained(lambda p: cls(p, lr=0.01, max_norm=0.1), values, torch.float64, 3)
    unclipped = trained(lambda p: cls(p, lr=0.01), values, torch.float64, 3)
    torch.testing.assert_close(flat(ours), flat(expected), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(flat(expected), flat(unclipped), rtol=1e-6, atol=1e-8)


def test_the_norm_is_that_of_all_groups_and_dtypes_together(device: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]

    def groups() -> list[Parameter]:
        values = random_tensors(device, torch.float64, [(5, 3)] * 4)
        params = [Parameter(v.to(dtype)) for v, dtype in zip(values, dtypes, strict=True)]
        for p, g in zip(params, random_tensors(device, torch.float64, [(5, 3)] * 4, seed=1), strict=True):
            p.grad = g.to(p.dtype)
        return params

    ours, theirs = groups(), groups()
    before = [p.grad.clone() for p in ours if p.grad is not None]
    optimizer = st.optim.SGD([{"params": ours[:2]}, {"params": ours[2:], "lr": 2.0}], lr=1.0, max_norm=0.5)
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True) if p.grad is not None)
    norm = torch.sqrt(sum((g.abs().double() ** 2).sum() for g in before))
    for p, q, lr in zip(ours, theirs, [1.0, 1.0, 2.0, 2.0], strict=True):
        assert q.grad is not None
        wide = torch.complex128 if q.is_complex() else torch.float64
        expected = q.detach().to(wide) - lr * 0.5 / (norm + 1e-6) * q.grad.to(wide)
        # The factor and the update are rounded to the dtype, and the parameter once more.
        tolerance = 2 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.detach().to(wide), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("kernels")
def test_the_norm_is_that_of_a_gradient_whose_size_changes_with_its_parameter(device: str) -> None:
    p = Parameter(torch.ones(6, 2, device=device))
    optimizer = st.optim.SGD([p], lr=1.0, max_norm=1.0)
    for rows in (6, 3, 8):
        p.grad = None
        p.data = torch.ones(rows, 2, device=device)
        p.grad = torch.ones_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - (2 * rows) ** -0.5))


def test_groups_may_be_clipped_to_several_norms_or_not_at_all() -> None:
    params = ones(3)
    optimizer = st.optim.SGD(
        [{"params": params[:1], "max_norm": 3.0}, {"params": params[1:2], "max_norm": 0.6}, {"params": params[2:]}],
        lr=1.0,
    )
    optimizer.step()
    expected = [1 - 1.0, 1 - share(0.6, 6**0.5), 1 - 1.0]
    assert [p[0].item() for p in params] == pytest.approx(expected, abs=EPS)


def test_max_norm_is_dynamic_as_a_number_and_as_a_tensor(device: str) -> None:
    class Own(st.optim.SGD):
        pass

    (p,) = ones(1, device)
    assert p.grad is not None
    optimizer = Own([p], lr=1.0, max_norm=0.5)
    expected = 1.0
    for count, max_norm in enumerate([0.5, 0.25, 8.0, 0.125], 1):
        optimizer.param_groups[0]["max_norm"] = max_norm
        optimizer.step()
        expected -= share(max_norm, 1.0)
        assert p.item() == pytest.approx(expected, abs=count * EPS)
    assert Own._fusion.traces == 1
    optimizer.param_groups[0]["max_norm"] = torch.tensor(0.125, device=device)
    optimizer.step()
    assert p.item() == pytest.approx(expected - share(0.125, 1.0), abs=5 * EPS)
    optimizer.param_groups[0]["max_norm"] = None
    optimizer.step()
    assert p.item() == pytest.approx(expected - share(0.125, 1.0) - 1, abs=6 * EPS)


def test_parameters_without_a_gradient_do_not_count(device: str) -> None:
    params = ones(3, device)
    optimizer = st.optim.SGD(params, lr=1.0, max_norm=1.0)
    optimizer.step()
    params[1].grad = None
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    before = [p[0].item() for p in params]
    optimizer.step()
    moved, each = [b - p[0].item() for b, p in zip(before, params, strict=True)], share(1.0, 4**0.5)
    assert moved == pytest.approx([each, 0.0, each], abs=EPS)


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
def test_what_is_clipped_is_the_gradient_without_the_loss_scale(unscale: bool, device: str) -> None:
    net, reference = model(device), model(device)
    optimizer = st.optim.AdamW(net.parameters(), lr=0.1, max_norm=0.1)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for number in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number)).backward()
        if number == 2:
            assert net[2].weight.grad is not None
            net[2].weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if number != 2:
            plain.zero_grad()
            loss_of(reference, number).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            plain.step()
    torch.testing.assert_close(net.state_dict(), reference.state_dict())


def test_max_norm_is_saved_copied_and_loaded() -> None:
    params = ones(2)
    optimizer = st.optim.Adam(params, max_norm=0.5)
    optimizer.step()
    other = st.optim.Adam(ones(2))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_norm"] == 0.5
    other.step()
    copied = copy.deepcopy(optimizer)
    copied.step()
    assert copied.param_groups[0]["max_norm"] == 0.5


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_out_of_range_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match=f"Invalid max_norm: {max_norm}"):
        st.optim.SGD(ones(1), max_norm=max_norm)
    with pytest.raises(ValueError, match=f"Invalid max_norm: {max_norm}"):
        st.optim.SGD([{"params": ones(1), "max_norm": max_norm}])


def test_an_update_that_takes_the_name_of_an_option_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"takes \['max_norm'\], the name of an option of every optimizer"):

        class _Own(st.optim.Optimizer):
            def update(self, p: Tensor, g: Tensor, *, lr: float, max_norm: float) -> None: ...


def test_a_captured_step_clips_as_an_eager_one_does() -> None:
    values = start("cpu", torch.float32, SHAPES)

    def captured(params: list[Parameter]) -> torch.optim.Optimizer:
        optimizer = st.optim.AdamW(params, max_norm=0.5)
        optimizer.capture()
        return optimizer

    with kernels_on_cpu():
        ours = trained(captured, values, torch.float32, 3)
        eager = trained(lambda p: st.optim.AdamW(p, max_norm=0.5), values, torch.float32, 3)
    assert torch.equal(flat(ours), flat(eager))


@pytest.mark.gpu
def test_a_captured_step_clips_by_each_steps_own_norm() -> None:
    # Gradients of another layout than their parameter's are copied, which a graph can't replay.
    values = random_tensors("cuda", torch.float32)

    def captured(params: list[Parameter]) -> Any:
        optimizer = st.optim.AdamW(params, max_norm=0.5)
        captures.append(optimizer.capture())
        return optimizer

    captures: list[Any] = []
    ours = trained(captured, values, torch.float32, 10)
    eager = trained(lambda p: st.optim.AdamW(p, max_norm=0.5), values, torch.float32, 10)
    assert torch.equal(flat(ours), flat(eager))
    assert captures[0].replays >= 8, captures[0].explain()


@pytest.mark.gpu
def test_clipping_sweeps_the_gradients_once_and_reads_nothing_back() -> None:
    params = ones(50, "cuda")
    optimizer = st.optim.AdamW(params, max_norm=0.5)
    optimizer.step()
    with waits_are_errors():
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    norm = ["gradient_squares_element_0", "gradient_squares_tensor_1"]
    norm += ["sum_of_squares_element_0", "sum_of_squares_tensor_1"]
    assert kernels == [*norm, "AdamW_tensor_0", "AdamW_element_0"]


@pytest.mark.gpu
def test_a_step_that_counts_nothing_is_the_four_kernels_of_the_norm_and_one_update_kernel() -> None:
    kernels = []
    for group in ({"momentum": 0.9}, {"momentum": 0.0}):
        optimizer = st.optim.SGD([{"params": ones(20, "cuda")}], lr=0.1, max_norm=0.5, **group)
        optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        kernels.append([e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA])
    assert [len(names) for names in kernels] == [5, 5], kernels
    assert all(["squares" in name for name in names] == [True] * 4 + [False] for names in kernels)
