"""A bucket's first calls are compared with the plain program, and a bucket that differs runs the program instead."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from bucketed_batches import DIMS, SEQ, rows
from pretend_graphs import pretend
from torch import Tensor, nn
from torch.nn import functional as F

import subtensors as st


def mean_over_the_bucket(x: Tensor) -> Tensor:
    return x.sum(1) * (1 / x.shape[1])


def sum_of_positions(x: Tensor) -> Tensor:
    return x.sum(1) + sum(range(x.shape[1]))


def length_of_a_row(x: Tensor) -> Tensor:
    return x.sum(1) / len(x[0])


def plain_mask(x: Tensor) -> Tensor:
    return (x * torch.ones([*map(int, x.shape[:2])], device=x.device).cumsum(1)[:, -1:, None]).sum(1)


def padded_to_a_multiple(x: Tensor) -> Tensor:
    if x.shape[1] % 4:
        x = F.pad(x, (0, 0, 0, 4 - x.shape[1] % 4), value=1.0)
    return x.sum(1)


WRONG = [mean_over_the_bucket, sum_of_positions, length_of_a_row, plain_mask, padded_to_a_multiple]
"""Programs whose Python computes with the bucket's size."""


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("program", WRONG)
def test_a_program_that_computes_with_the_buckets_size_runs_at_its_true_sizes(
    program: Callable[[Tensor], Tensor], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = st.bucketed(program, DIMS)
    for n in (5, 6, 13, 5):
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))
    stats = run.stats()
    assert sum(stats.fallbacks.values()) == 4
    assert all("its results differ" in reason for reason in stats.fallbacks)
    by_branch = "decides a branch otherwise than its bucket"
    assert "its results differ from the program's: result differs by" in caplog.text or by_branch in caplog.text
    assert program is not mean_over_the_bucket or f"{__file__}:" in caplog.text


BRANCHES: dict[str, tuple[Callable[[Tensor], Tensor], set[int]]] = {
    "comparison": (lambda x: x.sum(1) * 2 if x.shape[1] <= 4 else x.sum(1), {3, 4}),
    "largest": (lambda x: x.sum(1) * max(x.shape[1], 6), {3, 4, 5}),
    "remainder": (lambda x: x.sum(1) * (2 if x.shape[1] % 4 == 3 else 1), {3, 7}),
    "truth": (lambda x: x.sum(1) * 2 if x.shape[1] - 3 else x.sum(1), {3}),
    "quotient": (lambda x: x.sum(1) * (5 if x.shape[1] // 2 > 2 else 1), {3, 4, 5}),
    "of all": (lambda x: x.sum(1) * (5 if x.numel() == 32 else 1), {4}),
}
"""Programs that branch on their size, and the sizes of the bucket of 8 that decide otherwise than 8."""


@torch.no_grad()
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("order", [(8, 7, 5, 4, 3, 4, 3, 12), (3, 4, 5, 7, 8, 3, 12, 7)])
@pytest.mark.parametrize("check", ["first", False])
@pytest.mark.parametrize("name", BRANCHES)
def test_sizes_that_decide_a_branch_otherwise_run_as_they_are(
    name: str, check: Literal["first", False], order: tuple[int, ...], device: str
) -> None:
    program, otherwise = BRANCHES[name]
    run = st.bucketed(program, DIMS, check=check)
    for n in order:
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))
    stats = run.stats()
    assert all("decides a branch otherwise than its bucket" in reason for reason in stats.fallbacks)
    assert sum(stats.fallbacks.values()) == sum(n in otherwise for n in order)
    assert stats.hits > 0


@torch.no_grad()
@pytest.mark.usefixtures("captured")
def test_a_branch_that_makes_no_difference_keeps_the_graph(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum(1) if x.shape[1] > 3 else x.cumsum(1)[:, -1]

    run = st.bucketed(program, DIMS)
    for n in (8, 7, 3, 2, 3):
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))
    assert not run.stats().fallbacks
    assert run.stats().hits == 4


@pytest.mark.usefixtures("captured")
def test_an_error_of_a_thousandth_is_found_in_float32(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum(1) * (1 + x.shape[1] / 1000)

    run = st.bucketed(program, DIMS)
    x = rows(5, device, torch.float32)
    torch.testing.assert_close(run(x), program(x))
    assert any("its results differ" in reason for reason in run.stats().fallbacks)


def test_a_precision_set_by_backend_is_no_error(device: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision  # type: ignore[attr-defined, union-attr]
    run = st.bucketed(lambda x: x @ x.mT, DIMS)
    x = rows(5, device, torch.float32)
    try:
        for precision in ("ieee", "tf32", "ieee"):
            matmul.fp32_precision = precision  # type: ignore[attr-defined, union-attr]
            run(x)
    finally:
        matmul.fp32_precision = before  # type: ignore[attr-defined, union-attr]
    assert [bucket.calls for bucket in run.stats().buckets] == [2, 1]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("records", [False, True], ids=["without gradients", "with gradients"])
def test_the_answer_of_a_bucket_that_cannot_be_captured_is_compared_too(records: bool, device: str) -> None:
    def signal(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)  # the spectrum needs the true size

    run = st.bucketed(signal, DIMS)
    for n in (5, 6, 13, 5):
        x = rows(n, device).requires_grad_(records)
        torch.testing.assert_close(run(x), x)
        if records:
            run(x).square().sum().backward()
            torch.testing.assert_close(x.grad, 2 * x)


@pytest.mark.usefixtures("captured")
def test_what_holds_at_the_first_size_by_chance_shows_at_the_second(device: str) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum(1) * (8 / x.shape[1])

    run = st.bucketed(program, {"x": {1: st.Dim("n", max=8, buckets=[8])}})
    for n in (8, 5, 5):
        torch.testing.assert_close(run(rows(n, device)), program(rows(n, device)))


@pytest.mark.usefixtures("captured")
def test_gradients_are_compared_too(device: str) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, size: int) -> Tensor:
            ctx.size = size  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return gradient * ctx.size, None  # type: ignore[attr-defined]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Scaled.apply(self.weight, x.shape[1])
            return (x * out).sum(1)

    ours, theirs = Model().to(device), Model().to(device)
    run = st.bucketed(ours, DIMS)
    for n in (5, 6):
        for model in (run, theirs):
            model(rows(n, device)).sum().backward()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert any("gradient of weight" in reason for reason in run.stats().fallbacks)


def test_a_difference_in_a_gradient_names_the_argument(device: str) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return gradient * ctx.scale, None  # type: ignore[attr-defined]

    def scaled(inputs: dict[str, Tensor]) -> Tensor:
        return Scaled.apply(inputs["y"], int(inputs["x"].shape[1])) * inputs["x"].sum()  # type: ignore[no-any-return]

    run = st.bucketed(scaled, {"inputs": {"x": {1: SEQ}}}, check=False)
    y = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
    report = run.check({"x": rows(5, device), "y": y})
    assert report.difference.startswith("gradient of argument inputs['y'] differs by")


@pytest.mark.usefixtures("captured")
def test_the_answer_of_a_run_that_found_that_there_is_no_graph_is_compared_too(device: str) -> None:
    weight = torch.ones(4, dtype=torch.float64, device=device, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        x.mul_(2)
        return (x * weight).sum(1) * (1 / x.shape[1])

    run = st.bucketed(program, DIMS)
    for n in (5, 6):
        x, own = rows(n, device), rows(n, device)
        found, expected = run(x), program(own)
        torch.testing.assert_close((found, x), (expected, own))
        gradients = [torch.autograd.grad(out.sum(), weight)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)
    assert run.stats().fallbacks


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_rounding_is_no_difference(dtype: torch.dtype, grad: bool, device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(device, dtype)

    def program(x: Tensor) -> Tensor:
        return F.softmax(net(x), 1).sum(1) + net(x).mean(1)

    run = st.bucketed(program, DIMS)
    with torch.set_grad_enabled(grad):
        for n in (1, 5, 7, 13, 16):
            run(rows(n, device, dtype))
    stats = run.stats()
    assert stats.checked == 4  # at 1, 5, 13 and 16
    assert not stats.fallbacks
    assert not stats.not_checked


@pytest.mark.usefixtures("captured")
def test_rounding_of_its_own_autocast_is_no_difference(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(4, 64), layer, nn.Linear(64, 8)).to(device)

    def program(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return F.cross_entropy(net(x).transpose(1, 2).float(), x[..., 0].long().clamp(0, 7))

    run = st.bucketed(program, DIMS)
    for n in (3, 5, 7, 13, 15):
        run(rows(n, device, torch.float32)).backward()
    assert run.stats().checked == 4
    assert not run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_a_float32_result_of_bfloat16_is_not_compared_as_coarsely(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 512).to(device, torch.bfloat16)

    def program(x: Tensor) -> Tensor:
        return net(x).relu().sum(1).float().sum() * (1 / x.shape[1])

    run = st.bucketed(program, {"x": {1: st.Dim("n", max=64, buckets=[64])}})
    with torch.no_grad():
        result = run(rows(60, device, torch.bfloat16))  # a fifteenth less by the bucket's size
        torch.testing.assert_close(result, program(rows(60, device, torch.bfloat16)))
    assert run.stats().fallbacks


@pytest.mark.usefixtures("captured")
def test_rounding_that_was_measured_is_not_measured_at_each_size(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(4, 64), layer, nn.Linear(64, 8)).to(device)
    plain_runs = 0

    def program(x: Tensor) -> Tensor:
        nonlocal plain_runs
        plain_runs += not isinstance(x, st.PaddedTensor)
        with torch.autocast(device, torch.bfloat16):
            return net(x).float().square().mean()

    run, costs = st.bucketed(program, DIMS), []
    for n in (3, 5, 7, 13, 15, 11, 10):
        plain_runs = 0
        run(rows(n, device, torch.float32)).backward()
        costs.append(plain_runs)
    assert run.stats().checked == 6
    assert not run.stats().fallbacks
    assert sum(cost > 1 for cost in costs) <= 2


@pytest.mark.usefixtures("captured")
def test_each_bucket_is_checked_at_two_sizes_and_at_the_smallest(device: str) -> None:
    table = torch.ones(3, device=device)
    run = st.bucketed(lambda x: x.softmax(1) / len(table), DIMS)  # the length of a plain tensor is no size of a call
    checked = []
    for n in (5, 5, 6, 7, 1, 1, 13, 14, 15):
        run(rows(n, device))
        checked.append(run.stats().checked)
    assert checked == [1, 1, 2, 2, 3, 3, 4, 5, 5]


@pytest.mark.usefixtures("captured")
def test_every_nth_call_sees_python_state_that_changed(device: str) -> None:
    held = {"scale": 2.0}
    get = held.__getitem__

    def program(x: Tensor) -> Tensor:
        return x.sum(1) * get("scale")

    run = st.bucketed(program, DIMS, check=2)
    run(rows(5, device))
    held["scale"] = 3.0
    for _ in range(4):
        result = run(rows(5, device))
    torch.testing.assert_close(result, program(rows(5, device)))


def test_an_error_of_the_program_is_raised_without_a_word_about_graphs(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = st.bucketed(lambda x: x @ torch.ones(3, 3, dtype=x.dtype, device=x.device), DIMS)
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"):
        run(rows(5, device))
    assert not [record for record in caplog.records if record.name.startswith("subtensors.bucketed")]


def test_nothing_is_run_twice_where_checks_are_off(device: str) -> None:
    runs = []

    def program(x: Tensor) -> Tensor:
        runs.append(None)
        return x.sum(1)

    run = st.bucketed(program, DIMS, check=False)
    run(rows(5, device))
    without = len(runs)
    st.bucketed(program, DIMS)(rows(5, device))
    assert len(runs) == 2 * without + 1


@pytest.mark.usefixtures("captured")
def test_a_check_on_demand_reports_and_writes_nothing(device: str) -> None:
    norm = nn.BatchNorm1d(4, dtype=torch.float64).to(device)
    run = st.bucketed(lambda x: norm(x.transpose(1, 2)), DIMS, check=False)
    with torch.no_grad():
        report = run.check(rows(5, device))
        assert report.passed
        assert dict(report.sizes) == {"n": 5}
        assert norm.running_mean is not None
        assert norm.running_mean.tolist() == [0] * 4
        wrong = st.bucketed(mean_over_the_bucket, DIMS, check=False)
        wrong(rows(5, device))
        report = wrong.check(rows(5, device))
    assert not report.passed
    assert report.difference.startswith("result differs by")
    assert any("arithmetic with 8, the bucket of dim 1" in line for line in report.lines)


@pytest.mark.parametrize("check", [0, -1, True, "always", 1.5])
def test_another_schedule_is_refused(check: object) -> None:
    with pytest.raises(ValueError, match="check is 'first', False or an int of at least 1"):
        st.bucketed(torch.exp, {0: {0: SEQ}}, check=check)  # type: ignore[arg-type]


def test_ragged_arguments_are_compared_with_the_program_on_these_arguments(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(1) * y.sum() * float(os.environ["SCALE"]), x.sum()

    def ragged(*lengths: int) -> Tensor:
        return st.pad([torch.randn(k, dtype=torch.float64, device=device) for k in lengths], {0: st.Dim("m", max=16)})

    monkeypatch.setenv("SCALE", "2")
    run = st.bucketed(program, {"y": {0: SEQ}}, check=2)
    y = torch.ones(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for lengths in ((3, 5), (3, 5), (2, 7), (4, 4)):
            sums = [float(row.sum()) for row in run(ragged(*lengths), y)[0]]
            assert sums == pytest.approx([6, 6])
        assert (run.stats().checked, dict(run.stats().not_checked)) == (4, {})
        monkeypatch.setenv("SCALE", "3")  # which nothing watches
        for _ in range(2):
            rows, _ = run(ragged(4, 6), y)
    assert [float(row.sum()) for row in rows] == pytest.approx([9, 9])
    assert any("differ" in reason for reason in run.stats().fallbacks)


def test_a_ragged_batch_of_another_longest_row_is_compared_and_other_rows_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pretend(monkeypatch)
    table = torch.randn(16, dtype=torch.float64, device=device)
    dim = st.Dim("m", max=16, buckets=[8, 16])
    run = st.bucketed(lambda x: x + table[: x.shape[1]], {"x": {1: dim}})  # to Python the size is the bucket's
    with torch.no_grad():
        for lengths in ((8, 3), (8, 5), (8, 2), (7, 8), (6, 8), (4, 8)):
            rows = [torch.randn(k, dtype=torch.float64, device=device) for k in lengths]
            found = run(st.pad(rows, {0: dim}))
            assert all(torch.equal(y, x + table[: len(x)]) for x, y in zip(rows, found, strict=True))
        assert run.stats().checked == 2
        run(st.pad([torch.zeros(k, dtype=torch.float64, device=device) for k in (5, 4)], {0: dim}))
    assert run.stats().checked == 3
