"""A step equal to the last one repeats its launch; any change is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from programs import Lowering, each_kernel_lowering
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


class Momentum(st.optim.Optimizer):
    """An optimizer class of this file alone, which shares no plans with other tests."""

    state: ClassVar[Any] = {"buf": torch.zeros_like}

    def __init__(self, params: Any, lr: Any = 0.5, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def update(self, p: Tensor, g: Tensor, buf: Tensor, *, lr: float, momentum: float) -> None:
        buf.mul_(momentum).add_(g)
        p.sub_(lr * buf)


class Pair:
    """Two parameters, and their expected values by plain arithmetic."""

    def __init__(self, lowering: Lowering, **options: Any) -> None:
        self.params = [torch.nn.Parameter(torch.ones(n, device=lowering.device)) for n in (3, 70)]
        self.expected = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in self.params]
        for p in self.params:
            p.grad = torch.full_like(p, 0.25)
        self.optimizer = Momentum(self.params, **options)

    def step(self) -> None:
        """Take a step, and compare the parameters with their expected values."""
        group = self.optimizer.param_groups[0]
        self.optimizer.step()
        for i, (value, buf) in enumerate(self.expected):
            buf = buf * group["momentum"] + self.params[i].grad.double()
            self.expected[i] = value - float(group["lr"]) * buf, buf
            torch.testing.assert_close(self.params[i].detach().double(), self.expected[i][0])


@contextmanager
def planned_calls(monkeypatch: pytest.MonkeyPatch, expected: int) -> Iterator[None]:
    """A context in which `expected` calls look for a plan; the other calls repeat a launch."""
    found = []
    original = FusedFunction._plan
    with monkeypatch.context() as patch:
        patch.setattr(FusedFunction, "_plan", lambda *args: found.append(1) or original(*args))
        yield
    assert len(found) == expected


@each_kernel_lowering
def test_equal_steps_repeat_the_launch(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    with lowering.running():
        pair = Pair(lowering)
        for _ in range(2):  # the first step plans; the second one caches its launch
            pair.step()
        with planned_calls(monkeypatch, 0):
            for number in range(8):
                pair.params[0].grad.fill_(number)
                pair.step()
        versions = [p._version for p in pair.params]
        pair.step()
        assert [p._version for p in pair.params] == [v + 1 for v in versions]


def move_a_gradient(pair: Pair) -> None:
    pair.params[1].grad = pair.params[1].grad.clone() * 2


def move_a_parameter(pair: Pair) -> None:
    pair.params[0].data = pair.params[0].data.clone()


def change_state(pair: Pair) -> None:
    state = pair.optimizer.state[pair.params[0]]
    state["buf"] = torch.zeros_like(state["buf"])
    pair.expected[0] = pair.expected[0][0], torch.zeros_like(pair.expected[0][1])


def change_a_number(pair: Pair) -> None:
    pair.optimizer.param_groups[0]["lr"] = 0.125


def tune(pair: Pair) -> None:
    pair.optimizer._fusion._variant.edition = object()  # as after a replacement of kernels


@each_kernel_lowering
@pytest.mark.parametrize("change", [move_a_gradient, move_a_parameter, change_state, change_a_number, tune])
def test_a_change_between_steps_is_noticed(
    change: Callable[[Pair], None], lowering: Lowering, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lowering.running():
        pair = Pair(lowering)
        for _ in range(3):
            pair.step()
        change(pair)
        with planned_calls(monkeypatch, 0 if change is change_a_number else 1):
            for _ in range(4):
                pair.step()


@each_kernel_lowering
def test_a_learning_rate_that_is_a_tensor_is_read_each_step(lowering: Lowering) -> None:
    with lowering.running():
        pair = Pair(lowering, lr=torch.tensor(0.5, device=lowering.device))
        for number in range(4):
            pair.optimizer.param_groups[0]["lr"].fill_(0.5 / 2**number)
            pair.step()


@each_kernel_lowering
def test_a_gradient_that_is_removed_and_set_again_is_noticed(lowering: Lowering) -> None:
    with lowering.running():
        pair = Pair(lowering)
        for _ in range(3):
            pair.step()
        kept, before = pair.params[1].grad, pair.params[1].detach().clone()
        pair.params[1].grad = None
        pair.optimizer.step()
        assert torch.equal(pair.params[1].detach(), before)
        pair.params[1].grad = kept
        pair.optimizer.step()
        assert not torch.equal(pair.params[1].detach(), before)


@each_kernel_lowering
def test_gradients_that_turn_sparse_are_refused_in_a_repeated_step(lowering: Lowering) -> None:
    with lowering.running():
        pair = Pair(lowering)
        for _ in range(3):
            pair.step()
        pair.params[0].grad = torch.ones(3, device=lowering.device).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            pair.optimizer.step()


@each_kernel_lowering
def test_a_step_after_one_under_autocast_is_planned_separately(lowering: Lowering) -> None:
    with lowering.running():
        pair = Pair(lowering)
        for _ in range(3):
            pair.step()
        with torch.autocast(lowering.device, torch.bfloat16):
            pair.step()
        pair.step()


@each_kernel_lowering
def test_a_released_parameter_is_refused_in_a_repeated_step(lowering: Lowering) -> None:
    arena = st.Arena(lowering.device)
    with lowering.running():
        p = torch.nn.Parameter(arena.ones(3).as_subclass(Tensor))
        p.grad = torch.ones(3, device=lowering.device)
        optimizer = Momentum([p])
        for _ in range(3):
            optimizer.step()
        arena.release()
        with pytest.raises(st.AddressError):
            optimizer.step()
        arena.restore()
        optimizer.step()
