"""Rows of the benchmark of programs over varying sizes, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Group

from benchmarks.rows import Setting
from benchmarks.table import figure, in_sections


@dataclass(frozen=True)
class VaryingRow:
    """One way to answer requests of varying sizes, in a process of its own with cold caches.

    Args:
        case: the model and its batch.
        variant: which way.
        requests: how many, and of how many distinct sizes.
        distinct: sizes among them.
        first_pass_s: the first pass over them, with everything that is compiled and captured.
        p50_ms, p99_ms: of one request in the third pass, up to a synchronized device.
        host_ms: host time until a call returned, median.
        graphs: captured; None where nobody counts.
        recompiles: after the first compilation; None where nobody counts.
        capture_ms: one capture, median.
        runner_ms: a call's time above that of a bare replay of its graph.
        pool_mb: of the graphs' pool, MiB.
        largest_mb: of the pool with the largest bucket's graph alone, MiB.
        reserved_mb: device memory that torch holds at the end, MiB; None on a CPU.
        error: against the model in float64, over that of the plain model in the same dtype.
        setting: where it was measured.
        results_ms: what of `runner_ms` goes into copies of the results.
    """

    case: str
    variant: str
    requests: int
    distinct: int
    first_pass_s: float
    p50_ms: float
    p99_ms: float
    host_ms: float
    graphs: int | None
    recompiles: int | None
    capture_ms: float | None
    runner_ms: float | None
    pool_mb: float | None
    largest_mb: float | None
    reserved_mb: float | None
    error: float
    setting: Setting = field(repr=False)
    results_ms: float | None = None


COLUMNS: dict[str, Callable[[VaryingRow], str]] = {
    "case": lambda row: row.case,
    "variant": lambda row: row.variant,
    "first pass s": lambda row: figure(row.first_pass_s, 3),
    "p50 ms": lambda row: figure(row.p50_ms, 3),
    "p99 ms": lambda row: figure(row.p99_ms, 3),
    "graphs": lambda row: figure(row.graphs, 3),
    "recompiles": lambda row: figure(row.recompiles, 3),
    "capture ms": lambda row: figure(row.capture_ms, 3),
    "above replay ms": lambda row: figure(row.runner_ms, 2),
    "copies ms": lambda row: figure(row.results_ms, 2),
    "pool MiB": lambda row: figure(row.pool_mb, 4),
    "largest alone": lambda row: figure(row.largest_mb, 4),
    "reserved MiB": lambda row: figure(row.reserved_mb, 4),
    "error / plain": lambda row: figure(row.error, 3),
}


def table(rows: Sequence[VaryingRow], title: str) -> Group:
    """One line a row, cases apart from each other."""
    return in_sections(rows, COLUMNS, title)
