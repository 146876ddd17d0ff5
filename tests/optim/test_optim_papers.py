"""The optimizers that torch does not have, against their papers' algorithms for one tensor and step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optim_oracle import SHAPES, STEPS, assert_as_accurate, flat, start, take_steps, train
from optimizers import OWN_NAMES, WITH_STATE
from torch import Tensor
from torch.nn import Parameter

import subtensors as st

State = dict[str, Any]


def lion(
    p: Tensor, g: Tensor, s: State, t: int, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
) -> None:
    """Chen et al. 2023, Algorithm 2."""
    m = s.setdefault("m", torch.zeros_like(p))
    direction = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    p -= lr * (direction + weight_decay * p)
    m.mul_(betas[1]).add_((1 - betas[1]) * g)


def signsgd(
    p: Tensor, g: Tensor, s: State, t: int, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> None:
    """Bernstein et al. 2018, Algorithm 2; with momentum 0 their Algorithm 1."""
    m = s.setdefault("m", torch.zeros_like(p))
    m.mul_(momentum).add_((1 - momentum) * g)
    p -= lr * (torch.sign(m) + weight_decay * p)


def lamb(p: Tensor, g: Tensor, s: State, t: int, lr: float, weight_decay: float = 0.01) -> None:
    """You et al. 2020, Algorithm 2, with betas of 0.9 and 0.999, and an eps of 1e-6."""
    m, v = s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_((1 - 0.9) * g)
    v.mul_(0.999).add_((1 - 0.999) * g * g)
    r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + weight_decay * p
    length, change = float(p.norm()), float(r.norm())
    p -= lr * (length / change if length > 0 and change > 0 else 1.0) * r


def ademamix(
    p: Tensor,
    g: Tensor,
    s: State,
    t: int,
    lr: float,
    betas: Any = (0.9, 0.999, 0.9999),
    alpha: float = 2.0,
    beta3_warmup: int | None = None,
    alpha_warmup: int | None = None,
    weight_decay: float = 0.0,
) -> None:
    """Pagliardini et al. 2024, Algorithm 1, with the schedulers of its section 3 and an eps of 1e-8."""
    beta1, beta2, beta3 = betas
    m1, m2, v = (s.setdefault(name, torch.zeros_like(p)) for name in ("m1", "m2", "v"))
    if beta3_warmup is not None and t < beta3_warmup:
        a = t / beta3_warmup
        beta3 = math.exp(math.log(beta1) * math.log(beta3) / ((1 - a) * math.log(beta3) + a * math.log(beta1)))
    if alpha_warmup is not None:
        alpha *= min(t / alpha_warmup, 1)
    m1.mul_(beta1).add_((1 - beta1) * g)
    m2.mul_(beta3).add_((1 - beta3) * g)
    v.mul_(beta2).add_((1 - beta2) * g * g)
    mixed = m1 / (1 - beta1**t) + alpha * m2
    p -= lr * (mixed / ((v / (1 - beta2**t)).sqrt() + 1e-8) + weight_decay * p)


def schedule_free(
    p: Tensor, g: Tensor, s: State, t: int, lr: float, warmup_steps: int = 0, weight_decay: float = 0.0, r: float = 0.0
) -> None:
    """Defazio et al. 2024, Algorithm 1 with AdamW, keeping x; p is y. The betas are 0.9 and 0.999, eps is 1e-8."""
    z, x = s.setdefault("z", p.clone()), s.setdefault("x", p.clone())
    v = s.setdefault("v", torch.zeros_like(p))
    rate = lr * math.sqrt(1 - 0.999**t) * (min(1, t / warmup_steps) if warmup_steps else 1)
    v.mul_(0.999).add_((1 - 0.999) * g * g)
    s["largest"] = max(rate, s.get("largest", 0.0))
    weight = t**r * s["largest"] ** 2
    s["sum"] = s.get("sum", 0.0) + weight
    c = weight / s["sum"] if s["sum"] else 0.0
    z -= rate * (g / (v.sqrt() + 1e-8)) + rate * weight_decay * p
    x.copy_((1 - c) * x + c * z)
    p.copy_((1 - 0.9) * z + 0.9 * x)


class ByThePaper(torch.optim.Optimizer):
    """Calls one of the functions above for each parameter, in the dtype of the parameter."""

    def __init__(self, params: Any, algorithm: Callable[..., None], **kwargs: Any) -> None:
        super().__init__(params, kwargs)
        self.algorithm, self.steps = algorithm, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            kwargs = {
                name: value for name, value in group.items() if name in self.defaults and name != "differentiable"
            }
            for p in group["params"]:
                assert p.grad is not None
                self.algorithm(p, p.grad, self.state[p], self.steps, **kwargs)


CASES: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
    ("Lion", lion, {"lr": 0.01, "weight_decay": 0.1}),
    ("Lion", lion, {"lr": 0.01, "betas": (0.95, 0.98)}),
    ("SignSGD", signsgd, {"lr": 0.01}),
    ("SignSGD", signsgd, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("LAMB", lamb, {"lr": 0.01}),
    ("LAMB", lamb, {"lr": 0.1, "weight_decay": 0.0}),
    ("AdEMAMix", ademamix, {"lr": 0.01}),
    ("AdEMAMix", ademamix, {"lr": 0.01, "beta3_warmup": 12, "alpha_warmup": 15, "alpha": 5.0, "weight_decay": 0.1}),
    ("AdEMAMix", ademamix, {"lr": 0.01, "beta3_warmup": 40, "betas": (0.5, 0.99, 0.999)}),
    ("AdamWScheduleFree", schedule_free, {"lr": 0.01}),
    ("AdamWScheduleFree", schedule_free, {"lr": 0.01, "warmup_steps": 8, "weight_decay": 0.1, "r": 0.5}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "algorithm", "kwargs"), CASES)
def test_twenty_steps_follow_the_algorithm_of_the_paper(
    name: str, algorithm: Callable[..., None], kwargs: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    values = start(device, dtype)
    theirs, _ = train(lambda p: ByThePaper(p, algorithm, **kwargs), values, dtype)
    truth, _ = train(lambda p: ByThePaper(p, algorithm, **kwargs), values, torch.float64)
    ours, _ = train(lambda p: getattr(st.optim, name)(p, **kwargs), values, dtype)
    assert_as_accurate(ours, theirs, truth, dtype)


@pytest.mark.parametrize(("name", "algorithm", "kwargs"), CASES)
def test_the_kernels_of_a_step_follow_the_algorithm_of_the_paper(
    name: str, algorithm: Callable[..., None], kwargs: dict[str, Any]
) -> None:
    values = start("cpu", torch.float32, [(7,), (), (0,), (3, 5), (1030,)])
    theirs, _ = train(lambda p: ByThePaper(p, algorithm, **kwargs), values, torch.float32, 3)
    truth, _ = train(lambda p: ByThePaper(p, algorithm, **kwargs), values, torch.float64, 3)
    with kernels_on_cpu():
        ours, _ = train(lambda p: getattr(st.optim, name)(p, **kwargs), values, torch.float32, 3)
    assert_as_accurate(ours, theirs, truth, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_schedule_free_evaluates_the_average_and_trains_on_from_where_it_was(dtype: torch.dtype, device: str) -> None:
    values = start(device, dtype)
    params, optimizer = train(lambda p: st.optim.AdamWScheduleFree(p, lr=0.1), values, dtype)
    exact, by_paper = train(lambda p: ByThePaper(p, schedule_free, lr=0.1), values, torch.float64)
    y = flat(params)
    rounding = 4 * STEPS * torch.finfo(dtype).eps * y.norm()
    assert isinstance(optimizer, st.optim.AdamWScheduleFree)
    optimizer.train()
    assert torch.equal(flat(params), y)
    optimizer.eval()
    optimizer.eval()
    assert (flat(params) - flat(by_paper.state[p]["x"] for p in exact)).norm() <= rounding
    assert (flat(params) - y).norm() > 100 * rounding
    with pytest.raises(RuntimeError, match=r"call train\(\) of the optimizer"):
        take_steps(optimizer, params, values, [0])
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["train_mode"] is False
    optimizer.train()
    assert (flat(params) - y).norm() <= rounding


def test_schedule_free_switches_masters_and_parameters_together() -> None:
    values = start("cpu", torch.bfloat16)
    make = lambda p: st.optim.AdamWScheduleFree(p, lr=0.1, master_weights=True)  # noqa: E731
    params, optimizer = train(make, values, torch.bfloat16)
    masters = [optimizer.state[p]["master_param"] for p in params]
    y = flat(masters)
    for move in (optimizer.eval, optimizer.train):  # type: ignore[attr-defined]
        move()
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, masters, strict=True))
    assert (flat(masters) - y).norm() <= 4 * torch.finfo(torch.float32).eps * y.norm()


def test_lamb_takes_a_plain_step_where_a_norm_is_zero(device: str) -> None:
    at_zero, at_rest = (Parameter(torch.full((3,), x, device=device)) for x in (0.0, 1.0))
    at_zero.grad, at_rest.grad = torch.ones_like(at_zero), torch.zeros_like(at_rest)
    st.optim.LAMB([at_zero, at_rest], lr=0.5, weight_decay=0.0).step()
    assert at_zero.tolist() == pytest.approx([-0.5] * 3, rel=1e-5)
    assert at_rest.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_state_saved_by_one_goes_on_in_another(name: str) -> None:
    values = start("cpu", torch.float32, SHAPES)
    make = lambda p: getattr(st.optim, name)(p, lr=0.01, **WITH_STATE[name])  # noqa: E731
    params, optimizer = train(make, values, torch.float32, 3)
    again = [Parameter(p.detach().clone()) for p in params]
    other = make(again)
    other.load_state_dict(optimizer.state_dict())
    for trained, stepped in ((params, optimizer), (again, other)):
        take_steps(stepped, trained, values, range(3, 6))
    assert torch.equal(flat(params), flat(again))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Lion", {"lr": -1.0}),
        ("Lion", {"weight_decay": -0.1}),
        ("Lion", {"betas": (1.0, 0.9)}),
        ("Lion", {"betas": (0.9,)}),
        ("SignSGD", {"momentum": 1.0}),
        ("LAMB", {"eps": -1e-6}),
        ("AdEMAMix", {"betas": (0.9, 0.99)}),
        ("AdEMAMix", {"alpha": -1.0}),
        ("AdEMAMix", {"beta3_warmup": 0}),
        ("AdamWScheduleFree", {"betas": (0.0, 0.9)}),
        ("AdamWScheduleFree", {"warmup_steps": -1}),
    ],
)
def test_values_out_of_range_are_refused_with_their_name(name: str, arguments: dict[str, Any]) -> None:
    ((argument, value),) = arguments.items()
    with pytest.raises(ValueError, match=rf"Invalid {argument}: {re.escape(str(value))}"):
        getattr(st.optim, name)([Parameter(torch.zeros(1))], **arguments)
