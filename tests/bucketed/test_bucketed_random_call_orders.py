"""Results stay right in any order of calls, new sizes, training, eviction, release, replacement and threads."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pretend_graphs import pretend
from torch import Tensor, nn

import subtensors as st

SEQ = st.Dim("seq", max=12, buckets=[2, 4, 8, 12])
SIZES = some.integers(1, 12)


class Net(nn.Module):
    """Positions meet, and a buffer counts calls."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3)
        self.factor = 1.0
        self.register_buffer("calls", torch.zeros(()))
        self.to(device, torch.float64)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        h = self.inner(x) * self.factor
        return h.softmax(1) * scale, h.mean(1)


class Calls(RuleBasedStateMachine):
    """A runner beside the module that it runs."""

    device = "cpu"

    @initialize(max_graphs=some.sampled_from([1, 2, None]))
    def start(self, max_graphs: int | None) -> None:
        self.net, self.alone = Net(self.device), Net(self.device)
        self.run = st.bucketed(self.net, {"x": {1: SEQ}}, max_graphs=max_graphs)
        self.max_graphs = max_graphs
        self.held: list[tuple[Any, Any]] = []
        self.called = 0

    def data(self, n: int) -> Tensor:
        return torch.randn(2, n, 3, dtype=torch.float64, device=self.device)

    @rule(n=SIZES, scale=some.sampled_from([1.0, 2.0]))
    @torch.no_grad()
    def call(self, n: int, scale: float) -> None:
        x = self.data(n)
        found, expected = self.run(x, scale=scale), self.alone(x, scale=scale)
        torch.testing.assert_close(found, expected)
        self.held = [*self.held[-3:], (found, expected)]
        self.called += 1

    @rule(n=SIZES)
    @torch.no_grad()
    def call_with_a_padded_tensor(self, n: int) -> None:
        x = self.data(n)
        torch.testing.assert_close(self.run(st.pad(x, {1: SEQ}, value=float("nan"))), self.alone(x))
        self.called += 1

    @rule(n=SIZES, m=SIZES)
    def train(self, n: int, m: int) -> None:
        batches = [self.data(n), self.data(m)]
        for model in (self.run, self.alone):
            sum(part.square().sum() for x in batches for part in model(x)).backward()  # type: ignore[union-attr]
        for own, other in zip(self.net.parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
            own.grad = other.grad = None
        self.called += 2

    @rule(sizes=some.lists(SIZES, min_size=1, max_size=3))
    def accumulate(self, sizes: list[int]) -> None:
        for n in sizes:
            x = self.data(n)
            for model in (self.run, self.alone):
                model(x)[1].square().sum().backward()
        for own, other in zip(self.net.parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        self.called += len(sizes)

    @rule(drop=some.booleans())
    def zero_grad(self, drop: bool) -> None:
        for net in (self.net, self.alone):
            net.zero_grad(set_to_none=drop)

    @rule()
    @torch.no_grad()
    def step(self) -> None:
        for own, other in zip(self.net.parameters(), self.alone.parameters(), strict=True):
            own.mul_(1.01)
            other.mul_(1.01)

    @rule()
    @torch.no_grad()
    def replace_a_parameter(self) -> None:
        for net in (self.net, self.alone):
            net.inner.bias = nn.Parameter(net.inner.bias + 0.1)

    @rule(factor=some.sampled_from([0.5, 1.0, 2.0]))
    def change_a_number(self, factor: float) -> None:
        for net in (self.net, self.alone):
            net.factor = factor

    @rule(wanted=some.booleans())
    def freeze(self, wanted: bool) -> None:
        for net in (self.net, self.alone):
            net.inner.weight.requires_grad_(wanted)

    @rule()
    def release(self) -> None:
        self.run.release()
        assert not self.run.captured_buckets()

    @rule(n=SIZES, m=SIZES)
    def call_in_threads(self, n: int, m: int) -> None:
        failures: list[Exception] = []

        def answer(x: Tensor) -> None:
            try:
                with torch.no_grad():
                    torch.testing.assert_close(self.run(x), Net.forward(self.alone, x))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=answer, args=(self.data(k),)) for k in (n, m)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        self.called += 2

    @invariant()
    def results_are_the_callers_own(self) -> None:
        for found, expected in self.held:
            torch.testing.assert_close(found, expected)

    @invariant()
    def every_call_counts_once(self) -> None:
        assert self.net.calls == self.called

    @invariant()
    def there_are_no_more_graphs_than_allowed(self) -> None:
        assert self.max_graphs is None or len(self.run.captured_buckets()) <= self.max_graphs


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logger = logging.getLogger("subtensors.bucketed")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


def test_calls_in_any_order(device: str) -> None:
    class OnDevice(Calls):
        pass

    OnDevice.device = device
    run_state_machine_as_test(OnDevice, settings=settings(stateful_step_count=12))


def test_calls_in_any_order_are_replayed_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = pretend(monkeypatch, trained=True)
    run_state_machine_as_test(Calls, settings=settings(stateful_step_count=12))
    assert sum(pool.captures > pool.runs for pool in pools)
