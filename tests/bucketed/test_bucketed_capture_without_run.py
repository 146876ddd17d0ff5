"""A program that was captured at one size is captured at others without being run there first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from pretend_graphs import PretendPool, pretend
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed import graph_cache


@pytest.fixture
def pools(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> list[PretendPool]:
    """Where a CPU pretends to capture; none on a GPU, which does."""
    trained = "training" in request.function.__name__
    return pretend(monkeypatch, trained) if device == "cpu" else []


def data(n: int, device: str) -> Tensor:
    return torch.randn(2, n, 3, dtype=torch.float64, device=device)


class Counting(nn.Module):
    """Counts the runs of its Python, captures among them, and in a buffer those of its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.python = 0
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.python += 1
        self.calls.add_(1)
        return x.softmax(1) * self.calls


@torch.no_grad()
def test_only_the_first_bucket_is_run_before_its_capture(device: str, pools: list[PretendPool]) -> None:
    net = Counting().to(device)
    run = st.bucketed(net, {"x": {1: SEQ}}, check=False)
    seen = []
    for calls, n in enumerate((5, 30, 7, 12, 20, 31), 1):
        x = data(n, device)
        torch.testing.assert_close(run(x), x.softmax(1) * calls)
        assert net.calls.item() == calls
        seen.append(net.python)
    stats = run.stats()
    assert (stats.captures, stats.hits) == (4, 2)
    # A pretended replay runs the program as well, so that only a GPU tells.
    assert device == "cpu" or seen == [2, 3, 3, 4, 5, 5]
    assert [(p.runs, p.captures) for p in pools] in ([], [(1, 4)])


def assert_trains(run: Any, net: nn.Module, alone: nn.Module, n: int, device: str) -> None:
    """Compare a call and its gradients with those of an equal module without buckets."""
    x = data(n, device)
    cotangent = torch.randn_like(x)
    found, expected = run(x), alone(x)
    torch.testing.assert_close(found, expected)
    found.backward(cotangent)
    expected.backward(cotangent)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_only_the_first_bucket_of_a_training_is_run_before_its_capture(device: str, pools: list[PretendPool]) -> None:
    class Net(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(super().forward(x)).exp()

    net = Net().to(device)
    alone = copy.deepcopy(net)
    run = st.bucketed(net, {"x": {1: SEQ}}, check=False)
    seen = []
    for n in (5, 30, 7, 12, 20, 31):
        assert_trains(run, net, alone, n, device)
        assert net.calls.item() == alone.calls.item()
        seen.append(net.python)
    stats = run.stats()
    assert (stats.captures, stats.hits) == (4, 2)
    # A call for the caller's autograd, a run on the pool's stream and a capture; then a capture a size.
    assert device == "cpu" or seen == [3, 4, 4, 5, 6, 6]
    assert [(p.runs, p.captures) for p in pools] in ([], [(1, 8)])


@pytest.mark.parametrize("checks", [False, True])
def test_a_training_that_keeps_tensors_of_its_capture_is_run_at_every_size(
    device: str, pools: list[PretendPool], checks: bool
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)
            self.kept: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            if not self.kept or max(self.kept) < n:
                self.kept[n] = torch.arange(n, dtype=torch.float64, device=device)
            return self.linear(x + self.kept[max(self.kept)][:n, None]).exp()

    net = Net().to(device)
    alone = copy.deepcopy(net)
    run = st.bucketed(net, {"x": {1: SEQ}}, check="first" if checks else False)
    for n in (5, 12, 3, 30, 10, 20, 30, 4):
        assert_trains(run, net, alone, n, device)
    for n, table in net.kept.items():
        assert torch.equal(getattr(table, "dense", table), torch.arange(n, dtype=torch.float64, device=device))


def test_two_sizes_of_a_training_meet_in_one_loss_while_they_are_captured(
    device: str, pools: list[PretendPool]
) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).to(device, torch.float64)
    alone = copy.deepcopy(net)
    run = st.bucketed(net, {"input": {1: SEQ}}, check=False)
    for module in (net, alone):
        module.eval()
    for sizes in ((5,), (30, 12), (20, 6, 31)):
        inputs = [data(n, device) for n in sizes]
        sum(run(x).square().sum() for x in inputs).backward()
        sum(alone(x).square().sum() for x in inputs).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert run.stats().captures == 4


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("of", ["another tensor", "a parameter"])
def test_a_leaf_that_a_training_reads_at_another_size_alone_gets_its_gradient(
    device: str, pools: list[PretendPool], checks: bool, of: str
) -> None:
    """A leaf that no walk over the program finds: the first size's run can't tell of it."""
    net = nn.Linear(3, 3, dtype=torch.float64, device=device)
    own = torch.ones(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    leaf = net.weight if of == "a parameter" else own
    get_hidden = {"hidden": leaf}.__getitem__

    def program(x: Tensor) -> Tensor:
        y: Tensor = net(x)
        return (y @ get_hidden("hidden") if x.shape[1] > 16 else y).tanh()

    run = st.bucketed(program, {"x": {1: SEQ}}, check="first" if checks else False)
    for n in (5, 30, 31):
        x = data(n, device)
        leaf.grad = None
        run(x).sum().backward()
        (expected,) = torch.autograd.grad(program(x).sum(), leaf, allow_unused=True)
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("checks", [False, True])
def test_a_tensor_that_a_training_writes_to_at_another_size_alone_is_written_once(
    device: str, pools: list[PretendPool], checks: bool
) -> None:
    net = nn.Linear(3, 3, dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.float64, device=device)

    def program(x: Tensor) -> Tensor:
        if x.shape[1] > 16:
            count.add_(1)
        return net(x).tanh() * (count + 1)  # type: ignore[no-any-return]  # of a module

    run = st.bucketed(program, {"x": {1: SEQ}}, check="first" if checks else False)
    run(data(5, device)).sum().backward()
    losses = [run(data(n, device)).sum() for n in (30, 5)]
    assert count.item() == 1
    torch.stack(losses).sum().backward()  # which replays the first one's forward again
    assert count.item() == 1


@pytest.mark.parametrize("trains", [False, True])
def test_a_table_made_in_a_capture_that_answers_nothing_is_made_again(
    device: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch, trained=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, dtype=torch.float64, device=device)
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            if x.shape[1] > 8:
                if self.table is None:
                    self.table = torch.arange(1, 4, dtype=torch.float64, device=device)
                y = y * self.table
            return y.sin() if x.shape[1] >= 20 else y.cos()  # true of the bucket of 17, not of 17

    net = Net()
    run = st.bucketed(net, {"x": {1: SEQ}}, check=False)
    with torch.set_grad_enabled(trains):
        for n in (5, 17, 18, 22):
            x = data(n, device)
            y = net.inner(x) * (torch.arange(1, 4, device=device) if n > 8 else 1)
            torch.testing.assert_close(run(x), y.sin() if n >= 20 else y.cos())


def test_a_bucket_that_is_forgotten_keeps_no_arguments(
    device: str, pools: list[PretendPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_cache, "MAX_BUCKETS", 3)

    class Options:
        def __init__(self) -> None:
            self.scale = torch.ones((), dtype=torch.float64, device=device)

    run = st.bucketed(lambda x, options: x.softmax(1) * options.scale, {"x": {1: SEQ}}, check=False, max_graphs=1)
    for _ in range(12):
        run(data(5, device), Options())
    cache = run.graph_cache
    assert len(cache.buckets) <= 4
    assert len(cache._shared_first_runs) <= len(cache.buckets)


@pytest.mark.gpu
def test_a_training_saves_nothing_outside_of_the_pool_at_a_size_that_is_new() -> None:
    weight = nn.Parameter(torch.randn((), device="cuda"))

    def program(x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x * weight).sin()  # which saves two tensors for its backward
        return x.sum()

    run = st.bucketed(program, {"x": {0: SEQ}}, check=False)
    run(torch.randn(5, 1 << 20, device="cuda")).backward()
    x = torch.randn(30, 1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(x).backward()
    peak, saved = torch.cuda.max_memory_allocated() - before, 16 * 32 * (1 << 20) * 4
    assert saved < peak < 1.5 * saved


@torch.no_grad()
def test_warming_up_writes_nothing_and_runs_one_size(device: str, pools: list[PretendPool]) -> None:
    net = Counting().to(device)
    run = st.bucketed(net, {"x": {1: SEQ}})
    run.warmup(data(5, device), progress=False)
    assert net.calls.item() == 0
    assert run.stats().captures == 4
    assert [p.runs for p in pools] in ([], [1])
    for calls, n in enumerate((5, 30, 12, 5), 1):
        x = data(n, device)
        torch.testing.assert_close(run(x), x.softmax(1) * calls)
    assert run.stats().hits == 4


@torch.no_grad()
def test_a_program_that_keeps_tensors_of_its_capture_is_run_at_every_size(
    device: str, pools: list[PretendPool]
) -> None:
    kept: dict[int, Tensor] = {}

    def program(x: Tensor) -> Tensor:
        # A table that grows, as of positions, which smaller sizes read too.
        n = x.shape[1]
        if not kept or max(kept) < n:
            kept[n] = torch.arange(n, dtype=torch.float64, device=device)
        return x + kept[max(kept)][:n, None]

    run = st.bucketed(program, {"x": {1: SEQ}})
    for n in (5, 12, 3, 30, 10, 20, 30, 4):
        x = data(n, device)
        torch.testing.assert_close(run(x), x + torch.arange(n, device=device)[:, None])
    for n, table in kept.items():
        assert torch.equal(getattr(table, "dense", table), torch.arange(n, dtype=torch.float64, device=device))
    assert [p.runs for p in pools] in ([], [5])


@torch.no_grad()
def test_a_program_that_must_be_run_at_every_size_is(device: str, pools: list[PretendPool]) -> None:
    tuned, tries = set(), []

    def program(x: Tensor) -> Tensor:
        if x.shape[1] not in tuned:
            tries.append(x.shape[1])
            if any(p.is_capturing for p in pools):
                raise RuntimeError("tuning is no part of a capture")
            torch.cuda.synchronize() if device == "cuda" else None
            tuned.add(x.shape[1])
        return x.softmax(1)

    run = st.bucketed(program, {"x": {1: SEQ}}, check=False)
    for n in (5, 30, 6, 31, 12, 20, 13):
        x = data(n, device)
        torch.testing.assert_close(run(x), x.softmax(1))
    stats = run.stats()
    assert (stats.captures, stats.hits, stats.fallbacks) == (4, 3, {})
    # It is tried once without a run.
    assert tries == [8, 32, 32, 16, 24]
    assert [p.runs for p in pools] in ([], [4])


@torch.no_grad()
def test_sizes_that_cannot_be_captured_run_with_a_warning(device: str, pools: list[PretendPool]) -> None:
    def program(x: Tensor) -> Tensor:
        return x.softmax(1) if x.shape[1] < 20 else x.softmax(1) * len(x.sum((1, 2)).tolist())

    run = st.bucketed(program, {"x": {1: SEQ}})
    for n in (5, 30, 12, 31):
        x = data(n, device)
        torch.testing.assert_close(run(x), program(x))
    assert device == "cpu" or [b.is_recorded for b in run.stats().buckets] == [False, True, True]


@torch.no_grad()
def test_results_belong_to_the_caller_from_the_first_replay_on(device: str, pools: list[PretendPool]) -> None:
    run: Any = st.bucketed(lambda x: {"a": x.softmax(1), "b": [x.mean(1), 3]}, {"x": {1: SEQ}})
    held = []
    for n in (5, 30, 12, 6, 29):
        x = data(n, device)
        held.append((run(x), x))
    for found, x in held:
        torch.testing.assert_close(found, {"a": x.softmax(1), "b": [x.mean(1), 3]})


@torch.no_grad()
def test_a_program_that_replaces_its_buffers_has_no_graph(device: str, pools: list[PretendPool]) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x.softmax(1) * self.calls

    net = Replacing().to(device)
    run = st.bucketed(net, {"x": {1: SEQ}})
    run.warmup(data(3, device), progress=False)
    assert net.calls.item() == 0
    for calls, n in enumerate((5, 30, 7, 5), 1):
        x = data(n, device)
        torch.testing.assert_close(run(x), x.softmax(1) * calls)
        assert net.calls.item() == calls
    assert "RuleError: it replaces calls, and a graph can only write to it" in run.stats().fallbacks


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_writes_to_arguments_reach_the_caller(
    compiled: bool, warm: bool, device: str, pools: list[PretendPool]
) -> None:
    def program(x: Tensor, cache: Tensor) -> Tensor:
        x.mul_(2)
        cache.add_(x.sum(1))
        return x * cache[:, None]

    run = st.bucketed(program, {"x": {1: SEQ}}, compile=compiled and {"backend": "aot_eager"})
    caches = torch.ones(2, 2, 3, dtype=torch.float64, device=device)
    if warm:
        run.warmup(data(5, device), caches[0], progress=False)
        assert bool((caches == 1).all())
    for n in (5, 30, 7, 12, 20, 31):
        x = data(n, device)
        given, plain = x.clone(), x.clone()
        torch.testing.assert_close(run(given, caches[0]), program(plain, caches[1]))
        torch.testing.assert_close(given, plain)
        torch.testing.assert_close(caches[0], caches[1])
    padded = st.pad(x, {1: SEQ})
    torch.testing.assert_close(run(padded, caches[0]), program(x, caches[1]))
    torch.testing.assert_close(padded.unpad(), x)


def test_writes_of_a_training_step_to_its_arguments_reach_the_caller(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))

    def program(x: Tensor, seen: Tensor) -> Tensor:
        x.mul_(2)
        seen.add_(1)
        return x @ weight

    run = st.bucketed(program, {"x": {1: SEQ}})
    seen = torch.zeros(1, device=device)
    for calls, n in enumerate((5, 7, 30), 1):
        x = data(n, device)
        given = x.clone()
        run(given, seen).sum().backward()
        assert torch.equal(given, x * 2)
        assert seen.item() == calls
    assert weight.grad is not None


@torch.no_grad()
def test_writes_to_one_tensor_given_as_two_arguments_are_seen_in_both(device: str, pools: list[PretendPool]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (x + y).cumsum(1)

    run = st.bucketed(program, {"x": {1: SEQ}, "y": {1: SEQ}})
    for n, is_one in ((5, False), (5, True), (30, True), (7, False), (12, True)):
        x, y = data(n, device), data(n, device)
        a, b = x.clone(), y.clone()
        torch.testing.assert_close(run(x, x if is_one else y), program(a, a if is_one else b))
        torch.testing.assert_close(x, a)
    assert sum(run.stats().fallbacks.values()) == 3
