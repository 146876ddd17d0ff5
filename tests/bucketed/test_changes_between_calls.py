"""A bucketed program computes what the plain program computes, whatever changes between two calls."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from bucketed_change_cases import CASES, UNWATCHED, everywhere
from bucketed_changes import Case, Change, Then
from bucketed_place_cases import PLACES
from bucketed_rows import DIMS, SEQ, assert_same, assert_same_gradients, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")


class Twins:
    """The program of a case twice: bucketed, and plain beside it."""

    def __init__(self, case: Case, device: str, **options: object) -> None:
        self.device = device
        self.programs = [case.make(device), case.make(device)]
        self.run = st.bucketed(self.programs[0].call, DIMS, **options)  # type: ignore[arg-type]

    def change(self, change: Change) -> None:
        for program in self.programs:
            change(program)

    def compare(self, sizes: tuple[int, ...]) -> Tensor:
        """Call both with rows that depend on the position in `sizes` alone; gives the first result."""
        torch.manual_seed(0)
        results = []
        for n in sizes:
            x = rows(n, self.device)
            outcomes = []
            for call, p in zip((self.run, self.programs[1].call), self.programs, strict=True):
                out = call(x, *p.arguments)
                if out.requires_grad:
                    out.square().sum().backward()
                parameters = list(p.net.parameters()) if p.net is not None else []
                outcomes.append((out.detach(), [w.detach() for w in parameters], [w.grad for w in parameters]))
            assert_same(*outcomes)
            results.append(outcomes[0][0])
        return results[0]


@pytest.mark.parametrize("case", [*CASES, *PLACES], ids=lambda case: case.name)
def test_a_change_between_two_calls_is_seen(
    case: Case, device: str, counted: Counted, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    # The tape that stands for a graph on a CPU holds no interpreted kernels.
    if "subtensors.optim" in case.name and request.node.callspec.params["captured"] == "run again":
        request.getfixturevalue("kernels")
    twins = Twins(case, device)
    caplog.set_level(logging.WARNING, "subtensors.bucketed")
    with torch.set_grad_enabled(case.gradients):
        result = twins.compare(case.before)
        for _ in range(case.times):
            counted.take()
            caplog.clear()
            twins.change(case.change)
            result, before = twins.compare(case.after), result
            assert case.after[0] != case.before[0] or torch.equal(result, before) != case.is_seen
            assert counted.recorded == (0 if case.then is Then.REPLAYS else case.captures)
            assert len(caplog.messages) == (case.then is Then.RECAPTURES)
            assert all(re.search(rf" is recaptured: {case.warning}\b", message) for message in caplog.messages)
        for change in (case.back, case.change) if case.back else ():
            counted.take()
            twins.change(change)
            twins.compare(case.after)
            assert counted.recorded == 0
    assert not twins.run.stats().fallbacks


@pytest.fixture
def are_graphs(request: pytest.FixtureRequest, device: str) -> bool:
    """True where Python does not run at a replay."""
    return request.node.callspec.params["captured"] != "run again" or device == "cuda"


@torch.no_grad()
@pytest.mark.parametrize("name", UNWATCHED)
def test_a_change_that_nothing_watches_is_seen_by_a_check_a_key_or_a_release(
    name: str, device: str, are_graphs: bool
) -> None:
    change, version = UNWATCHED[name], [0]
    checked, keyed, released = (
        Twins(Case(name, everywhere, change), device, **options)
        for options in ({"check": 3}, {"key": lambda x: version[0]}, {})
    )
    for twins in (checked, keyed, released):
        everywhere(device)  # what both have in common, as it was
        version[0] = 0
        before = twins.compare((5, 6))
        twins.change(change)
        if twins is released and are_graphs:
            torch.manual_seed(0)
            assert torch.equal(twins.run(rows(5, device)), before)
        version[0] = 1
        if twins is released:
            twins.run.release()
        assert not torch.equal(twins.compare((5, 6, 5)), before)
        differ = [reason for reason in twins.run.stats().fallbacks if "its results differ" in reason]
        assert bool(differ) == (twins is checked and are_graphs)
        assert twins is not keyed or twins.run.stats().hits == 3


@torch.no_grad()
def test_a_change_is_noticed_after_a_run_without_a_graph(device: str) -> None:
    p = everywhere(device)
    run = st.bucketed(p.call, DIMS)
    x, beyond = rows(5, device), rows(40, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), p.call(x))
    run.state.take_snapshot()  # the program's own counter is among what is watched again
    p.net.scale = 3.0
    torch.testing.assert_close(run(beyond), p.call(beyond))
    torch.testing.assert_close(run(x), p.call(x))


@torch.no_grad()
def test_a_program_whose_constants_keep_changing_ends_without_a_graph(device: str) -> None:
    p = everywhere(device)
    run = st.bucketed(p.call, DIMS)
    x = rows(5, device)
    for i in range(12):
        p.net.scale = 1.0 + i
        torch.testing.assert_close(run(x), p.call(x))
    assert list(run.stats().fallbacks.values()) == [4]
    assert "captured 8 times in a row and not replayed once: scale changed" in next(iter(run.stats().fallbacks))
    run.release()
    for _ in range(3):
        torch.testing.assert_close(run(x), p.call(x))
    assert run.stats().hits == 2


@torch.no_grad()
def test_dropped_graphs_are_recaptured_whatever_on_miss_is(device: str) -> None:
    for on_miss in ("eager", "error"):
        net = nn.Linear(3, 3, dtype=torch.float64, device=device)
        run = st.bucketed(net, {"input": DIMS["x"]}, on_miss=on_miss)
        x = rows(5, device)
        run.warmup(x, progress=False)
        for change in (lambda net=net: setattr(net, "weight", nn.Parameter(net.weight * 2)), run.release):
            change()
            for _ in range(2):
                torch.testing.assert_close(run(x), net(x))
        assert not run.stats().fallbacks


def test_parameters_frozen_between_calls_get_no_gradients(device: str) -> None:
    nets = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device, torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    run = st.bucketed(nets[0], {"input": {0: SEQ}})
    for frozen in ((), (), (0,), (0,), (1,), (3, 2), (), (0,)):
        x = rows(5, device)
        for net, call in zip(nets, (run, nets[1]), strict=True):
            net.zero_grad()
            for i, p in enumerate(net.parameters()):
                p.requires_grad_(i not in frozen)
            call(x).square().sum().backward()
        assert_same_gradients(*nets)
    # A graph for each set of what requires grad, which stays for when it is wanted again.
    assert run.stats().hits == 8 - 4


class Doubling(nn.Module):
    """Doubles while it trains, and by a factor."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3, dtype=torch.float64, device=device)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin() * self.factor * (2 if self.training else 1)


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    net.requires_grad_(False)
    yield
    net.requires_grad_(True)


@contextmanager
def evaluated(net: nn.Module) -> Iterator[None]:
    net.eval()
    yield
    net.train()


@contextmanager
def cast(net: nn.Module) -> Iterator[None]:
    with torch.autocast(next(net.parameters()).device.type, torch.bfloat16):
        yield


@pytest.mark.parametrize("modes", [frozen, evaluated, cast])
def test_a_graph_that_was_dropped_before_a_backward_is_recaptured_in_the_modes_of_its_call(
    modes: Callable[[nn.Module], AbstractContextManager[None]], device: str
) -> None:
    net, alone = Doubling(device).float(), Doubling(device).float()  # autocast leaves float64 as it is
    run = st.bucketed(net, DIMS, check=False)
    for n in (5, 30, 6):
        x = rows(n, device).float()
        found, expected = run(x), alone(x)
        run.release()
        for model, result in ((net, found), (alone, expected)):
            with modes(model):
                result.sum().backward()
        bound = {"rtol": 0.05, "atol": 0.05} if modes is cast else {}  # the plain backward is in bfloat16 there
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **bound)
        again = run(x)
        torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("what", ["factor", "weight"])
@pytest.mark.parametrize("calls_again", [False, True])
def test_a_graph_that_was_dropped_before_a_backward_is_not_recaptured_with_other_state(
    what: str, calls_again: bool, device: str, request: pytest.FixtureRequest
) -> None:
    net = Doubling(device)
    run = st.bucketed(net, DIMS, check=False)
    run(rows(5, device)).sum().backward()
    loss = run(rows(5, device)).sum()
    if what == "factor":
        net.factor = 3.0
    else:
        net.inner.weight = nn.Parameter(net.inner.weight.detach() * 3)
    run(rows(5, device)) if calls_again else run.release()
    has_graphs = device == "cuda" or request.node.callspec.params["captured"] == "captured"
    refused = pytest.raises(RuntimeError, match=f"graph of this call was dropped, and can't be recaptured: .*{what}")
    with refused if has_graphs else nullcontext():
        loss.backward()
