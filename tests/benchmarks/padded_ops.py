"""The benchmark of ops over what is real in a padded tensor, beside masked torch, torch.masked and torch.nested.

A case is an op on one bucket, a fill is the share of the bucket that is real. What each variant needs beside the values
(a mask, a nested tensor) is made beforehand and not timed. `dense` is the plain op on the bucket, padding included: it
is wrong, and it is what padding should not cost more than.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console, Group

from benchmarks.options import add_shared_options, names
from benchmarks.padded_variants import CASES, VARIANTS, Problem
from benchmarks.rows import Setting, save
from benchmarks.side_stream import on_side_stream
from benchmarks.table import figure, folded
from demo.timing import synchronize, time_call

FILLS = (0.25, 0.5, 0.75, 1.0)
MODES = ("forward", "training")

CAPTURED = ("dense", "subtensors", "PaddedTensor", "masked by hand", "the same compiled")
"""Variants that run as a CUDA graph, so that the device's time is not the host's. `torch.masked` makes tensors on the
host and a nested one asks it for sizes, so these cannot be captured; nor need they be, at shapes that take the device
longer than the host."""


@dataclass(frozen=True)
class PaddedRow:
    """One op in one variant.

    Args:
        case: which op, on what.
        fill: the share of the bucket that is real.
        mode: "forward", or "training" for forward and backward.
        variant: how it is computed.
        ms: device time, median.
        over_dense: `ms` over that of `dense` in the same process.
        refusal: why there is no figure, where the variant cannot do it.
        setting: where it was measured.
    """

    case: str
    fill: float
    mode: str
    variant: str
    ms: float | None
    over_dense: float | None
    refusal: str | None
    setting: Setting = field(repr=False)


def lengths_of(count: int, longest: int, fill: float) -> list[int]:
    """So many lengths, evenly spread around `fill` times the longest.

    >>> lengths_of(5, 100, 0.75)
    [50, 62, 75, 88, 100]
    """
    spread = min(fill, 1 - fill)
    return [round(longest * (fill + spread * (2 * i / max(count - 1, 1) - 1))) for i in range(count)]


def measure(
    case_name: str, fill: float, mode: str, variants: Sequence[str], tiny: bool, device: str
) -> list[PaddedRow]:
    """Time one case by several variants, which take turns.

    Args:
        case_name: a key of `CASES`.
        fill: the share of the bucket that is real.
        mode: one of `MODES`.
        variants: keys of `VARIANTS`; "dense" has to be one of them.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".

    Returns:
        A row a variant.

    >>> rows = measure("mean over length", 0.5, "forward", ["dense", "subtensors"], tiny=True, device="cpu")
    >>> [row.variant for row in rows]
    ['dense', 'subtensors']
    """
    case = CASES[case_name]
    shape = case.tiny if tiny else case.shape
    lengths = lengths_of(shape[0], shape[case.ragged[0]], fill)
    problem = Problem(case, shape, lengths, mode == "training", device)
    calls: dict[str, Callable[[], object]] = {}
    refusals: dict[str, str] = {}
    for name in variants:
        try:
            call = VARIANTS[name](problem)
            call()
            calls[name] = _captured(call, device) if name in CAPTURED else call
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if name in ("dense", "subtensors", "PaddedTensor"):
                raise  # without these there is nothing to compare
            refusals[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        synchronize(device)
    rounds, repeats = (1, 3) if tiny else (3, 20)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_call(call, device, repeats=repeats, warm_up=3).device_ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    setting = Setting.now(device, tiny)
    return [
        PaddedRow(
            case_name,
            fill,
            mode,
            name,
            medians.get(name),
            medians[name] / medians["dense"] if name in medians else None,
            refusals.get(name),
            setting,
        )
        for name in variants
    ]


def _captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The replay of a call; the call itself where there are no graphs."""
    if device != "cuda":
        return call
    with on_side_stream():
        call()
    # What is freed by the collector may wait for the device, which no one may while a graph is captured.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()

    # The call holds the tensors that the graph reads.
    replay.call = call  # type: ignore[attr-defined]
    return replay


def table(rows: Sequence[PaddedRow]) -> Group:
    """A line a case, fill and mode; a column a variant, as a multiple of the dense op's time."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    setting = rows[0].setting
    lines = []
    for case, fill, mode in dict.fromkeys((row.case, row.fill, row.mode) for row in rows):
        cells = {row.variant: row for row in rows if (row.case, row.fill, row.mode) == (case, fill, mode)}
        shown = [_cell(cells[name]) if name in cells else "-" for name in variants]
        lines.append([case, f"{fill:.0%}", mode, *shown])
    title = f"{setting.device}, torch {setting.torch}; ms, and multiples of the dense op's time"
    return folded(title, ["case", "fill", "mode", *variants], lines, names=3)


def _cell(row: PaddedRow) -> str:
    return figure(row.ms, 3) if row.variant == "dense" else f"{figure(row.over_dense, 3)}x" if row.ms else "no"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    parser.add_argument("--fills", default=",".join(map(str, FILLS)), help="comma-separated (%(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    add_shared_options(parser, "small tensors")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    cases = names(options.cases, list(CASES), "case")
    modes = names(options.modes, MODES, "mode")
    variants = names(options.variants, list(VARIANTS), "variant")
    variants = ["dense", *(name for name in variants if name != "dense")]
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[PaddedRow] = []
    for case in cases:
        for mode in modes:
            for fill in map(float, options.fills.split(",")):
                rows += measure(case, fill, mode, variants, options.tiny, options.device)
                save(rows, options.out / "padded_ops.json")
                console.print(f"{case}, {mode}, {fill:.0%} filled: {len(variants)} variants", markup=False)
    console.print(table(rows))
    return 0
