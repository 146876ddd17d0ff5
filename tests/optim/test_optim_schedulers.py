"""Every scheduler of torch changes the step as in torch, and changed numbers never cause a retrace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import loss_of, model, ones
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

import subtensors as st

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, cycle_momentum=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, factor=0.5), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, gamma=0.9)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=5),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert SCHEDULERS.keys() == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_changes_the_step_as_in_torch_without_a_retrace(
    scheduler: str, name: str, tensor_lr: bool, device: str
) -> None:
    kwargs: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"betas": (0.9, 0.99)}

    def train(package: Any) -> tuple[torch.nn.Module, list[float]]:
        net = model(device)
        lr = torch.tensor(0.1, device=device if package is st.optim else "cpu") if tensor_lr else 0.1
        optimizer = getattr(package, name)(net.parameters(), lr=lr, **kwargs)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates, traces = [], 0
        for number in range(12):
            optimizer.zero_grad()
            loss = loss_of(net, number)
            loss.backward()
            optimizer.step()
            if package is st.optim and number == 0:
                traces = optimizer._fusion.traces
            schedule.step(*([loss.item()] if scheduler == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        if package is st.optim:
            assert optimizer._fusion.traces == traces
        return net, rates

    (ours, our_rates), (theirs, their_rates) = train(st.optim), train(torch.optim)
    assert len(set(our_rates)) > 1
    assert our_rates == pytest.approx(their_rates)
    # Two trainings apart by rounding stay as near as float32 lets them.
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_a_number_that_changes_its_kind_or_reaches_zero_is_not_traced_again() -> None:
    class Own(st.optim.Adam):
        pass

    optimizer = Own(ones(4), lr=1, weight_decay=1)
    optimizer.step()
    for lr, decay, betas in [(0.5, 0.1, (0.9, 0.99)), (0, 1, (0, 0.9)), (1e-3, 0.1, (0.5, 0.5))]:
        optimizer.param_groups[0].update(lr=lr, weight_decay=decay, betas=betas)
        optimizer.step()
    assert Own._fusion.traces == 1
    # Without a weight decay it is other math, traced once.
    for decay in (0, 0.0, 0.1, 0, 0.2, -0.0):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.step()
    assert Own._fusion.traces == 2


def test_an_optional_number_is_none_while_it_is_zero() -> None:
    class Decaying(st.optim.Optimizer):
        optional = ("decay",)

        def update(self, p: Tensor, g: Tensor, *, lr: float, decay: float | None) -> None:
            p.sub_(lr * g)
            if decay is not None:
                p.mul_(1 - decay)

    (p,) = ones(1)
    optimizer = Decaying([p], {"lr": 0, "decay": 0.5})
    for decay, expected in [(0.5, 0.5), (0, 0.5), (0.0, 0.5), (0.5, 0.25), (torch.tensor(0.0), 0.25), (False, 0.25)]:
        optimizer.param_groups[0]["decay"] = decay
        optimizer.step()
        assert p.item() == expected


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0}),
        ("Lion", {}),
    ],
)
def test_an_infinite_parameter_stays_infinite_without_weight_decay(
    name: str, kwargs: dict[str, Any], device: str
) -> None:
    p = Parameter(torch.tensor([float("inf"), -float("inf"), 1.0], device=device))
    p.grad = torch.ones_like(p)
    getattr(st.optim, name)([p], lr=0.5, **kwargs).step()
    assert p.tolist() == pytest.approx([float("inf"), -float("inf"), 0.5])
