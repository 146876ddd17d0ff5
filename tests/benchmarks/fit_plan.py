"""Rates of a device for the plan of chunked losses, fitted to rows of the `chunked` benchmark.

The model's seconds are a sum of flops, bytes and chunks, each over its rate (`dispatch/chunked/cost_model.py`), so they
are linear in the rates' inverses. The sum of relative errors is made least: each row is divided by its measured time,
and squares are weighed by the error that the row had before, so that a row that something disturbed counts for little.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.chunked_rows import LossRow
from benchmarks.rows import load
from subtensors.dispatch.chunked.cost_model import ChunkPlan, LossShape, Rates, by_columns, by_rows

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "chunked.json"
"""The rows that the repository keeps."""

SHORTEST = 512
"""Rows of a chunk that is fitted: shorter ones are worse products than the model knows of."""


def plan_of(row: LossRow, rates: Rates) -> ChunkPlan:
    """The plan of one of our settings.

    Args:
        row: whose variant is "exact/ROWS", "fast/ROWS" or "columns/COLUMNS+KEPT".
        rates: of the device.
    """
    shape = LossShape(row.tokens, row.hidden, row.vocabulary)
    way, _, size = row.variant.partition("/")
    if way == "columns":
        columns, _, kept = size.partition("+")
        return by_columns(shape, int(columns), int(kept or 0), rates)
    return by_rows(shape, int(size), "exact" if way == "exact" else "fast", rates)


def ours(rows: Sequence[LossRow]) -> list[LossRow]:
    """Those of rows that are the kernels' own settings."""
    return [row for row in rows if row.variant.startswith(("exact/", "fast/", "columns/"))]


def fitted(rows: Sequence[LossRow]) -> Rates:
    """The rates whose model is nearest to measured rows.

    Args:
        rows: of the kernels' own settings; at least three different ones.
    """
    long = [row for row in rows if (plan_of(row, UNIT).schedule.rows or SHORTEST) >= SHORTEST]
    parts = [[plan_of(row, one).seconds / (row.step_ms * 1e-3) for one in ALONE] for row in long]
    of_rows, ones = torch.tensor(parts, dtype=torch.float64), torch.ones(len(parts), 1, dtype=torch.float64)
    weights = ones
    for _ in range(ROUNDS):
        found = torch.linalg.lstsq(of_rows * weights, weights).solution
        weights = (of_rows @ found - 1).abs().clamp(min=1e-3).rsqrt()
    flops, bandwidth, launch = found.flatten().tolist()
    return Rates(1 / flops, 1 / bandwidth, launch)


ROUNDS = 30


UNIT = Rates(1.0, 1.0, 1.0)
ALONE = (Rates(1.0, inf, 0.0), Rates(inf, 1.0, 0.0), Rates(inf, inf, 1.0))
"""Rates at which the model's seconds are the flops, the bytes, and the launches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--rows", type=Path, default=KEPT, help="(docs/benchmarks/chunked.json of the repository)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the rates, and how far the model is from each row with them; returns the exit status."""
    if not options.rows.is_file():
        print(f"--rows {options.rows}: no such file; `bench chunked` writes one", file=sys.stderr)
        return 2
    rows = ours(load(LossRow, options.rows))
    rates = fitted(rows)
    console = Console()
    console.print(f"Rates(flops={rates.flops:.4g}, bandwidth={rates.bandwidth:.4g}, launch={rates.launch:.3g})")
    for row in rows:
        plan = plan_of(row, rates)
        error, memory = plan.seconds * 1e3 / row.step_ms - 1, plan.bytes / 2**20 / (row.peak_mb or inf) - 1
        console.print(f"{row.shape:10} {row.variant:22} {row.step_ms:7.2f} ms {error:+7.1%}, MiB {memory:+7.1%}")
    return 0
