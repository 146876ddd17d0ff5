"""`ema=`: an average of the weights, taken inside the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import SHAPES, assert_as_accurate, exact_maker, flat, start, take_steps, train
from optimizers import TORCH_NAMES
from small_models import loss_of, model, ones
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import subtensors as st


def averages(params: list[Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[p]["ema"] for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_the_average_is_that_of_the_weights_after_each_step(name: str, dtype: torch.dtype, device: str) -> None:
    values = start(device, dtype, SHAPES[:5])
    exact = torch.complex128 if dtype.is_complex else torch.float64
    ours, optimizer = train(lambda p: getattr(st.optim, name)(p, lr=0.01, ema=0.75), values, dtype, 6)

    def by_hand(dtype: torch.dtype) -> list[torch.Tensor]:
        kept = [v.to(dtype) for v in values]
        params = [Parameter(v.to(dtype, copy=True)) for v in values]
        trained = exact_maker(name, {"lr": 0.01})(params)
        for number in range(6):
            take_steps(trained, params, values, [number])
            kept = [0.75 * a + (1 - 0.75) * p.detach() for a, p in zip(kept, params, strict=True)]
        return kept

    assert_as_accurate(
        averages(ours, optimizer), by_hand(dtype), by_hand(exact), torch.empty(0, dtype=dtype).real.dtype
    )


def test_the_kernels_of_a_step_average_too() -> None:
    values = start("cpu", torch.float32, [(7,), (), (0,), (1030,)])
    make: Any = lambda p: st.optim.AdamW(p, lr=0.1, ema=0.5)  # noqa: E731
    expected = averages(*train(make, values, torch.float32, 3))
    with kernels_on_cpu():
        actual = averages(*train(make, values, torch.float32, 3))
    torch.testing.assert_close(actual, expected)


def test_the_average_is_that_of_torchs_averaged_model() -> None:
    net, reference = model(), model()
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(reference)  # it starts from the weights before the first step
    optimizer = st.optim.AdamW(net.parameters(), lr=0.01, ema=0.9)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for number in range(8):
        for trained, stepped in ((net, optimizer), (reference, plain)):
            stepped.zero_grad()
            loss_of(trained, number).backward()
            stepped.step()
        averaged.update_parameters(reference)
    with optimizer.averaged_weights():
        torch.testing.assert_close(net.state_dict(), averaged.module.state_dict())
    torch.testing.assert_close(net.state_dict(), reference.state_dict())


def test_within_the_block_the_parameters_hold_their_averages_whatever_happens_in_it(device: str) -> None:
    params = ones(2, device)
    optimizer = st.optim.SGD(params, lr=1.0, ema=0.75)
    optimizer.step()
    seen: list[float] = []

    def evaluate() -> None:
        with optimizer.averaged_weights():
            seen.extend(p[0].item() for p in params)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert seen == [0.75, 0.75]
    assert [p[0].item() for p in params] == [0.0, 0.0]
    assert [a[0].item() for a in averages(params, optimizer)] == [0.75, 0.75]


@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["plain", "masters"])
def test_a_bfloat16_parameter_has_an_average_in_float32(options: Any, device: str) -> None:
    p = Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))
    optimizer = st.optim.SGD([p], lr=2.0**-6, ema=0.5, **options)
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
    expected = 1.0
    for step in range(1, 5):
        expected = 0.5 * expected + 0.5 * (1 - step * 2.0**-6)
    assert optimizer.state[p]["ema"].dtype == torch.float32
    assert optimizer.state[p]["ema"].tolist() == [expected] * 3
    with optimizer.averaged_weights():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, optimizer.state[p]["ema"].bfloat16())


def test_an_overflow_leaves_the_average_alone(device: str) -> None:
    (p,) = ones(1, device)
    optimizer = st.optim.SGD([p], lr=1.0, ema=0.5)
    optimizer.step()
    optimizer.found_inf = torch.tensor(1.0, device=device)
    optimizer.step()
    assert (p.item(), optimizer.state[p]["ema"].item()) == (0.0, 0.5)


def test_matrices_are_averaged_too(device: str) -> None:
    p = Parameter(torch.ones(4, 3, device=device))
    optimizer = st.optim.Muon([p], lr=0.1, ema=0.5)
    average = p.detach().clone()
    for number in range(3):
        p.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(device)
        optimizer.step()
        average = 0.5 * average + 0.5 * p.detach()
    torch.testing.assert_close(optimizer.state[p]["ema"], average)


def test_averages_are_saved_loaded_and_copied() -> None:
    values = start("cpu", torch.bfloat16, SHAPES)
    params, optimizer = train(lambda p: st.optim.AdamW(p, lr=0.1, ema=0.9), values, torch.bfloat16, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [Parameter(p.detach().clone()) for p in params]
    other = st.optim.AdamW(again)
    other.load_state_dict(saved)
    copied, copy_of = copy.deepcopy((params, optimizer))
    for trained, stepped in ((params, optimizer), (again, other), (copied, copy_of)):
        take_steps(stepped, trained, values, range(3, 6))
    for trained, stepped in ((again, other), (copied, copy_of)):
        assert torch.equal(flat(averages(trained, stepped)), flat(averages(params, optimizer)))


def test_an_average_that_is_asked_for_later_starts_from_the_weights_of_then() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0)
    optimizer.step()
    optimizer.param_groups[0]["ema"] = 0.5
    optimizer.step()
    assert (p.item(), optimizer.state[p]["ema"].item()) == (-1.0, -0.5)
    optimizer.param_groups[0]["ema"] = 0.75
    optimizer.step()
    assert optimizer.state[p]["ema"].item() == -0.75 * 0.5 - 0.25 * 2


def test_an_optimizer_without_averages_says_so() -> None:
    with (
        pytest.raises(ValueError, match=r"no parameter has an average.*ema=0.999"),
        st.optim.SGD(ones(1)).averaged_weights(),
    ):
        pass


@pytest.mark.parametrize("ema", [-0.1, 1.5])
def test_a_share_out_of_range_is_refused(ema: float) -> None:
    with pytest.raises(ValueError, match=f"Invalid ema: {ema}"):
        st.optim.SGD(ones(1), ema=ema)
