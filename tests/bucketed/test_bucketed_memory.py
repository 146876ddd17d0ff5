"""A bucketed program that serves for long: one pool for all graphs, memory that returns, nothing that grows."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from pretend_graphs import pretend
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st
from subtensors.bucketed.runner import Bucketed
from subtensors.bucketed.statistics import TIMING_SAMPLE_EVERY, BucketStatistics

MIB = 2**20


class Net(nn.Module):
    """Positions meet, and a buffer counts calls."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.to(device, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.inner(x).softmax(1)  # type: ignore[no-any-return]


def seen(run: Bucketed, device: str) -> tuple[int, int, int]:
    """The runner's own bytes, those of the device, and how many objects Python has."""
    gc.collect()
    return run.graph_cache.bytes(), torch.cuda.memory_allocated() if device == "cuda" else 0, len(gc.get_objects())


def check_flat(before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    assert before[0] == after[0]
    assert before[1] >= after[1]
    assert after[2] - before[2] < 100  # fewer than the calls that lie between


@torch.no_grad()
def test_memory_stays_flat_over_thousands_of_calls(device: str) -> None:
    run = st.bucketed(Net(device), {"x": {1: SEQ}}, max_graphs=3)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(9, 33, (10_000 if device == "cuda" else 500,), generator=generator).tolist()
    found = []
    for i, n in enumerate(sizes):
        run(torch.zeros(2, n, 3, dtype=torch.float64, device=device))
        if i in (200, len(sizes) - 1):
            found.append(seen(run, device))
    check_flat(*found)
    assert len(run.call_cache) == 24
    assert run.program.calls == len(sizes)


def test_memory_stays_flat_over_thousands_of_gradients(device: str) -> None:
    net = Net(device)
    run = st.bucketed(net, {"x": {1: SEQ}}, max_graphs=3)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(9, 33, (2_000 if device == "cuda" else 200,), generator=generator).tolist()
    found = []
    for i, n in enumerate(sizes):
        net.zero_grad()
        run(torch.zeros(2, n, 3, dtype=torch.float64, device=device)).sum().backward()
        if i in (100, len(sizes) - 1):
            net.zero_grad()
            found.append(seen(run, device))
    check_flat(*found)


@pytest.mark.parametrize("way", ["training", "run.check"])
def test_what_a_check_takes_from_a_module_lives_as_long_as_the_graph_that_reads_it(
    way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check undoes what a call has written, and so drops what the call made and kept: its graph reads it still."""
    if device == "cpu":
        pretend(monkeypatch, trained=True)
    tables: list[weakref.ref[Tensor]] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, dtype=torch.float64, device=device)
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(SEQ.max or 0, dtype=torch.float64, device=device)
                tables.append(weakref.ref(self.table))
            return self.inner(x) * self.table[: x.shape[1], None]  # type: ignore[no-any-return]  # of a module

    net = Keeping()
    run = st.bucketed(net, {"x": {1: SEQ}})
    x = torch.randn(2, 5, 3, dtype=torch.float64, device=device)
    with torch.set_grad_enabled(way == "training"):
        (run if way == "training" else run.check)(x)
        assert net.table is None
        assert run.stats().captures == 1
        del tables[0]  # of the plain program
        gc.collect()
        assert [table() is not None for table in tables] == [True]
        if device == "cuda":  # which fills what is free, and gives it back
            torch.full((64 * MIB,), float("nan"), device=device)
            torch.cuda.empty_cache()
        expected = net.inner(x) * torch.arange(5, device=device)[:, None]
        torch.testing.assert_close(run(x), expected)
        run.release()
        gc.collect()
        assert tables[0]() in (None, net.table)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_table_that_a_program_replaces_lives_as_long_as_a_graph_that_reads_it(
    requires_grad: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch, trained=True)
    tables: list[Tensor] = []

    def program(x: Tensor) -> Tensor:
        if not tables or len(tables[0]) < x.shape[1]:  # the first time, and at a larger size
            tables[:] = [torch.arange(2 * x.shape[1], dtype=torch.float64, device=device)]
        return x.softmax(2) + tables[0][: x.shape[1], None]

    run = st.bucketed(program, {"x": {1: SEQ}})
    for n in (5, 12, 5, 30, 6, 12):
        x = torch.randn(2, n, 3, dtype=torch.float64, device=device, requires_grad=requires_grad)
        torch.testing.assert_close(run(x), x.softmax(2) + torch.arange(n, device=device)[:, None])
        if device == "cuda":
            torch.full((64 * MIB,), float("nan"), device=device)
            torch.cuda.empty_cache()
    assert run.stats().fallbacks == {}


@torch.no_grad()
@pytest.mark.usefixtures("captured")
def test_a_padded_tensor_that_a_program_keeps_keeps_no_masks(device: str) -> None:
    """Its graph's memory would be taken for memory that the program keeps."""
    kept = []

    def program(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return F.scaled_dot_product_attention(x, x, x).softmax(1) + x.mean(1, keepdim=True)

    run = st.bucketed(program, {"x": {1: SEQ}})
    for n in (5, 20, 6):
        run(torch.randn(2, n, 4, device=device))
    sizes = [x._sizes for x in kept if isinstance(x, st.PaddedTensor)]
    assert sizes
    assert all(s is not None and not s.masks and not s.attention_masks for s in sizes)


@pytest.mark.gpu
@torch.no_grad()
def test_graphs_share_one_pool_which_is_little_larger_than_the_largest_graph() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.softmax(0) * 2).cumsum(0)

    wide = torch.zeros(32, 256 * 1024, device="cuda")  # 32 MiB
    alone = st.bucketed(program, {"x": {0: SEQ}})
    alone(wide)
    run = st.bucketed(program, {"x": {0: SEQ}}).warmup(wide, progress=False)
    assert run.stats().captures == 4
    assert len(run.graph_cache.pools) == 1
    assert run.stats().pool_bytes <= 1.1 * alone.stats().pool_bytes


@pytest.mark.gpu
@torch.no_grad()
def test_release_gives_the_memory_of_graphs_and_inputs_back() -> None:
    run = st.bucketed(lambda x: x.softmax(0), {"x": {0: SEQ}})
    wide = torch.ones(32, 256 * 1024, device="cuda")
    run.warmup(wide[:, :1], progress=False).release()  # what libraries keep for the stream
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gc.disable()  # nothing may wait for it
    try:
        run.warmup(wide, progress=False)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before > 64 * MIB
        run.release()
    finally:
        gc.enable()
    assert run.graph_cache.bytes() == 0
    assert torch.cuda.memory_reserved() - before < 8 * MIB
    torch.testing.assert_close(run(wide), wide.softmax(0))
    assert run.stats().recaptures == 1


def test_a_deleted_runner_is_freed_without_the_garbage_collector() -> None:
    run = st.bucketed(lambda x: x.softmax(0), {"x": {0: SEQ}})
    x = torch.ones(32, 3)
    run.warmup(x, progress=False)
    run(x)
    inputs = [weakref.ref(t) for bucket in run.captured_buckets() for t in bucket.inputs()]
    assert inputs
    gc.disable()
    try:
        run.release()
        assert not any(ref() is not None for ref in inputs)
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("dims", [{0: SEQ}, {"x": {0: SEQ}}, {"more": {"y": {0: SEQ}}}], ids=["all", "x", "y"])
def test_a_released_runner_keeps_no_inputs_until_the_garbage_collector_runs(dims: dict[Any, Any], device: str) -> None:
    def program(x: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": (x[: more["y"].shape[0]] + 1).softmax(1), "y": more["y"].cos()}

    run = st.bucketed(program, dims)
    example = torch.ones(32, 3, device=device), {"y": torch.ones(32, 3, device=device)}
    run.warmup(*example, progress=False).release()  # what is imported and found out once
    gc.collect()
    gc.disable()
    try:
        before = sum(type(x) is Tensor and x.numel() > 0 for x in gc.get_objects())
        run.warmup(*example, progress=False).release()
        assert sum(type(x) is Tensor and x.numel() > 0 for x in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.gpu
@torch.no_grad()
def test_other_threads_use_the_device_while_graphs_are_captured() -> None:
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 3)).cuda().double()
    done, failures = threading.Event(), list[Any]()

    def load() -> None:
        try:
            stream = torch.cuda.Stream()
            while not done.is_set():
                with torch.cuda.stream(stream):
                    host = torch.randn(1000).pin_memory()
                    there = host.to("cuda", non_blocking=True)
                    torch.empty(3 * MIB, device="cuda")
                    back = there.to("cpu", non_blocking=True)
                    stream.synchronize()
                assert torch.equal(back, host)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(5):
            run = st.bucketed(net, {"input": {1: SEQ}})
            for n in (30, 20, 10, 5, 31):
                x = torch.randn(2, n, 3, dtype=torch.float64, device="cuda")
                torch.testing.assert_close(run(x), net(x))
            assert (run.stats().captures, run.stats().fallbacks) == (4, {})
    finally:
        done.set()
        thread.join()
    assert failures == []


@torch.no_grad()
def test_statistics_report_each_bucket(device: str) -> None:
    run = st.bucketed(Net(device), {"x": {1: SEQ}}, max_graphs=2)
    for n in (3, 4, 30, 31, 3, 5, 12):
        run(torch.zeros(2, n, 3, dtype=torch.float64, device=device))
    stats = run.stats()
    assert stats.mode == ("graphs" if device == "cuda" else "eager")
    assert [(b.sizes["seq"], b.calls, b.hits, b.is_recorded) for b in stats.buckets] == [
        (32, 2, 1, False),
        (16, 1, 0, True),
        (8, 4, 3, True),
    ]
    assert (stats.evictions, stats.recompiles, stats.fallbacks) == (1, 0, {})
    large, middle, small = stats.buckets
    assert large.bytes == 0
    assert middle.input_bytes > small.input_bytes > 0
    assert small.waste == pytest.approx(1 - 15 / 32)
    text = st.explain(run)
    assert f"seq=8 [(2, 8, 3)]: 4 calls, {'3 replays' if device == 'cuda' else '3 reused'}" in text
    assert "  1 eviction, 0 recaptures, 0 recompilations" in text
    if device == "cuda":
        torch.cuda.synchronize()
        assert stats.captures == 3
        assert stats.pool_bytes > 0
        assert min(middle.capture_ms, small.capture_ms) > 0
        assert small.replay_ms
        assert "capture" in text
        assert "replay " in text


@torch.no_grad()
def test_warm_up_draws_no_random_numbers_and_a_seed_gives_the_same_ones_again(device: str) -> None:
    run = st.bucketed(lambda x: torch.dropout(x, 0.5, True), {"x": {0: SEQ}})
    x = torch.ones(30, device=device)
    torch.manual_seed(0)
    expected = torch.rand(3, device=device)
    torch.manual_seed(0)
    run.warmup(x, progress=False)
    assert torch.equal(torch.rand(3, device=device), expected)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    torch.manual_seed(1)
    assert torch.equal(run(x), first)
    assert torch.equal(run(x), second)
    assert not torch.equal(first, second)


class Event:
    """Of a stream that is never far behind."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_only_the_last_replay_times_are_kept() -> None:
    statistics = BucketStatistics({"seq": 8}, [(2, 8)])
    for i in range(1000):
        statistics.note_timed(Event(0.0), Event(float(i)))
    assert len(statistics._events) == 1
    assert statistics.replay_ms == 999 - (TIMING_SAMPLE_EVERY - 1) / 2
