"""A captured step reads globals, closures and attributes live, as an eager step does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subtensors as st

pytestmark = pytest.mark.usefixtures("kernels")

FACTOR = 1.0
CONFIG = SimpleNamespace(factor=1.0, table={"factor": 1.0})


def set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


def of_a_global() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(FACTOR * lr * g)

    return Own, set_global


def of_a_closure() -> tuple[Any, Callable[[float], None]]:
    factor = 1.0

    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(factor * lr * g)

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return Own, set_factor


def of_a_class_attribute() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        factor = 1.0

        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(self.factor * lr * g)

    return Own, lambda value: setattr(Own, "factor", value)


def of_an_object() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(CONFIG.factor * lr * g)

    return Own, lambda value: setattr(CONFIG, "factor", value)


def of_an_item() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(CONFIG.table["factor"] * lr * g)

    return Own, lambda value: CONFIG.table.update(factor=value)


def scaled(g: Tensor) -> Tensor:
    return FACTOR * g


def of_a_function_that_it_calls() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float) -> None:
            p.sub_(lr * scaled(g))

    return Own, set_global


def of_a_default() -> tuple[Any, Callable[[float], None]]:
    class Own(st.optim.Optimizer):
        def update(self, p: Tensor, g: Tensor, *, lr: float, factor: float = 1.0) -> None:
            p.sub_(factor * lr * g)

    def set_default(value: float) -> None:
        Own.update.__kwdefaults__ = {"factor": value}

    return Own, set_default


READERS = [
    of_a_global,
    of_a_closure,
    of_a_class_attribute,
    of_an_object,
    of_an_item,
    of_a_function_that_it_calls,
    of_a_default,
]


@pytest.mark.parametrize("packed", [False, True], ids=["graph", "packed"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_changed_value_reaches_the_captured_step(reader: Any, packed: bool, device: str) -> None:
    cls, change = reader()
    change(1.0)
    p = nn.Parameter(torch.zeros(3, device=device))
    optimizer = cls([p], {"lr": 0.5})
    capture = optimizer.capture(packed=packed)
    expected = 0.0
    try:
        for factor in (1.0, 1.0, 3.0, 3.0, 1.0, 3.0):
            change(factor)
            optimizer.zero_grad()
            (p * 2).sum().backward()
            optimizer.step()
            expected -= factor * 0.5 * 2
            assert p.tolist() == [expected] * 3
    finally:
        change(1.0)
    assert capture.stats() == {"recordings": 2, "replays": 6, "eager_steps": 0}
    assert list(capture.reasons) == ["a value changed that update reads besides its arguments"]


def test_an_option_that_a_group_is_given_later_reaches_the_captured_step(device: str) -> None:
    p = nn.Parameter(torch.zeros(2, device=device))
    optimizer = st.optim.SGD([p], lr=1.0)
    capture = optimizer.capture()
    group = optimizer.param_groups[0]
    for change in (dict, lambda: group.update(max_norm=1.0), dict, lambda: group.pop("max_norm")):
        change()
        before = p.detach().clone()
        p.grad = torch.tensor([3.0, 4.0], device=device)
        optimizer.step()
        length = (before - p.detach()).norm().item()
        assert length == pytest.approx(1.0 if "max_norm" in group else 5.0, rel=1e-5)
    assert capture.stats() == {"recordings": 2, "replays": 4, "eager_steps": 0}


@st.fused
def step_back(p: Tensor, g: Tensor) -> None:
    p.sub_(FACTOR * g)


@pytest.mark.gpu
def test_a_changed_value_reaches_the_captured_step_of_a_matrix_optimizer() -> None:
    class Own(st.optim.MatrixOptimizer):
        is_replayable = True

        def update(self, p: Any, g: Any, *, lr: float) -> None:
            step_back(p, FACTOR * g)

    p = nn.Parameter(torch.zeros(2, 2, device="cuda"))
    optimizer = Own([p], {"lr": 0.5})
    capture = optimizer.capture()
    p.grad = torch.ones_like(p)
    expected = 0.0
    try:
        for factor in (1.0, 1.0, 3.0, 3.0):
            set_global(factor)
            optimizer.step()
            expected -= factor * factor
            assert p[0, 0].item() == expected
    finally:
        set_global(1.0)
    assert capture.stats() == {"recordings": 2, "replays": 4, "eager_steps": 0}


@pytest.mark.gpu
def test_a_matrix_optimizer_that_writes_outside_of_fused_functions_is_not_captured() -> None:
    class Own(st.optim.MatrixOptimizer):
        is_replayable = True

        def update(self, p: Any, g: Any, *, lr: float) -> None:
            p.sub_(g)

    p = nn.Parameter(torch.zeros(2, 2, device="cuda"))
    optimizer = Own([p], {"lr": 0.5})
    optimizer.capture()
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"Own\.update writes parameters or state by torch operations"):
        optimizer.step()
