"""A bucketed program that is run again, or must have no side effects, leaves steps, gradients and buffers."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bucketed_rows import SEQ, assert_same, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed import side_effects

pytestmark = pytest.mark.usefixtures("captured")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "SGD": lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: st.optim.AdamW(params, lr=0.1),
}


class Trained:
    """A net, its optimizer and tensors beside it; how a step of it ends says `end`."""

    def __init__(self, device: str, optimizer: str, end: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device, torch.float64)
        self.opt = OPTIMIZERS[optimizer](self.net.parameters())
        self.seen = torch.zeros(2, device=device)
        self.end = end

    def step(self, x: Tensor, log: dict[str, Tensor]) -> Tensor:
        self.seen.add_(1)
        noise = random.random() + np.random.rand()
        loss = (self.net(x) * noise).square().mean()
        loss.backward()
        if self.end != "gradients":
            self.opt.step()
            self.opt.zero_grad()
        if self.end == "writes":
            log["loss"] = loss.detach()
        elif isinstance(x, st.PaddedTensor):
            raise ValueError("there is no rule for this")
        return loss.detach()

    def all(self) -> list[Any]:
        entries = [list(entry.values()) for entry in self.opt.state.values()]
        gradients = [p.grad for p in self.net.parameters()]
        return [*self.net.state_dict().values(), self.seen, *[x for entry in entries for x in entry], *gradients]


@pytest.mark.parametrize("end", ["raises", "writes", "gradients"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_step_that_falls_back_is_taken_once(device: str, optimizer: str, end: str) -> None:
    ours, theirs = (Trained(device, optimizer, end) for _ in range(2))
    run = st.bucketed(ours.step, {"x": {0: SEQ}})
    for i, n in enumerate((5, 6, 20, 7)):
        x, logs = rows(n, device), ({}, {})  # type: ignore[var-annotated]
        found = []
        for call, log in ((run, logs[0]), (theirs.step, logs[1])):
            random.seed(i)
            np.random.seed(i)
            found.append(call(x, log))
        assert_same(*found)
        torch.testing.assert_close(*logs)
        assert_same(ours.all(), theirs.all())
    assert sum(run.stats().fallbacks.values()) == 4


def test_a_write_to_a_tensor_too_large_to_copy_is_logged(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_effects, "ROLLBACK_BYTES", 100)
    trained = Trained(device, "SGD", "raises")
    run = st.bucketed(trained.step, {"x": {0: SEQ}}, check=False)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        run(rows(5, device), {})
    assert "wrote to a tensor too large to keep a copy of" in caplog.text
    assert trained.seen.tolist() == [1, 1]


class Averaged(nn.Module):
    """Writes to a parameter itself."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.code = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight * self.code.detach().clone()
        with torch.no_grad():
            self.code.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return y


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_a_parameter_is_written_once_per_call_and_not_by_warm_up(device: str, trains: bool, follows: bool) -> None:
    ours, theirs = (Averaged(trains).to(device) for _ in range(2))
    run = st.bucketed(ours, {"x": {0: SEQ}})
    with torch.no_grad():
        run.warmup(rows(5, device), progress=False)
    torch.testing.assert_close(ours.code, theirs.code)
    with torch.set_grad_enabled(follows):
        for n in (5, 6, 20, 7):
            x = rows(n, device)
            assert_same(run(x), theirs(x))
            assert_same(ours.code, theirs.code)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
@torch.no_grad()
def test_host_random_numbers_are_drawn_once_per_call(device: str, draw: Callable[[], float]) -> None:
    def program(x: Tensor) -> Tensor:
        return x.softmax(0) * (2 if draw() < 0.5 else 1)

    def seed(i: int) -> None:
        random.seed(i)
        np.random.seed(i)
        torch.manual_seed(i)

    run = st.bucketed(program, {"x": {0: SEQ}})
    for i, n in enumerate((5, 6, 20, 7, 8, 21, 5)):
        x = rows(n, device)
        found = []
        for call in (run, program):
            seed(i)
            found.append((call(x), draw()))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_step_under_no_grad_draws_the_numbers_of_the_plain_call(device: str, optimizer: str) -> None:
    def step_of(trained: Trained) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = trained.net(x).square().mean()
                loss.backward()
            trained.opt.step()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    ours, theirs = (Trained(device, optimizer, "") for _ in range(2))
    run, plain = st.bucketed(step_of(ours), {"x": {0: SEQ}}), step_of(theirs)
    with torch.no_grad():
        run.warmup(rows(5, device), progress=False)
        for i, n in enumerate((5, 6, 20, 7)):
            for trained in (ours, theirs):
                trained.opt.zero_grad()
                for group in trained.opt.param_groups:
                    group["lr"] = 0.1 * (i + 1)
            x = rows(n, device)
            assert_same(run(x), plain(x))
            assert_same(ours.all(), theirs.all())
    assert run.stats().hits == 0


@torch.no_grad()
def test_other_threads_may_draw_while_a_program_is_captured(device: str, counted: Counted) -> None:
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            random.random()
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        run = st.bucketed(nn.Sequential(nn.Softmax(0), nn.Dropout(0.5)).eval(), {0: {0: SEQ}})
        for n in (5, 6, 20, 7):
            x = rows(n, device)
            assert_same(run(x), x.softmax(0))
    finally:
        done.set()
        thread.join()
    assert (counted.recorded, run.stats().fallbacks) == (2, {})
