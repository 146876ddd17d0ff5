"""The benchmark of plans: how much slower the chosen schedule of a chunked loss is than the best of all that fit."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console

from benchmarks.chunked_variants import SHAPES, TINY, Shape
from benchmarks.options import add_shared_options, names
from benchmarks.rounds import Step, in_rounds
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded
from subtensors.dispatch.chunked.cost_model import (
    ChunkPlan,
    LossShape,
    Rates,
    device_rates,
    plan_linear_cross_entropy,
    possible_plans,
)
from subtensors.kernels.cross_entropy.cross_entropy_autograd import Schedule, differentiable_cross_entropy
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate

MOST_CHUNKS = 32
"""The most chunks or blocks of a schedule that is measured: what takes more is slow, and never chosen for its speed."""

LIMITS = (1.1, 1.5, 2.0, 4.0)
"""The limits that plans are chosen for, over the least memory that a schedule takes."""

SUMS: tuple[Accumulate, ...] = ("exact", "fast")


@dataclass(frozen=True)
class ChoiceRow:
    """A plan, and the best schedule within the same memory.

    Args:
        shape: which loss.
        accumulate: how the weight's gradient is summed.
        limit_mb: the memory that both may take, MiB.
        chosen, best: the schedules.
        chosen_ms, best_ms: their times, medians.
        expected_ms: what the model of costs says of the chosen one.
        schedules: how many fit.
        setting: where they were measured.
    """

    shape: str
    accumulate: str
    limit_mb: float
    chosen: str
    best: str
    chosen_ms: float
    best_ms: float
    expected_ms: float
    schedules: int
    setting: Setting = field(repr=False)


def schedules(shape: LossShape, accumulate: Accumulate, rates: Rates) -> dict[Schedule, ChunkPlan]:
    """Return the plans that are measured: what is chosen for any limit, and its rivals of few chunks."""
    least = min(plan.bytes for plan in possible_plans(shape, accumulate, None, None, rates))
    found = {}
    for limit in (int(least * share) for share in LIMITS):
        for plan in possible_plans(shape, accumulate, None, limit, rates):
            part = plan.schedule.rows or shape.rows, plan.schedule.columns or shape.classes
            if part[0] * part[1] * MOST_CHUNKS >= shape.rows * shape.classes:
                found[plan.schedule] = plan
        chosen = plan_linear_cross_entropy(shape, accumulate=accumulate, memory_limit=limit, rates=rates)
        found[chosen.schedule] = chosen
    return found


def steps(shape: Shape, plans: Mapping[Schedule, ChunkPlan], device: str) -> dict[str, Step]:
    """Return a step of each schedule, by its text."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    target = torch.randint(shape.vocabulary, (shape.tokens,), device=device)

    def step(schedule: Schedule) -> Step:
        def run() -> None:
            hidden.grad = weight.grad = None
            differentiable_cross_entropy(hidden, weight, target, schedule=schedule).backward()  # type: ignore[no-untyped-call]

        return run

    return {text(schedule): step(schedule) for schedule in plans}


def text(schedule: Schedule) -> str:
    """Return a schedule in few letters."""
    if schedule.columns is None:
        return f"{schedule.rows or 'all'} rows, {schedule.accumulate}"
    return f"{schedule.columns} + {schedule.kept} columns"


def measure(name: str, shape: Shape, tiny: bool, device: str, repeats: int) -> list[ChoiceRow]:
    """Measure all schedules of a loss in one set of rounds; returns a row a limit and way to sum.

    Args:
        name: of the shape.
        shape: the loss.
        tiny: whether the sizes are cut down.
        device: "cpu" or "cuda".
        repeats: rounds.
    """
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    rates, sizes = device_rates(place), LossShape(shape.tokens, shape.hidden, shape.vocabulary)
    plans = {accumulate: schedules(sizes, accumulate, rates) for accumulate in SUMS}
    times = in_rounds(steps(shape, plans["exact"] | plans["fast"], device), device, repeats)
    rows = []
    for accumulate, own in plans.items():
        least = min(plan.bytes for plan in possible_plans(sizes, accumulate, None, None, rates))
        for limit in (int(least * share) for share in LIMITS):
            chosen = plan_linear_cross_entropy(sizes, accumulate=accumulate, memory_limit=limit, rates=rates)
            fitting = {text(plan.schedule) for plan in own.values() if plan.bytes <= limit}
            best, mine = min(fitting, key=lambda way: times[way][0]), text(chosen.schedule)
            took = times[mine][0], times[best][0], chosen.seconds * 1e3
            rows.append(
                ChoiceRow(name, accumulate, limit / 2**20, mine, best, *took, len(fitting), Setting.now(device, tiny))
            )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated (%(default)s)")
    add_shared_options(parser, "a small shape", repeats=7)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    shapes = (
        {"tiny": TINY} if options.tiny else {name: SHAPES[name] for name in names(options.shapes, [*SHAPES], "shape")}
    )
    rows = list[ChoiceRow]()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        rows += measure(name, shape, options.tiny, options.device, options.repeats)
        save(rows, options.out / "plan_choice.json")
    columns = ["shape", "sums", "limit MiB", "chosen", "ms", "model ms", "of", "best", "its ms", "slower"]
    Console().print(folded(describe(rows), columns, [cells(row) for row in rows]))
    return 0


def cells(row: ChoiceRow) -> list[str]:
    """Return a row as cells of a table."""
    named = [row.shape, row.accumulate, figure(row.limit_mb), row.chosen, figure(row.chosen_ms)]
    best = [row.best, figure(row.best_ms), f"{row.chosen_ms / row.best_ms - 1:.1%}"]
    return [*named, figure(row.expected_ms), str(row.schedules), *best]
