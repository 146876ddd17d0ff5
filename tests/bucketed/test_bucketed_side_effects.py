"""Writes and random draws of a call happen once, also if its replay found that a weight was replaced."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, assert_same, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st
from subtensors.dispatch.graphs.capture import rng_state

pytestmark = pytest.mark.usefixtures("captured")


class Held:
    """Told by its identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def count(self) -> Tensor:
        return counted_in(self.held)


class Slotted:
    """The same without a dict of attributes."""

    __slots__ = ("calls", "held")

    def __init__(self, held: Any) -> None:
        self.held, self.calls = held, 0


def zero(device: str) -> Tensor:
    return torch.zeros(3, dtype=torch.float64, device=device)


def counted_in(t: Tensor) -> Tensor:
    return t.add_(1)


def closing_over(t: Tensor) -> Callable[[], Tensor]:
    return lambda: counted_in(t)


TRACES: dict[str, tuple[Callable[[str], Any], Callable[[Any], Any]]] = {
    # What is given, and what is done with it.
    "an object's tensor": (lambda device: Held(zero(device)), lambda given: given.held.add_(1)),
    "far in an object": (
        lambda device: Held([Held({"count": zero(device)})]),
        lambda given: given.held[0].held["count"].add_(1),
    ),
    "an object's slot": (lambda device: Slotted(zero(device)), lambda given: given.held.add_(1)),
    "a closure": (lambda device: closing_over(zero(device)), lambda given: given()),
    "a method's object": (lambda device: Held(zero(device)).count, lambda given: given()),
    "a partial's argument": (lambda device: functools.partial(counted_in, zero(device)), lambda given: given()),
    "a module's buffer": (
        lambda device: nn.BatchNorm1d(3, dtype=torch.float64, device=device),
        lambda given: given.num_batches_tracked.add_(1),
    ),
    "an argument": (zero, counted_in),
    "a parameter": (lambda device: nn.Parameter(zero(device)), counted_in),
    "a static tensor": (lambda device: st.Arena(device).zeros(3, dtype=torch.float64), counted_in),
    "random numbers": (str, lambda given: torch.rand((), dtype=torch.float64, device=given)),
}


def two_alike(device: str) -> list[nn.Linear]:
    """Layers with the same weights."""
    layer = nn.Linear(3, 3, dtype=torch.float64, device=device)
    return [layer, copy.deepcopy(layer)]


def tensors_of(x: Any) -> list[Tensor]:
    """Those that one of the arguments above holds."""
    if isinstance(x, Tensor):
        return [x.detach().as_subclass(Tensor)]
    if isinstance(x, nn.Module):
        return [*x.buffers()]
    if isinstance(x, types.FunctionType):
        inner: Any = [cell.cell_contents for cell in x.__closure__ or ()]
    elif isinstance(x, types.MethodType):
        inner = [x.__self__]
    elif isinstance(x, functools.partial):
        inner = x.args
    else:
        inner = [x.held] if isinstance(x, (Held, Slotted)) else x.values() if isinstance(x, dict) else x
    return [] if isinstance(inner, str) else [t for part in inner for t in tensors_of(part)]


def assert_alike_at_once(pair: list[tuple[Any, Any]], x: Tensor, seed: int) -> None:
    """The same result of both programs, the same in what they are given, and the same random numbers next."""
    outcomes = []
    for program, given in pair:
        torch.manual_seed(seed)
        outcomes.append((program(x, given), tensors_of(given), rng_state(torch.device(x.device))))
    (found, traces, place), (expected, expected_traces, expected_place) = outcomes
    assert_same(found, expected)
    torch.testing.assert_close(traces, expected_traces)
    assert torch.equal(place, expected_place)


@torch.no_grad()
@pytest.mark.parametrize("what", TRACES)
def test_side_effects_happen_once_per_call_if_a_weight_is_replaced(what: str, device: str, counted: Counted) -> None:
    make, leave = TRACES[what]

    def program_of(net: nn.Module) -> Any:
        def program(x: Tensor, given: Any) -> Tensor:
            count = leave(given)
            return net(x).softmax(0) * count

        return program

    nets = two_alike(device)
    ours, theirs = make(device), make(device)
    run, plain = st.bucketed(program_of(nets[0]), DIMS), program_of(nets[1])
    for i in range(5):
        if i == 3:
            for net in nets:
                net.weight = nn.Parameter(net.weight * 2)
        assert_alike_at_once([(run, ours), (plain, theirs)], rows(5, device), seed=i)
    assert counted.take() == (2, 3)
    assert not run.stats().fallbacks
    assert bool(tensors_of(ours)) == (what != "random numbers")


@torch.no_grad()
@pytest.mark.parametrize("has_traces", [False, True])
def test_state_is_checked_after_the_replay_of_a_call_without_side_effects(
    has_traces: bool, device: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Linear(3, 3, dtype=torch.float64, device=device)
    run = st.bucketed(lambda x, given: net(x).softmax(0), DIMS)
    x, given = rows(5, device), Held(zero(device)) if has_traces else None
    run(x, given)
    counted.take()
    replays_before: list[int] = []
    moved = run.state.guard.first_change

    def looked() -> str:
        replays_before.append(counted.replayed)
        return moved()

    monkeypatch.setattr(run.state.guard, "first_change", looked)
    run(x, given)
    assert replays_before == [0 if has_traces else 1]


@torch.no_grad()
@pytest.mark.parametrize("what", TRACES)
def test_side_effects_happen_once_per_call_if_the_padded_run_raises(what: str, device: str) -> None:
    make, leave = TRACES[what]

    def program(x: Tensor, given: Any) -> Tensor:
        count = leave(given)
        if isinstance(x, st.PaddedTensor):
            raise ValueError("there is no rule for this")
        return x.softmax(0) * count

    run, ours, theirs = st.bucketed(program, DIMS), make(device), make(device)
    for i, n in enumerate((5, 6, 20, 5)):
        assert_alike_at_once([(run, ours), (program, theirs)], rows(n, device), seed=i)
    assert run.stats().fallbacks == {"ValueError: there is no rule for this": 4}


def twice(program: Any, followed: list[Tensor]) -> Any:
    """A program called twice before the backward of either, which has the forward of the first made again."""

    def call(x: Tensor, given: Any) -> Tensor:
        results = [program(x, given), program(x * 2, given)]
        followed.extend(results)
        return torch.stack([result.detach() for result in results])

    return call


@pytest.mark.parametrize("what", TRACES)
def test_side_effects_happen_once_per_call_under_autograd(what: str, device: str) -> None:
    make, leave = TRACES[what]
    nets = two_alike(device)

    def program_of(net: nn.Module) -> Any:
        def program(x: Tensor, given: Any) -> Tensor:
            with torch.no_grad():
                count = leave(given).clone()
            return (net(x).softmax(0) * count).sum(0)

        return program

    ours, theirs = make(device), make(device)
    run, plain = st.bucketed(program_of(nets[0]), DIMS), program_of(nets[1])
    for i in range(3):
        x, followed = rows(5, device), list[Tensor]()
        pair = [(twice(run, followed), ours), (twice(plain, followed), theirs)]
        assert_alike_at_once(pair, x, seed=i)
        for result in followed:
            result.sum().backward()
        assert_same(nets[0].weight.grad, nets[1].weight.grad)
    assert ("it writes to its arguments, and autograd tracks it" in run.stats().fallbacks) == (what != "random numbers")


@pytest.mark.parametrize("what", TRACES)
def test_side_effects_happen_once_per_training_step(what: str, device: str) -> None:
    make, leave = TRACES[what]
    nets = two_alike(device)

    def step_of(net: nn.Module) -> Any:
        optimizer = st.optim.SGD(net.parameters(), lr=0.125)

        def step(x: Tensor, given: Any) -> Tensor:
            with torch.no_grad():
                count = leave(given).clone()
            loss = (net(x).softmax(0) * count).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    ours, theirs = make(device), make(device)
    run, plain = st.bucketed(step_of(nets[0]), DIMS), step_of(nets[1])
    for i, n in enumerate((5, 6, 20, 5, 18)):
        assert_alike_at_once([(run, ours), (plain, theirs)], rows(n, device), seed=i)
        assert_same(nets[0].weight.detach(), nets[1].weight.detach())


@torch.no_grad()
def test_attributes_in_slots_are_written_once_a_call(device: str) -> None:
    def program(x: Tensor, given: Slotted) -> Tensor:
        given.calls += 1
        return x.softmax(0) * given.calls

    run, ours, theirs = st.bucketed(program, DIMS), Slotted(None), Slotted(None)
    for n in (5, 6, 20, 5):
        x = rows(n, device)
        assert_same(run(x, ours), program(x, theirs))
        assert ours.calls == theirs.calls
    assert "a Slotted, which a graph holds" in next(iter(run.stats().fallbacks))
