"""The cost model of linear + cross entropy predicts memory and time, and chooses the best schedule by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some

import subtensors as st
from benchmarks.chunked_rows import LossRow
from benchmarks.fit_plan import fitted, ours, plan_of
from benchmarks.rows import load
from subtensors.dispatch.chunked.cost_model import (
    CPU,
    H200,
    MAX_SLOWDOWN,
    ChunkPlan,
    LossShape,
    Rates,
    _keeping,
    block_columns,
    by_columns,
    by_rows,
    device_rates,
    plan_linear_cross_entropy,
    plan_row_statistics,
)
from subtensors.kernels.cross_entropy.column_passes import ColumnPasses
from subtensors.kernels.cross_entropy.exp_passes import head_has_exponentials
from subtensors.kernels.cross_entropy.linear_cross_entropy import linear_cross_entropy
from subtensors.kernels.cross_entropy.logits_block import GradFlags, LinearHead

MIB = 2**20
GEMMA, LLAMA, GPT2 = LossShape(8192, 2304, 256000), LossShape(4096, 4096, 128256), LossShape(16384, 768, 50304)
MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "chunked.json"

shapes = some.builds(
    LossShape,
    rows=some.integers(1, 40000),
    width=some.integers(1, 9000),
    classes=some.integers(2, 300000),
    needs_hidden=some.booleans(),
    needs_weight=some.booleans(),
)


@given(shape=shapes, limit=some.integers(1, 2**37), accumulate=some.sampled_from(["exact", "fast"]))
def test_a_plan_stays_within_the_limit_if_any_does(shape: LossShape, limit: int, accumulate: str) -> None:
    plan = plan_linear_cross_entropy(shape, memory_limit=limit, accumulate=accumulate)  # type: ignore[arg-type]
    least = plan_linear_cross_entropy(shape, memory_limit=0, accumulate=accumulate)  # type: ignore[arg-type]
    assert plan.bytes <= max(limit, least.bytes)
    assert plan.seconds > 0


@given(shape=shapes, limits=some.tuples(some.integers(1, 2**37), some.integers(1, 2**37)))
def test_more_memory_never_makes_the_plan_slower(shape: LossShape, limits: tuple[int, int]) -> None:
    small, large = sorted(limits)
    tight, roomy = (plan_linear_cross_entropy(shape, memory_limit=limit) for limit in (small, large))
    if tight.bytes <= small:
        # `kept` is rounded to tiles, which a limit that is a little larger may do to the disadvantage of one.
        assert roomy.seconds <= 1.02 * tight.seconds


@given(shape=shapes, rows=some.integers(1, 40000), accumulate=some.sampled_from(["exact", "fast"]))
def test_requested_rows_bound_the_memory(shape: LossShape, rows: int, accumulate: str) -> None:
    plan = plan_linear_cross_entropy(shape, rows=rows, accumulate=accumulate)  # type: ignore[arg-type]
    asked = by_rows(shape, rows, accumulate)  # type: ignore[arg-type]
    assert plan.bytes <= asked.bytes
    assert plan.seconds <= asked.seconds


@pytest.mark.parametrize("shape", [GEMMA, LLAMA, GPT2])
def test_without_a_limit_a_slightly_slower_plan_may_save_memory(shape: LossShape) -> None:
    free = 120 * 2**30
    plan = plan_linear_cross_entropy(shape, free_bytes=free)
    fastest = plan_linear_cross_entropy(shape, memory_limit=free)
    assert plan.bytes < fastest.bytes
    assert plan.seconds <= (1 + MAX_SLOWDOWN) * fastest.seconds


def test_little_free_memory_is_a_limit() -> None:
    plan = plan_linear_cross_entropy(GEMMA, free_bytes=2 * 2**30)
    assert plan.bytes <= 0.8 * 2 * 2**30


def test_row_statistics_keep_as_many_columns_as_fit() -> None:
    shape = LossShape(8192, 2048, 151936)
    products = []
    for limit in range(1000, 2000, 100):
        plan = plan_row_statistics(shape, memory_limit=limit * MIB)
        assert plan is not None
        assert 0 <= limit * MIB - plan.bytes < 256 * 8192 * 2, "less than a tile is unused"
        products.append(plan.products)
    assert products == sorted(products, reverse=True)
    assert products[4] == pytest.approx(3.44, abs=0.005), "at 1400 MiB"


@given(shape=shapes, limit=some.integers(2**20, 2**37), rates=some.sampled_from([H200, CPU]))
def test_of_columns_as_many_are_kept_as_fit(shape: LossShape, limit: int, rates: Rates) -> None:
    shape = replace(shape, needs_weight=True)
    for columns in block_columns(rates):
        none = by_columns(shape, columns, 0, rates)
        most = min(shape.classes, (limit - none.bytes) // (16 * shape.itemsize)) // 256 * 256
        counts = [kept for kept in (256, most // 4096 * 256) if kept > 0]
        fits = any(by_columns(shape, columns, kept, rates).bytes <= limit for kept in counts)
        if columns < shape.classes and fits:
            assert [*_keeping(none, shape, limit, rates)]


def test_a_frozen_weight_is_planned_by_rows_with_two_products() -> None:
    plan = plan_linear_cross_entropy(replace(GEMMA, needs_weight=False), memory_limit=300 * MIB)
    assert plan.schedule.columns is None
    assert plan.products == 2
    assert plan.bytes < 300 * MIB


def test_with_fewer_rows_than_the_width_every_block_is_kept_in_the_weight_gradients_memory() -> None:
    plan = plan_linear_cross_entropy(LLAMA, memory_limit=1200 * MIB)
    assert plan.schedule.columns is not None
    assert plan.products == 3


def test_exact_sums_take_two_more_bytes_an_element_of_the_weight() -> None:
    fast, exact = by_rows(GEMMA, 2048, "fast"), by_rows(GEMMA, 2048, "exact")
    assert exact.bytes - fast.bytes == 2 * 2304 * 256000
    assert by_rows(GEMMA, 8192, "exact").bytes == by_rows(GEMMA, 8192, "fast").bytes


@given(shape=shapes, columns=some.integers(1, 40000), kept=some.integers(0, 300000))
def test_a_plan_keeps_no_more_columns_than_need_memory(shape: LossShape, columns: int, kept: int) -> None:
    columns = min(columns, shape.classes)
    plan = by_columns(shape, columns, kept)
    hidden, weight = (
        torch.empty(n, shape.width, dtype=torch.bfloat16, device="meta") for n in (shape.rows, shape.classes)
    )
    needs = GradFlags(shape.needs_hidden, shape.needs_weight, False)
    linear = LinearHead(hidden, weight, None, needs, weight.dtype, None)
    begin, end = ColumnPasses(linear, columns, plan.schedule.kept).split.in_buffer
    assert 0 <= max(0, end - begin - columns) - plan.schedule.kept < 16, "classes begin at multiples of 16"
    assert end == ColumnPasses(linear, columns, kept).split.in_buffer[1]


def plans(shape: LossShape) -> list[ChunkPlan]:
    return [
        by_rows(shape, 256, "fast"),
        by_rows(shape, 256, "exact"),
        by_rows(shape, shape.rows, "exact"),
        by_columns(shape, 1056, 0),
        by_columns(shape, 1056, 2112),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [LossShape(1024, 512, 20000), LossShape(512, 1024, 20000), LossShape(16384, 1024, 8192)]
)
@pytest.mark.parametrize("number", range(5))
def test_a_plan_predicts_the_allocated_bytes(shape: LossShape, number: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    fits = head_has_exponentials(torch.bfloat16, shape.width, shape.classes, device)
    plan = plans(replace(shape, exponentials=fits))[number]
    hidden = torch.randn(shape.rows, shape.width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(shape.classes, shape.width, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(shape.classes, (shape.rows,), device="cuda")
    for _ in range(2):  # the first call makes workspaces that stay
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = linear_cross_entropy(hidden, weight, target, **plan.schedule._asdict())
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        del result
    assert taken == pytest.approx(plan.bytes, abs=5 * MIB)  # of each block the allocator may leave a MiB unused


MEASURED_ROWS = ours(load(LossRow, MEASURED))


def test_fitting_recovers_the_rates_that_made_the_rows() -> None:
    rates = Rates(700e12, 3e12, 30e-6)
    rows = [replace(row, step_ms=plan_of(row, rates).seconds * 1e3) for row in MEASURED_ROWS]
    found = fitted(rows)
    assert (found.flops, found.bandwidth, found.launch) == pytest.approx((700e12, 3e12, 30e-6), rel=1e-6)


@pytest.mark.parametrize("row", MEASURED_ROWS, ids=lambda row: f"{row.shape}-{row.variant}")
def test_the_model_is_near_what_was_measured(row: LossRow) -> None:
    plan = plan_of(row, H200)
    assert plan.bytes / MIB == pytest.approx(row.peak_mb, rel=0.02)
    # Chunks of a few hundred rows are worse products than the model knows of.
    assert plan.seconds * 1e3 == pytest.approx(row.step_ms, rel=0.12 if (plan.schedule.rows or 512) >= 512 else 0.25)


@given(shape=shapes, rows=some.tuples(some.integers(1, 40000), some.integers(1, 40000)))
def test_fewer_rows_never_take_more_memory(shape: LossShape, rows: tuple[int, int]) -> None:
    few, many = (plan_linear_cross_entropy(shape, rows=count) for count in sorted(rows))
    assert few.bytes <= many.bytes


def loss_text(device: str, rows: int | None = None) -> str:
    logits = F.linear(st.chunk(torch.empty(512, 64, device=device), rows=rows), torch.empty(1000, 64, device=device))
    return st.explain(logits).splitlines()[-1]


def test_no_time_of_a_gpu_is_given_for_tensors_on_a_cpu() -> None:
    assert loss_text("cpu").endswith(" MiB")
    assert loss_text("meta").endswith(" ms (NVIDIA H200)")
    assert ", an estimated " in loss_text("meta")


def test_small_logits_are_there_at_once_unless_rows_are_asked_for() -> None:
    assert "all logits at once" in loss_text("cpu")
    assert "128 rows of the logits" in loss_text("cpu", rows=128)


PROPERTIES = "name major minor multi_processor_count clock_rate memory_clock_rate memory_bus_width".split()

DEVICES: dict[str, tuple[tuple[object, ...], tuple[float, float, int]]] = {
    "an H100": (("NVIDIA H100 80GB HBM3", 9, 0, 132, 1980000, 2619000, 5120), (687e12, 3.15e12, 132)),
    "an A100": (("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1410000, 1593000, 5120), (200e12, 1.92e12, 108)),
    "one that torch says little of": (("NVIDIA H100", 9, 0), (H200.flops, H200.bandwidth, 132)),
}
"""The properties of a device, and the rates that follow, to three digits."""


@pytest.mark.parametrize("case", DEVICES)
def test_rates_are_those_of_the_device(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, (flops, bandwidth, multiprocessors) = DEVICES[case]
    found = SimpleNamespace(**dict(zip(PROPERTIES, told, strict=False)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", None)
    rates = device_rates.__wrapped__(torch.device("cuda", 0))
    assert rates.flops == pytest.approx(flops, rel=0.01)
    assert rates.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert (rates.multiprocessors, rates.launch) == (multiprocessors, H200.launch)
    assert rates.device == (found.name if rates != H200 else H200.device)
    plan = plan_linear_cross_entropy(GEMMA, memory_limit=1400 * MIB, rates=rates)
    assert str(plan).endswith(f"({rates.device})")
    assert plan.schedule.columns in block_columns(rates)


@pytest.mark.gpu
def test_this_gpu_has_rates_of_its_own() -> None:
    rates = device_rates(torch.device("cuda", 0))
    assert rates == H200 if torch.cuda.get_device_name(0) == H200.device else rates.device != H200.device
    assert 1e12 < rates.bandwidth < 2e13
    assert 1e13 < rates.flops < 1e16
