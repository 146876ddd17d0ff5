"""The graphs that a bucketed program keeps: budgets, eviction, warm-up, release and recaptures."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed import bucket as bucket_module
from subtensors.bucketed.call_cache import MAX_OBJECTS_PER_ARG, MAX_VALUES_PER_ARG


def data(n: int, device: str) -> Tensor:
    return torch.randn(2, n, 3, dtype=torch.float64, device=device)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def recorded(run: Any) -> list[int]:
    return [b.sizes["seq"] for b in run.stats().buckets if b.is_recorded]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_graphs": 0}, "max_graphs is an int of at least 1, got 0"),
        ({"max_graphs": True}, "max_graphs is an int of at least 1, got True"),
        ({"max_waste": 0.5}, "max_waste is a factor of at least 1, got 0.5"),
        ({"max_waste": "2"}, "max_waste is a factor of at least 1, got '2'"),
        ({"on_miss": "no"}, "on_miss is 'capture', 'eager' or 'error', got 'no'"),
        ({"memory_limit": "2 gigs"}, "memory_limit must be a number of bytes above 0"),
    ],
)
def test_an_invalid_budget_is_refused(option: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        st.bucketed(softmax, {"x": {1: SEQ}}, **option)


@torch.no_grad()
def test_the_first_call_of_a_bucket_captures_and_later_calls_replay(device: str, counted: Counted) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}})
    for n, expected in ((3, (1, 0)), (8, (0, 1)), (3, (0, 1)), (9, (1, 0)), (16, (0, 1)), (5, (0, 1))):
        x = data(n, device)
        torch.testing.assert_close(run(x), softmax(x))
        assert counted.take() == expected


@torch.no_grad()
def test_the_least_recently_called_graph_is_evicted(device: str, counted: Counted) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}, max_graphs=2)
    for n, expected in ((3, (1, 0)), (9, (1, 0)), (4, (0, 1)), (20, (1, 0)), (5, (0, 1)), (17, (0, 1)), (9, (1, 0))):
        x = data(n, device)
        torch.testing.assert_close(run(x), softmax(x))
        assert counted.take() == expected
    assert recorded(run) == [24, 16]
    assert run.stats().evictions == 2


@torch.no_grad()
def test_graphs_stay_within_the_memory_limit(device: str) -> None:
    # A GPU's memory is had in pieces of 20 MiB.
    width = 3 if device == "cpu" else 100_000
    run = st.bucketed(softmax, {"x": {1: SEQ}}, memory_limit=1000 if device == "cpu" else "100MiB")
    for n in (8, 16, 8, 32, 8, 16):
        x = torch.randn(2, n, width, dtype=torch.float64, device=device)
        torch.testing.assert_close(run(x), softmax(x))
        assert run.graph_cache.bytes() <= run.graph_cache.memory_limit
    assert run.stats().evictions
    assert recorded(run)


@torch.no_grad()
def test_a_program_whose_graph_exceeds_the_memory_limit_runs_without_one(device: str) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}, memory_limit=1000)
    x = torch.randn(2, 32, 100, dtype=torch.float64, device=device)
    for _ in range(2):
        torch.testing.assert_close(run(x), softmax(x))
    assert recorded(run) == []
    assert any("beyond memory_limit=1000 B" in reason for reason in run.stats().fallbacks)


@torch.no_grad()
def test_a_miss_runs_at_its_true_size_if_only_warm_up_captures(
    device: str, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}, on_miss="eager")
    x = data(3, device)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        torch.testing.assert_close(run(x), softmax(x))
        torch.testing.assert_close(run(x), softmax(x))
    assert counted.take() == (0, 0)
    assert len(caplog.records) == 1
    run.warmup(progress=False)
    assert recorded(run) == [32, 24, 16, 8]
    counted.take()
    torch.testing.assert_close(run(x), softmax(x))
    assert counted.take() == (0, 1)


@torch.no_grad()
def test_a_miss_is_an_error_with_on_miss_error(device: str) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}, on_miss="error")
    with pytest.raises(st.RuleError, match="no graph for this call"):
        run(data(3, device))
    run.warmup(data(3, device), progress=False)
    x = data(3, device)
    torch.testing.assert_close(run(x), softmax(x))


@torch.no_grad()
def test_warm_up_goes_from_the_largest_bucket_down(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    record = bucket_module.Bucket.capture
    monkeypatch.setattr(
        bucket_module.Bucket, "capture", lambda bucket: (order.append(bucket.spec.buckets), record(bucket))[1]
    )
    run = st.bucketed(softmax, {"x": {1: SEQ}})
    assert run.warmup(data(5, device), progress=False) is run
    assert order == [(32,), (24,), (16,), (8,)]


@torch.no_grad()
def test_warm_up_without_a_call_waits_for_the_first(device: str, counted: Counted) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}).warmup(progress=False)
    assert counted.take() == (0, 0)
    x = data(3, device)
    torch.testing.assert_close(run(x), softmax(x))
    assert counted.take() == (4, 1)


def test_warm_up_under_autograd_warns_that_it_captures_nothing(device: str, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(3, 3, dtype=torch.float64, device=device)
    run = st.bucketed(net, {"input": {1: SEQ}})
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        run.warmup(data(3, device), progress=False)
    assert [r.message for r in caplog.records] == [
        "warmup() of Linear captures nothing where autograd tracks the call: use torch.no_grad()"
    ]
    assert recorded(run) == []
    with torch.no_grad():
        run.warmup(data(3, device), progress=False)
    assert recorded(run) == [32, 24, 16, 8]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = data(5, device)
            found = run(x)
            torch.testing.assert_close(found, net(x))
            assert found.is_inference() == (mode is torch.inference_mode)
    assert run.stats().hits == 2


@torch.no_grad()
def test_warm_up_shows_a_bar(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    st.bucketed(softmax, {"x": {1: SEQ}}).warmup(data(3, device))
    assert "capturing softmax" in capsys.readouterr().err


@torch.no_grad()
def test_a_bucket_far_above_the_true_size_is_not_used(device: str, counted: Counted) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}}, max_waste=2)
    for n in (3, 4):
        x = data(n, device)
        torch.testing.assert_close(run(x), softmax(x))
    assert counted.take() == (1, 0)
    assert list(run.stats().fallbacks) == ["padding would be more than max_waste=2 times the true size"]


@torch.no_grad()
def test_released_memory_comes_back_with_the_next_call(device: str, counted: Counted) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}})
    x = data(3, device)
    run(x)
    run(data(9, device))
    run.release()
    assert recorded(run) == []
    assert run.graph_cache.bytes() == 0
    counted.take()
    torch.testing.assert_close(run(x), softmax(x))
    assert counted.take() == (1, 0)


@torch.no_grad()
def test_training_and_evaluation_have_graphs_of_their_own(device: str) -> None:
    net = nn.Sequential(nn.Dropout(0.5)).to(device)
    run = st.bucketed(net, {0: {0: SEQ}})
    x = torch.ones(7, device=device)
    for _ in range(2):
        assert set(run(x).tolist()) <= {0.0, 2.0}
        torch.testing.assert_close(run.program.eval()(x), run(x))
        net.train()


@torch.no_grad()
def test_random_numbers_go_on_from_call_to_call(device: str) -> None:
    run = st.bucketed(lambda x: torch.dropout(x, 0.5, True), {"x": {0: st.Dim("n", max=1000, buckets=500)}})
    x = torch.ones(400, device=device)
    drawn = [run(x) for _ in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


@torch.no_grad()
def test_buffers_are_written_once_a_call_and_not_by_warm_up(device: str) -> None:
    torch.manual_seed(0)
    net, alone = (nn.BatchNorm1d(3, device=device, dtype=torch.float64) for _ in range(2))
    run = st.bucketed(net, {"input": {0: SEQ}})
    run.warmup(torch.randn(5, 3, dtype=torch.float64, device=device), progress=False)
    for n in (5, 9, 6, 30, 2):
        x = torch.randn(n, 3, dtype=torch.float64, device=device)
        torch.testing.assert_close(run(x), alone(x))
        torch.testing.assert_close(net.running_mean, alone.running_mean)
        torch.testing.assert_close(net.running_var, alone.running_var)
        assert net.num_batches_tracked == alone.num_batches_tracked


@torch.no_grad()
def test_a_module_that_writes_to_its_buffers_is_captured_correctly(device: str) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 10, device=device))
            self.register_buffer("at", torch.zeros((), dtype=torch.long, device=device))

        def forward(self, x: Tensor) -> Tensor:
            self.kept.index_copy_(1, self.at[None], x.sum(1, keepdim=True))
            self.at.add_(1)
            return self.kept.clone()

    net = Cache()
    run = st.bucketed(net, {"x": {1: SEQ}})
    wanted = torch.zeros(2, 10, device=device)
    for i, n in enumerate((3, 5, 9, 2)):
        x = torch.randn(2, n, device=device)
        wanted[:, i] = x.sum(1)
        torch.testing.assert_close(run(x), wanted)


@torch.no_grad()
def test_calls_are_counted_and_plotted(device: str) -> None:
    run = st.bucketed(softmax, {"x": {1: SEQ}})
    for n in (3, 3, 4, 9, 30):
        run(data(n, device))
    stats = run.stats()
    assert stats.sizes == {"seq": {3: 2, 4: 1, 9: 1, 30: 1}}
    assert [(b.sizes["seq"], b.calls, b.hits) for b in stats.buckets] == [(32, 1, 0), (16, 1, 0), (8, 3, 2)]
    assert stats.waste == pytest.approx(1 - 49 / (3 * 8 + 16 + 32))
    assert run.refit(max_graphs=2) == {"seq": st.Sizes([9, 30])}
    bars, waste = run.plot().axes
    assert {bar.get_center()[0]: bar.get_height() for bar in bars.patches} == {3: 2, 4: 1, 9: 1, 30: 1}  # type: ignore[attr-defined]
    assert [line.get_xdata()[0] for line in bars.lines] == [8, 16, 32]  # type: ignore[index]
    steps = dict(zip(*map(list, waste.lines[0].get_data()), strict=True))
    assert steps == pytest.approx({0: 1 - 10 / 24, 8: 1 - 9 / 16, 16: 1 - 30 / 32, 32: 1 - 30 / 32})
    text = st.explain(run)
    assert "softmax bucketed on Dim('seq'" in text
    assert f"5 calls, {'2 replays' if device == 'cuda' else '2 reused'}" in text


@torch.no_grad()
def test_the_waste_of_a_ragged_batch_is_that_of_its_rows(device: str) -> None:
    def batch(*lengths: int) -> Tensor:
        return st.pad([torch.ones(n, 4, device=device) for n in lengths], {0: st.Dim("n", max=16, buckets=8)})

    run = st.bucketed(lambda x: x.sum(1), {"x": {1: SEQ}})
    run(batch(2, 4, 6))
    assert run.stats().waste == pytest.approx(0.5)
    run(batch(8, 8, 8))
    assert run.stats().waste == pytest.approx(0.25)
    limited = st.bucketed(lambda x: x.sum(1), {"x": {1: SEQ}}, max_waste=1.5)
    limited(batch(2, 4, 6))
    assert list(limited.stats().fallbacks) == ["padding would be more than max_waste=1.5 times the true size"]


@torch.no_grad()
def test_sizes_that_fill_their_bucket_or_have_none_are_counted_too(device: str) -> None:
    run = st.bucketed(softmax, {"x": {1: st.Dim("n", max=8, min=0, buckets=[1, 8])}})
    for n in (1, 1, 5, 20, 0):
        run(data(n, device))
    assert run.stats().sizes == {"n": {1: 2, 5: 1, 20: 1, 0: 1}}
    assert run.refit(max_graphs=3) == {"n": st.Sizes([1, 5, 20])}
    assert len(run.plot().axes) == 2
    with pytest.raises(ValueError, match="max_graphs is an int of at least 1, got 0"):
        run.refit(max_graphs=0)


@torch.no_grad()
def test_a_released_parameter_is_refused(device: str) -> None:
    pytest.importorskip("cuda.bindings") if device == "cuda" else None
    arena = st.Arena(device, reserve="1MiB")
    weight = arena.zeros(3, dtype=torch.float64)
    run = st.bucketed(lambda x: x * weight, {"x": {1: SEQ}})
    x = data(3, device)
    run(x)
    torch.testing.assert_close(run(x), x * weight)
    arena.release(keep="cpu")
    with pytest.raises(st.AddressError):
        run(x)
    arena.restore()
    torch.testing.assert_close(run(x), x * weight)


@pytest.mark.gpu
def test_a_failed_capture_leaves_no_memory_behind() -> None:
    def asks(x: Tensor, place: str) -> Tensor:
        # CUDA refuses the copy, which invalidates the capture, or the program refuses it by itself.
        if place == "program" and torch.cuda.is_current_stream_capturing():
            raise ValueError("not here")
        return x + (x.sum().item() if place == "device" else 1)

    for place in ("device", "program"):
        run = st.bucketed(asks, {"x": {1: SEQ}})
        for n in (5, 6, 12):
            x = data(n, "cuda")
            torch.testing.assert_close(run(x, place), asks(x, place))
        stats = run.stats()
        assert (stats.hits, stats.captures) == (0, 0)
        assert sum(stats.fallbacks.values()) == 3, stats
        # Random numbers go on, and what is captured afterwards in the same pool or in another is right.
        assert torch.randn(3, device="cuda").isfinite().all()
        again = st.bucketed(lambda x: x.cumsum(1) + torch.rand((), device="cuda") * 0, {"x": {1: SEQ}})
        for n in (5, 6, 12):
            x = data(n, "cuda")
            torch.testing.assert_close(again(x), x.cumsum(1))
            torch.testing.assert_close(run(x, "nowhere"), x + 1)
        assert again.stats().hits == 1
        assert run.stats().hits == 1


class Token:
    """Told from others by its identity."""

    shift = 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["number", "object", "attribute"])
def test_an_argument_that_changes_in_each_call_gets_a_limited_number_of_graphs(
    kind: str, device: str, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    def program(x: Tensor, options: dict[str, Any]) -> Tensor:
        number = options["which"]
        return x.softmax(1) * (number if isinstance(number, int) else number.shift)

    most = MAX_VALUES_PER_ARG if kind == "number" else MAX_OBJECTS_PER_ARG
    tokens = [Token() for _ in range(most + 3)]

    def value(i: int) -> Any:
        if kind == "attribute":
            tokens[0].shift = i
            return tokens[0]
        return i if kind == "number" else tokens[i]

    run = st.bucketed(program, {"x": {1: SEQ}})
    x = data(3, device)
    for i in [*range(most + 2), 0, most - 1]:
        options = {"which": value(i)}
        torch.testing.assert_close(run(x, options), program(x, options))
    assert counted.take() == (most, 2)
    why = f"options['which'] had {most} values, each with graphs of its own: give a tensor, or max_graphs"
    assert run.stats().fallbacks == {why: 2}
    assert len(caplog.records) == (2 if kind == "number" else 1)
    # The same values at another size have theirs.
    y = data(9, device)
    options = {"which": value(1)}
    torch.testing.assert_close(run(y, options), program(y, options))
    assert counted.take() == (1, 0)
    run.release()
    options = {"which": value(most + 1)}
    for _ in range(2):
        torch.testing.assert_close(run(x, options), program(x, options))
    assert counted.take() == (1, 1)
    if kind == "object":
        refused = weakref.ref(tokens[most])
        del tokens[most]
        gc.collect()
        assert refused() is None


@torch.no_grad()
def test_max_graphs_lifts_the_limit_on_the_number_of_values(device: str, counted: Counted) -> None:
    run = st.bucketed(lambda x, n: x.softmax(1) * n, {"x": {1: SEQ}}, max_graphs=2)
    x = data(3, device)
    for i in range(MAX_VALUES_PER_ARG + 2):
        torch.testing.assert_close(run(x, i), softmax(x) * i)
    assert counted.take() == (MAX_VALUES_PER_ARG + 2, 0)
    assert not run.stats().fallbacks
    assert len(recorded(run)) == 2
