"""Measuring many rows, each in a process of its own, and saving them as they come."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.options import add_shared_options
from benchmarks.processes import MeasurementFailed, run_cold
from benchmarks.rows import Row, from_json, load, save

COPY = "copy"

Pair = tuple[str, str]
"""A set of parameters and a variant."""


def sweep(
    benchmark: str, pairs: Sequence[Pair], options: argparse.Namespace, console: Console
) -> tuple[list[Row], int]:
    """Measure each pair with `python -m benchmarks BENCHMARK --row SET VARIANT`, and the copy they are held to.

    Args:
        benchmark: the command, and the name of the file in `options.out`.
        pairs: what to measure; the copy of `(COPY, COPY)` is put before them.
        options: with `out`, `keep`, `device` and `tiny`.
        console: where each row is told.

    Returns:
        All rows, those kept from the file first, and how many could not be measured.
    """
    pairs = [(COPY, COPY), *pairs]
    options.out.mkdir(parents=True, exist_ok=True)
    data: Path = options.out / f"{benchmark}.json"
    earlier = load(Row, data) if options.keep and data.exists() else []
    kept = [row for row in earlier if (row.set, row.variant) not in pairs]
    rows: list[Row] = []
    failures = 0
    for number, (set_name, variant_name) in enumerate(pairs, 1):
        arguments = [benchmark, "--row", set_name, variant_name, "--device", options.device]
        with console.status(f"{number}/{len(pairs)}  {set_name}  {variant_name}"):
            try:
                row = from_json(Row, run_cold("benchmarks", arguments + ["--tiny"] * options.tiny))
            except MeasurementFailed as error:
                console.print(f"{set_name} {variant_name}: not measured\n{error}", markup=False)
                failures += 1
                continue
        if rows and rows[0].set == COPY and row.set != COPY:
            row = replace(row, copy_percent=100 * row.gbps / rows[0].gbps)
        rows.append(row)
        save(kept + rows, data)  # after each row: a long run that is cut short still leaves what it measured
        console.print(f"{set_name:10} {variant_name:18} step {row.step_ms:.4g} ms, first step {row.first_s:.3g} s")
    return kept + rows, failures


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `sweep` reads."""
    parser.add_argument("--slow", action="store_true", help="also compile over 1000 tensors, minutes each")
    add_shared_options(parser, "a few small tensors a set")
    parser.add_argument("--keep", action="store_true", help="keep rows already in --out that this run does not measure")
    parser.add_argument("--row", nargs=2, metavar=("SET", "VARIANT"), help="measure one row here and print its JSON")
