"""Why a program has no graph: each call without one is counted, and the table has the reason in the bucket's row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bucketed_rows import DIMS, SEQ, rows
from pretend_graphs import PretendPool, pretend
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed import graph_cache

LENGTHS = [5, 12, 20, 30]
"""One in each bucket."""


@pytest.fixture
def pools(device: str, monkeypatch: pytest.MonkeyPatch) -> list[PretendPool]:
    """A patch by which a CPU pretends to capture; none on a GPU, which does."""
    return pretend(monkeypatch) if device == "cpu" else []


def reads_a_value(x: Tensor) -> Tensor:
    return x / x.abs().max().item()


def scaled(x: Tensor, t: object) -> Tensor:
    return x * t


def assert_each_row_says_why(run: Callable[..., Tensor], calls: int) -> None:
    stats = run.stats()  # type: ignore[attr-defined]
    ((reason, count),) = stats.fallbacks.items()
    assert (count, stats.calls, stats.hits) == (calls, calls, 0)
    rows_of_buckets = str(stats).splitlines()[1:5]
    assert all(row.endswith(f", not captured: {reason}") for row in rows_of_buckets)
    assert run._repr_html_().count("<td>not captured: ") == 4  # type: ignore[attr-defined]
    assert f"  {calls} calls fell back: {reason}" in str(stats)


@torch.no_grad()
def test_the_first_call_of_a_bucket_that_reads_a_value_is_counted(device: str) -> None:
    run = st.bucketed(reads_a_value, DIMS)
    for n in LENGTHS:
        run(rows(n, device))
    assert_each_row_says_why(run, 4)
    run(rows(LENGTHS[0], device))
    assert_each_row_says_why(run, 5)


@torch.no_grad()
def test_the_first_call_of_a_bucket_whose_capture_fails_is_counted(device: str, pools: list[PretendPool]) -> None:
    def called(x: Tensor) -> Tensor:
        if any(pool.is_capturing for pool in pools):
            raise RuntimeError("operation not permitted when stream is capturing")
        return reads_a_value(x)

    run = st.bucketed(called, DIMS)
    for n in LENGTHS:
        run(rows(n, device))
    assert_each_row_says_why(run, 4)


def test_a_call_that_autograd_tracks_is_counted_once(device: str) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    run = st.bucketed(lambda x: reads_a_value(net(x)), DIMS)
    for n in LENGTHS:
        run(rows(n, device)).sum().backward()
    stats = run.stats()
    assert sum(stats.fallbacks.values()) == stats.calls == 4


@torch.no_grad()
def test_a_call_whose_results_differ_is_counted_for_that_alone(device: str) -> None:
    run = st.bucketed(lambda x: reads_a_value(x).sum(0) * (1 / x.shape[0]), DIMS)
    for n in LENGTHS:
        run(rows(n, device))
    stats = run.stats()
    assert sum(stats.fallbacks.values()) == stats.calls == 4
    assert all(reason.startswith("its results differ") for reason in stats.fallbacks)


@torch.no_grad()
def test_a_bucket_that_warmup_could_not_capture_is_in_the_table_before_its_first_call(device: str) -> None:
    run = st.bucketed(reads_a_value, DIMS).warmup(rows(5, device), progress=False)
    stats = run.stats()
    assert (stats.calls, stats.fallbacks) == (0, {})
    assert str(stats).splitlines()[1].startswith("  seq=32 [(32, 3)]: not captured: ")


@torch.no_grad()
def test_calls_of_buckets_that_were_forgotten_stay_counted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_BUCKETS", 2)
    run = st.bucketed(reads_a_value, DIMS)
    for n in LENGTHS:
        run(rows(n, device))
    stats = run.stats()
    assert (len(stats.buckets), sum(stats.fallbacks.values()), stats.calls) == (2, 4, 4)


@pytest.mark.parametrize("max_graphs", [None, 2])
@torch.no_grad()
def test_a_number_that_varies_is_noted_once_from_its_third_value_on(
    device: str, max_graphs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    run = st.bucketed(scaled, DIMS, max_graphs=max_graphs)
    note = "each value of t gets a graph of its own: give a tensor on the same device"
    for i, noted in enumerate([0, 0, 1, 1]):
        for n in (5, 6):  # another size is no other value
            x = rows(n, device)
            torch.testing.assert_close(run(x, 1.0 + i / 100), x * (1.0 + i / 100))
        assert run.stats().notes.get(note, 0) == noted
        assert sum(note in said for said in caplog.messages) == noted
    names = [row.split(" [")[0] for row in str(run.stats()).splitlines()[1:5]]
    assert sorted(names) == [f"  seq=8, t={t}" for t in (1.0, 1.01, 1.02, 1.03)]
    assert "<td>seq=8, t=1.01</td>" in run._repr_html_()


@torch.no_grad()
def test_a_number_in_a_container_is_named_by_its_place(device: str) -> None:
    run = st.bucketed(lambda batch: batch["x"] * batch["t"], {"batch": {"x": {0: SEQ}}})
    for t in (1, 2, 3):
        run({"x": rows(5, device), "t": t})
    assert [*run.stats().notes] == [
        "each value of batch['t'] gets a graph of its own: give a tensor on the same device"
    ]
    assert "  seq=8, batch['t']=2 [(8, 3)]: 1 call" in str(run.stats())


@torch.no_grad()
def test_values_that_no_tensor_can_replace_are_shown_and_not_noted(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(x: Tensor, mode: str, is_negative: bool | None) -> Tensor:
        return x.neg() if is_negative else x.relu() if mode == "relu" else x

    run = st.bucketed(chosen, DIMS)
    for mode in ("relu", "none", "other"):
        for is_negative in (True, False, None):
            run(rows(5, device), mode, is_negative)
    assert (run.stats().notes, caplog.messages) == ({}, [])
    assert "  seq=8, mode='relu', is_negative=None [(8, 3)]: 1 call" in str(run.stats())


@torch.no_grad()
def test_a_value_that_all_buckets_have_is_not_in_their_names(device: str) -> None:
    run = st.bucketed(scaled, DIMS)
    for n in (5, 12):
        run(rows(n, device), 2.0)
    assert [row.split(" [")[0] for row in str(run.stats()).splitlines()[1:]] == ["  seq=16", "  seq=8"]


@torch.no_grad()
def test_dims_without_an_argument_are_those_of_every_tensor(device: str) -> None:
    run = st.bucketed(lambda x, y: (x * y).sum(0), {0: SEQ})
    for n in (5, 6):
        x, y = rows(n, device), rows(n, device)
        torch.testing.assert_close(run(x, y), (x * y).sum(0))
    assert (run.stats().hits, run.stats().fallbacks) == (1, {})
