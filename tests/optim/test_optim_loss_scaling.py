"""Loss scaling: the scale and the overflow flag of torch.amp.GradScaler reach the step on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from device_waits import waits_are_errors
from optimizers import TORCH_NAMES
from small_models import loss_of, model, ones
from torch.nn import Parameter

import subtensors as st


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
def test_a_scaled_step_is_the_step_and_a_step_with_an_overflow_changes_nothing(
    name: str, unscale: bool, device: str
) -> None:
    kwargs: dict[str, Any] = {
        "SGD": {"momentum": 0.9, "dampening": 0.5},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "Adam": {"amsgrad": True},
        "AdamW": {"amsgrad": True},
    }.get(name, {})
    net, reference = model(device), model(device)
    optimizer = getattr(st.optim, name)(net.parameters(), lr=0.1, **kwargs)
    plain = getattr(torch.optim, name)(reference.parameters(), lr=0.1, **kwargs)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for number in range(8):
        overflows = number in (0, 3)
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number)).backward()
        if overflows:
            assert net[2].weight.grad is not None
            net[2].weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            after = (net.state_dict(), optimizer.state_dict()["state"])
            torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
            if number > 0:
                torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
            assert scaler.get_scale() < 2.0**10
        else:
            plain.zero_grad()
            loss_of(reference, number).backward()
            plain.step()
    torch.testing.assert_close(net.state_dict(), reference.state_dict())
    counts = {int(s["step"]) for s in optimizer.state.values() if "step" in s}
    assert counts == {6}


def test_a_buffer_that_only_overflowing_steps_have_seen_is_not_saved() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {0: {}}
    del optimizer.found_inf
    other = torch.optim.SGD([p], lr=1.0, momentum=0.5, dampening=0.5)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert p.item() == 0.0


def test_masters_are_left_alone_by_an_overflow(device: str) -> None:
    p = Parameter(torch.ones(3, device=device, dtype=torch.float16))
    optimizer = st.optim.Adam([p], lr=0.1, master_weights=True)
    for found_inf, scale, grad in [(0.0, 4.0, 4.0), (1.0, 4.0, float("inf")), (0.0, 8.0, 8.0)]:
        optimizer.found_inf = torch.tensor(found_inf, device=device)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        p.grad = torch.full_like(p, grad)
        optimizer.step()
    assert optimizer.state[p]["master_param"].tolist() == pytest.approx([0.8] * 3)
    assert p.tolist() == optimizer.state[p]["master_param"].half().tolist()
    assert int(optimizer.state[p]["step"]) == 2


@pytest.mark.gpu
def test_a_step_reads_nothing_back_to_the_host() -> None:
    params = ones(5, "cuda")
    optimizer = st.optim.Adam(params, lr=torch.tensor(0.1, device="cuda"))
    scaler_state = torch.zeros((), device="cuda"), torch.full((), 2.0, device="cuda")
    optimizer.found_inf, optimizer.grad_scale = scaler_state
    optimizer.step()
    with waits_are_errors():
        for number in range(10):
            optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.99)
            optimizer.step()
    assert {int(s["step"]) for s in optimizer.state.values()} == {11}
