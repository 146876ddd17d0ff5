"""Rows of the benchmark of whole jobs over varying lengths, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev

from rich.console import Group

from benchmarks.rows import Setting
from benchmarks.table import describe, figure, in_sections

STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% points of Student's distribution with 1, 2, ... degrees of freedom; 2.2 beyond."""


def interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% interval of a mean; None of a single value.

    >>> interval([1.0, 1.0, 1.0]), interval([1.0])
    (0.0, None)
    """
    n = len(values)
    if n < 2:
        return None
    return float((STUDENT[n - 2] if n - 2 < len(STUDENT) else 2.2) * stdev(values) / n**0.5)


@dataclass(frozen=True)
class JobRow:
    """One way to do a job.

    Args:
        case: the model and what is done with it.
        lengths: the distribution of its lengths.
        variant: which way.
        reason: why there are no figures, in a line; "" where there are.
        batch: sequences of a batch; a pack that is made up anew holds others.
        steps: batches of the first pass.
        distinct: longest lengths among them.
        first_s: the first pass, with everything that is compiled and captured.
        second_s: the second pass, over other batches.
        beside: ways that were compiling at the same time.
        step_ms: of steps enqueued back to back; mean of the visits.
        interval_ms: half of its 95% interval.
        per_s: tokens, or seconds of speech, in a second of them; padding is none.
        p50_ms, p99_ms: of single steps up to a synchronized device, of all visits.
        visits: how often it was visited after the first two passes.
        allocated_mb: the most that torch had allocated in a visit, graphs' own memory left out, MiB; None on a CPU.
        reserved_mb: device memory that torch held at the end, pools of graphs included, MiB; None on a CPU.
        first_graphs, graphs: captured in the first pass, and in all.
        compilations: modules that Inductor made, forward and backward each one.
        fallbacks: calls that a runner answered without a graph.
        difference: of losses, relative to eager's; or of hidden states' errors against float64, over eager's.
        transformers: version.
        setting: where it was measured.
    """

    case: str
    lengths: str
    variant: str
    reason: str
    transformers: str | None
    setting: Setting = field(repr=False)
    batch: int | None = None
    steps: int | None = None
    distinct: int | None = None
    first_s: float | None = None
    second_s: float | None = None
    beside: int | None = None
    step_ms: float | None = None
    interval_ms: float | None = None
    per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    visits: int | None = None
    allocated_mb: float | None = None
    reserved_mb: float | None = None
    first_graphs: int | None = None
    graphs: int | None = None
    compilations: int | None = None
    fallbacks: int | None = None
    difference: float | None = None


def of_visits(steps_ms: Sequence[float], per_s: Sequence[float], walls_ms: Sequence[float]) -> dict[str, float | None]:
    """Return the figures of visits.

    Args:
        steps_ms, per_s: one each.
        walls_ms: of the single steps of all.
    """
    walls = sorted(walls_ms)
    return {
        "step_ms": mean(steps_ms),
        "interval_ms": interval(steps_ms),
        "per_s": mean(per_s),
        "p50_ms": median(walls),
        "p99_ms": walls[int(len(walls) * 0.99)],
        "visits": len(steps_ms),
    }


COLUMNS: dict[str, Callable[[JobRow], str]] = {
    "case": lambda row: row.case,
    "variant": lambda row: row.variant,
    "first s": lambda row: figure(row.first_s, 3),
    "second s": lambda row: figure(row.second_s, 3),
    "step ms": lambda row: figure(row.step_ms),
    "+-": lambda row: figure(row.interval_ms, 2),
    "per s": lambda row: figure(row.per_s),
    "p50 ms": lambda row: figure(row.p50_ms),
    "p99 ms": lambda row: figure(row.p99_ms),
    "allocated MiB": lambda row: figure(row.allocated_mb),
    "reserved MiB": lambda row: figure(row.reserved_mb),
    "graphs": lambda row: figure(row.graphs),
    "compilations": lambda row: figure(row.compilations),
    "fallbacks": lambda row: figure(row.fallbacks),
    "difference": lambda row: figure(row.difference, 2),
}


def table(rows: Sequence[JobRow]) -> Group:
    """One line a row, cases apart from each other; under them those without figures, with the reason."""
    measured = [row for row in rows if not row.reason]
    reasons = [f"{row.case}, {row.variant}: {row.reason}" for row in rows if row.reason]
    shown = [in_sections(measured, COLUMNS, describe(measured))] if measured else []
    return Group(*shown, *reasons)


def markdown(rows: Sequence[JobRow]) -> str:
    """Return the rows of one case as a table for a page; the best figure of a column is bold."""
    columns: dict[str, tuple[Callable[[JobRow], float | None], int, bool]] = {
        "first 100 steps, s": (lambda row: row.first_s, 3, False),
        "next 100, s": (lambda row: row.second_s, 3, False),
        "step, ms": (lambda row: row.step_ms, 4, False),
        "per second": (lambda row: row.per_s, 4, True),
        "p99, ms": (lambda row: row.p99_ms, 4, False),
        "allocated MiB": (lambda row: row.allocated_mb, 4, False),
        "reserved MiB": (lambda row: row.reserved_mb, 4, False),
        "graphs": (lambda row: row.graphs, 4, False),
        "compilations": (lambda row: row.compilations, 4, False),
    }
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    measured = [row for row in rows if not row.reason]
    best = {}
    for name, (value, _, is_more_better) in list(columns.items())[:7]:
        values = [found for row in measured if (found := value(row)) is not None]
        best[name] = (max if is_more_better else min)(values, default=None)
    for row in rows:
        if row.reason:
            lines.append(f"| {row.variant} | {row.reason} " + "| " * (len(columns) - 1) + "|")
            continue
        cells = []
        for name, (value, digits, _) in columns.items():
            cell = figure(value(row), digits)
            if name == "step, ms":
                cell += f" +- {figure(row.interval_ms, 2)}"
            cells.append(f"**{cell}**" if value(row) is not None and value(row) == best.get(name) else cell)
        lines.append(f"| {row.variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(rows: Sequence[JobRow]) -> str:
    """Return a table of each case and distribution of lengths, with what is above it."""
    parts = []
    for case, lengths in dict.fromkeys((row.case, row.lengths) for row in rows):
        mine = [row for row in rows if (row.case, row.lengths) == (case, lengths)]
        batch = next((row.batch for row in mine if row.batch), None)
        distinct = max((row.distinct for row in mine if row.distinct), default=None)
        versions = f"transformers {mine[0].transformers}"
        head = f"`{case}`, lengths `{lengths}`, {batch} a batch, {distinct} distinct longest lengths in the first pass"
        parts.append(f"{head} ({describe(mine)}, {versions}):\n\n{markdown(mine)}")
    return "\n\n".join(parts)
