"""Runs aside compare what a checked call hides: dropout draws, zeros hide, a ragged batch is no plain tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st
from subtensors.bucketed.compare_runs import all_zero

SEQ = st.Dim("n", max=64, buckets=[8, 16])
DIMS = {"x": {1: SEQ}}


def rows(n: int, device: str) -> Tensor:
    return torch.randn(2, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)


def mean_over_the_bucket(x: Tensor) -> Tensor:
    return x.sum(1) * (1 / x.shape[1])


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("training", [False, True])
def test_a_program_with_dropout_that_computes_with_the_buckets_size_runs_at_its_true_sizes(
    training: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True, dtype=torch.float64, device=device)

    def program(x: Tensor) -> Tensor:
        return F.dropout(net(x, x, x)[0].sum(1) * (1 / x.shape[1]), 0.5)

    run = st.bucketed(program, DIMS)
    with torch.set_grad_enabled(training):
        for n in (5, 6, 13, 5):
            torch.manual_seed(n)
            found, drawn = run(rows(n, device)), torch.rand(3, device=device)
            torch.manual_seed(n)
            torch.testing.assert_close((found, drawn), (program(rows(n, device)), torch.rand(3, device=device)))
    assert f"{__file__}:{program.__code__.co_firstlineno + 1}: Python arithmetic with 8" in caplog.text
    assert sum(run.stats().fallbacks.values()) == 4


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("training", [False, True])
def test_a_program_with_dropout_that_is_right_keeps_its_buckets(
    training: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.BatchNorm1d(4, dtype=torch.float64).to(device) for _ in range(2))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64, device=device)
    runs = [
        st.bucketed(lambda x, norm=norm: layer(norm(x.transpose(1, 2)).transpose(1, 2)).mean(1), DIMS, check=check)
        for norm, check in ((ours, "first"), (theirs, False))
    ]
    with torch.set_grad_enabled(training):
        for n in (5, 6, 5):
            found = []
            for run in runs:
                torch.manual_seed(n)
                found.append((run(rows(n, device)), torch.rand(3, device=device)))
            torch.testing.assert_close(*found)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert runs[0].stats().not_checked == {"it draws random numbers": 2}
    assert not runs[0].stats().fallbacks
    assert not caplog.messages


def ragged(device: str, *lengths: int) -> Tensor:
    return st.pad([rows(n, device)[0] for n in lengths], {0: SEQ})


@pytest.mark.usefixtures("captured")
def test_a_ragged_batch_of_a_program_that_is_right_has_a_graph(device: str) -> None:
    run = st.bucketed(lambda x: x.mean(1) / x.shape[0], DIMS)
    for lengths in ((2, 5), (2, 5), (7, 1)):
        want = torch.stack([rows(n, device)[0].mean(0) / 2 for n in lengths])
        torch.testing.assert_close(run(ragged(device, *lengths)), want)
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("training", [False, True])
def test_a_ragged_batch_of_a_program_that_computes_with_the_buckets_size_is_an_error_with_the_line(
    training: bool, device: str
) -> None:
    run = st.bucketed(mean_over_the_bucket, DIMS)
    line = f"{__file__}:{mean_over_the_bucket.__code__.co_firstlineno + 1}: Python arithmetic with 8, the bucket"
    with torch.set_grad_enabled(training):
        for lengths in ((2, 5), (2, 5), (7, 1)):
            with pytest.raises(st.RuleError, match="has no right answer for a ragged batch: ") as raised:
                run(ragged(device, *lengths))
            assert line in str(raised.value)
        report = run.check(ragged(device, 3, 4))
        assert not report.passed
        assert line in report.lines[0]
        run.release()
        with pytest.raises(st.RuleError, match="has no right answer for a ragged batch"):
            run(ragged(device, 2, 5))
        x = rows(5, device)
        torch.testing.assert_close(run(x), mean_over_the_bucket(x))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("hides", ["argument", "gate", "buffer"])
def test_zeros_hide_no_size_of_the_bucket_from_a_check(hides: str, device: str) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gate = torch.zeros(4) if hides != "argument" else torch.ones(4)
            if hides == "buffer":
                self.register_buffer("gate", gate)
            else:
                self.gate = nn.Parameter(gate)

        def forward(self, x: Tensor) -> Tensor:
            return x.amax(1) + self.gate * x.sum(1) * (1 / x.shape[1])

    net = Gated().to(device, torch.float64)
    run = st.bucketed(net, DIMS)
    with torch.no_grad():
        for n in (5, 6, 5):
            x = rows(n, device) * (hides != "argument")
            torch.testing.assert_close(run(x), net(x))
        net.gate.fill_(2)
        for n in (5, 7):
            torch.testing.assert_close(run(rows(n, device)), net(rows(n, device)))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("first", [7, 8])
def test_what_zeros_hide_is_seen_by_the_first_bucket_with_padding_for_all(first: int, device: str) -> None:
    gate = nn.Parameter(torch.zeros(4, dtype=torch.float64, device=device))
    runs = 0

    def right(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x.amax(1) + gate * x.mean(1)

    def wrong(x: Tensor) -> Tensor:
        return x.amax(1) + gate * x.sum(1) * (1 / x.shape[1])

    with torch.no_grad():
        counts = []
        run = st.bucketed(right, {"x": {1: st.Dim("n", max=64, buckets=[8, 16, 32, 64])}})
        for n in (8, 15, 31, 63):  # each the first call of its bucket, the first without padding
            before = runs
            run(rows(n, device))
            counts.append(runs - before)
        assert counts[1] - counts[2] == 2
        assert counts[2] == counts[3]
        run = st.bucketed(wrong, DIMS)
        for n in (first, 15):
            run(rows(n, device))
        gate.fill_(2.0)
        for n in (6, 14):
            torch.testing.assert_close(run(rows(n, device)), wrong(rows(n, device)))


def test_zeros_are_found_among_dense_floats(device: str) -> None:
    kinds = [
        torch.zeros(3, device=device),
        torch.tensor([0.0, -0.0], dtype=torch.float64, device=device),
        torch.tensor([0.0, torch.nan], device=device),
        torch.zeros(0, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        nn.Parameter(torch.zeros(2, 2)),
        3,
    ]
    assert [*all_zero(dict(enumerate(kinds)))] == [0, 1, 7]


def test_zeros_of_a_program_that_is_right_cost_no_bucket(device: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(device)
    nn.init.zeros_(net[0].bias)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = st.bucketed(lambda x: net(x).softmax(1).mean(1), DIMS)
    for n in (5, 6, 5):
        run(torch.zeros(2, n, 4, device=device)).sum().backward()
    assert (run.stats().checked, run.stats().hits) == (2, 2)
    assert not run.stats().fallbacks
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)


def share_of_the_bucket(x: Tensor) -> Tensor:
    return x.topk(max(1, int(x.shape[1] * 0.1)), 1).values.sum(1)


def more_beyond_a_length(x: Tensor) -> Tensor:
    return x.sum(1) * 2 if len(x[0]) > 12 else x.sum(1)


def root_of_the_bucket(x: Tensor) -> Tensor:
    return x.clamp(min=0).sum(1) / math.sqrt(x.shape[1])


def by_text(x: Tensor) -> Tensor:
    return x.sum(1) * (2 if f"{x.shape[1]}" == "20" else 1)


def halves_of_the_bucket(x: Tensor) -> Tensor:
    return x.sum(1) * round(x.shape[1] / 4)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize(
    "program", [share_of_the_bucket, more_beyond_a_length, root_of_the_bucket, by_text, halves_of_the_bucket]
)
def test_each_new_true_size_of_a_program_that_reads_it_as_a_number_is_checked(
    program: Callable[[Tensor], Tensor], zeros: int, device: str
) -> None:
    run = st.bucketed(program, {"x": {1: st.Dim("n", max=64, buckets=[32])}})
    for i, n in enumerate((32, 31, 9, 20, 31)):
        x = rows(n, device) * (i >= zeros)  # the first calls may hide what the size does
        torch.testing.assert_close(run(x), program(x))
    assert run.stats().fallbacks


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("order", [(8, 5, 6), (7, 5, 6), (5, 8, 5)])
def test_dropout_in_a_full_first_batch_hides_no_number(order: tuple[int, ...], device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sum(1) * 0 + x.sum(1) / math.sqrt(x.shape[1])

    run = st.bucketed(program, DIMS)
    for n in order:
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))


def drawn_positions(x: Tensor) -> Tensor:
    return x[:, torch.randint(0, x.shape[1], (100,), device=x.device)].ne(0).double().mean((1, 2))


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(x.shape[1], device=x.device)].ne(0).sum(1)


def noisy(x: Tensor) -> Tensor:
    return (x + 1e-12 * torch.randn_like(x)).sum(1) / math.sqrt(x.shape[1])


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("program", [drawn_positions, shuffled, noisy])
def test_a_program_that_draws_and_reads_the_size_as_a_number_runs_at_its_true_sizes(
    program: Callable[[Tensor], Tensor], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = st.bucketed(program, DIMS)
    for n in (5, 6, 8, 3):
        x = rows(n, device)
        torch.testing.assert_close(run(x), program(x))
    assert f"{__file__}:{program.__code__.co_firstlineno + 1}: " in caplog.text


def seeded(x: Tensor) -> Tensor:
    np.random.seed(3)
    kept = np.random.permutation(4)[:2].tolist()
    return (x[..., kept[0]] + x[..., kept[1]]).sum(1) * len(f"{x.shape[1]}")


def seeded_by_size(x: Tensor) -> Tensor:
    np.random.seed(3)
    return x[:, int(np.random.permutation(x.shape[1])[0])]


def seeded_after_a_draw(x: Tensor) -> Tensor:
    drawn = np.random.standard_normal(4).tolist()
    np.random.seed(3)
    return x.sum(1) * torch.tensor(drawn, dtype=x.dtype).to(x.device) * len(f"{x.shape[1]}")


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("program", "is_right"), [(seeded, True), (seeded_by_size, False), (seeded_after_a_draw, False)]
)
def test_a_program_that_seeds_its_generators_is_compared(
    program: Callable[[Tensor], Tensor], is_right: bool, device: str
) -> None:
    run = st.bucketed(program, DIMS)
    for n in (5, 6, 13, 5, 12, 6):
        x = rows(n, device)
        np.random.seed(n)
        want = program(x)
        np.random.seed(n)
        torch.testing.assert_close(run(x), want)
    assert (run.stats().fallbacks == {}) == is_right
    assert (run.stats().hits > 0) == is_right


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("is_used", [False, True])
def test_numbers_drawn_in_a_first_call_alone_cost_no_bucket(is_used: bool, device: str) -> None:
    class Settled(nn.Module):
        """A model that makes a part of itself in its first call."""

        def __init__(self) -> None:
            super().__init__()
            self.part: nn.Linear | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.part is None:
                self.part = nn.Linear(4, 4).to(x)
                if not is_used:
                    nn.init.eye_(self.part.weight)
                    nn.init.zeros_(self.part.bias)
            return self.part(x).sum(1) * len(f"{x.shape[1]}")

    run, plain = st.bucketed(Settled(), DIMS), Settled()
    with torch.no_grad():
        for n in (5, 6, 13, 5, 6):
            torch.manual_seed(n)
            want = plain(rows(n, device))
            torch.manual_seed(n)
            torch.testing.assert_close(run(rows(n, device)), want)
    assert not run.stats().fallbacks
    assert run.stats().hits


@pytest.mark.usefixtures("captured")
def test_a_program_that_reads_sizes_as_numbers_without_harm_keeps_its_buckets(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        _ = f"{x.shape[1]}", math.sqrt(x.shape[1]), len(x[0])
        return x.sum(1)

    run = st.bucketed(program, DIMS)
    for n in (5, 6, 7, 5, 6, 7, 3):
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))
    stats = run.stats()
    assert (stats.checked, stats.fallbacks) == (4, {})
    assert stats.hits == 6


@pytest.mark.parametrize("program", ["sum", "count", "list"])
def test_attributes_of_modules_are_written_once_by_a_checked_call(program: str) -> None:
    class Stateful(nn.Module):
        """A model that keeps something in Python from call to call."""

        def __init__(self) -> None:
            super().__init__()
            self.total: Tensor | None = None
            self.calls, self.seen = 0, list[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(1)
            if program == "sum":
                self.total = x.sum(1) if self.total is None else self.total + x.sum(1)
                return self.total
            return x.sum(1) * (self.calls if program == "count" else len(self.seen))

    ours, plain = Stateful(), Stateful()
    run = st.bucketed(ours, {0: {1: SEQ}})
    for n in (5, 6, 5, 5, 13):
        torch.testing.assert_close(run(rows(n, "cpu")), plain(rows(n, "cpu")))
    assert (ours.calls, ours.seen) == (plain.calls, plain.seen)


def blocks(x: Tensor) -> Tensor:
    return torch.stack([x[:, i : i + 8].sum(1) for i in range(0, x.shape[1], 8)], 1).mean(1)


def tenth(x: Tensor) -> Tensor:
    return x.topk(max(1, int(0.1 * x.shape[1])), 1).values.sum(1)


def by_table(x: Tensor) -> Tensor:
    return x.sum(1) * dict.fromkeys(range(33, 65), 2).get(x.shape[1], 1)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", [blocks, tenth, by_table])
def test_a_step_that_python_hides_is_found_at_a_buckets_smallest_true_sizes(
    program: Callable[[Tensor], Tensor], seed: int, device: str
) -> None:
    run = st.bucketed(program, {"x": {1: st.Dim("n", max=64, buckets=[64])}})
    sizes = [64, 61, *torch.randperm(64, generator=torch.Generator().manual_seed(seed)).add(1).tolist()]
    for n in sizes:
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))
    assert run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_a_bucket_is_checked_at_each_new_smallest_size_and_no_more(device: str) -> None:
    run = st.bucketed(lambda x: x.sum(1), {"x": {1: st.Dim("n", max=64, buckets=[64])}})
    for n in (40, 60, 50, 45, 30, 39, 41, 20, 64, 33):
        run(rows(n, device))
    assert run.stats().checked == 4  # at 40, 60, 30 and 20


def test_only_the_smallest_checked_sizes_are_kept_to_tell_a_new_smallest_one(device: str) -> None:
    n, m = st.Dim("n", max=64, buckets=[64]), st.Dim("m", max=64, buckets=[64])
    run = st.bucketed(lambda x: x.sum((1, 2)) * len(f"{x.shape[1]}"), {"x": {1: n, 2: m}})
    checked = []
    for sizes in [(64, 64), (40, 60), (60, 40), (41, 61), (60, 60), (30, 61), (30, 30), (50, 20)]:
        run(torch.ones(2, *sizes, device=device))
        checked.append(sorted(next(iter(run.graph_cache.buckets.values())).smallest_checked))
    assert checked[2] == checked[4] == [(40, 60), (60, 40)]
    assert checked[5] == [(30, 61), (40, 60), (60, 40)]
    assert checked[-1] == [(30, 30), (50, 20)]
