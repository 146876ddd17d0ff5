"""Drawing the figures of a folder of rows: `python -m benchmarks figures`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import bucketed_rows, bucketed_training, chunked_rows, lend, long_rows, padded_ops, plot, rows
from benchmarks.sweep import COPY
from benchmarks.table import describe

OURS = ("bucketed", "whole-step")
"""How the variants of bucketed programs begin that are this package's."""

HIDDEN = ("dense", "subtensors")
"""Variants of padded ops that are no points: the line at 1, and the kernels by themselves, which the type runs."""


def draw_optim(folder: Path) -> None:
    """Step times, first steps and how these grow."""
    plot.plot(rows.load(rows.Row, folder / "optim.json"), folder / "optim.png")


def draw_chunked(folder: Path) -> None:
    """Time against memory of a loss and its gradients."""
    found = rows.load(chunked_rows.LossRow, folder / "chunked.json")
    chunked_rows.plot(found, describe(found), folder / "chunked.png")


def draw_padded(folder: Path) -> None:
    """Each op's time over that of the dense op on the whole bucket, half of which is padding: a panel a mode.

    A line through the type's point spans its times at all fills.
    """
    found = rows.load(padded_ops.PaddedRow, folder / "padded_ops.json")
    cases = list(dict.fromkeys(row.case for row in found))
    drawing = Figure(figsize=(12, 5), layout="constrained")
    drawing.suptitle(describe(found), fontsize=9)
    panels = drawing.subplots(1, 2, sharey=True)
    for axes, mode in zip(panels, padded_ops.MODES, strict=True):
        mine = [row for row in found if row.mode == mode and row.fill == 0.5 and row.variant not in HIDDEN]
        for number, variant in enumerate(dict.fromkeys(row.variant for row in mine)):
            points = [(cases.index(row.case), row.over_dense) for row in mine if row.variant == variant and row.ms]
            axes.plot(*zip(*points, strict=True), "os^Dv"[number % 5], label=variant)
        for number, case in enumerate(cases):
            spans = [
                row.over_dense
                for row in found
                if (row.mode, row.case, row.variant) == (mode, case, "PaddedTensor") and row.over_dense
            ]
            axes.vlines(number, min(spans), max(spans), color="C0", alpha=0.5, zorder=0)
        axes.axhline(1, color="grey", linestyle=":", label="dense")
        axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
        axes.set(title=mode, yscale="log")
    panels[0].set_ylabel("time over the dense op's")
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    drawing.savefig(folder / "padded_ops.png", dpi=120)


def draw_static(folder: Path) -> None:
    """One step as a graph, in the ways there are to make one, and how fast an arena's memory leaves and comes back."""
    steps = [row for row in rows.load(rows.Row, folder / "static.json") if row.set != COPY]
    sleeps = rows.load(lend.LentRow, folder / "lend.json")
    drawing = Figure(figsize=(12, 5), layout="constrained")
    drawing.suptitle(describe([*steps, *sleeps]), fontsize=9)
    times, speeds = drawing.subplots(1, 2, width_ratios=[2, 1])
    plot.bars(times, steps, lambda row: row.wall_ms)
    times.set(title="one Adam step as a graph", ylabel="wall time, ms")
    drawing.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8)
    last = sleeps[-1]
    speed = {
        "first release": sleeps[0].release_gbps,
        "release": last.release_gbps,
        "copy to host": last.to_host_gbps,
        "restore": last.restore_gbps,
        "copy from host": last.from_host_gbps,
    }
    drawn = speeds.bar(list(speed), list(speed.values()), color=["C0", "C0", "grey", "C0", "grey"])
    speeds.bar_label(drawn, fmt="%.3g", fontsize=8)
    speeds.tick_params(axis="x", rotation=30)
    speeds.set(title=f"an arena of {last.state_bytes / 1e9:.3g} GB of AdamW state", ylabel="GB/s")
    drawing.savefig(folder / "static.png", dpi=120)


def draw_bucketed(folder: Path) -> None:
    """Median times of requests, and of training steps, of varying sizes: a panel a case, a bar a variant."""
    served = rows.load(bucketed_rows.VaryingRow, folder / "bucketed.json")
    trained = rows.load(bucketed_training.TrainingRow, folder / "bucketed_training.json")
    times = [(row.case, row.variant, row.p50_ms) for row in served]
    times += [(f"gpt2-train-{row.batch}", row.variant, row.step_ms) for row in trained]
    cases = list(dict.fromkeys(case for case, _, _ in times))
    drawing = Figure(figsize=(12, 6), layout="constrained")
    drawing.suptitle(describe([*served, *trained]), fontsize=9)
    panels = drawing.subplots(2, -(-len(cases) // 2)).flat
    for case, axes in zip(cases, panels, strict=False):
        mine = [(variant, ms) for name, variant, ms in times if name == case]
        colors = ["C0" if variant.startswith(OURS) else "grey" for variant, _ in mine]
        drawn = axes.barh([variant for variant, _ in mine], [ms for _, ms in mine], color=colors)
        axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_title(f"{case}, ms", fontsize=9)
    for axes in panels:
        axes.remove()
    drawing.savefig(folder / "bucketed.png", dpi=120)


def draw_long_rows(folder: Path) -> None:
    """Time, memory and error of a loss over the number of tokens, a line a variant."""
    found = [row for row in rows.load(long_rows.LongRow, folder / "long_rows.json") if row.part == "loss"]
    drawing = Figure(figsize=(12, 5), layout="constrained")
    drawing.suptitle(describe(found), fontsize=9)
    times, memory, errors = drawing.subplots(1, 3)
    for variant in dict.fromkeys(row.variant for row in found):
        mine = [row for row in found if row.variant == variant and not row.reason]
        tokens = [row.tokens for row in mine]
        times.plot(tokens, [row.step_ms for row in mine], "o-", label=variant)
        errors.plot(tokens, [row.weight_error for row in mine], "o-")
        if all(row.peak_mb for row in mine):
            memory.plot(tokens, [row.peak_mb for row in mine], "o-")
    titles = ["a loss and its gradients, ms", "peak memory above the operands, MiB", "error of the weight's gradient"]
    lengths = sorted({row.tokens for row in found})
    for axes, title in zip((times, memory, errors), titles, strict=True):
        axes.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    errors.set(yscale="linear", ylim=0)
    drawing.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    drawing.savefig(folder / "long_rows.png", dpi=120)


FIGURES: dict[str, tuple[Sequence[str], Callable[[Path], None]]] = {
    "optim": (["optim.json"], draw_optim),
    "chunked": (["chunked.json"], draw_chunked),
    "long_rows": (["long_rows.json"], draw_long_rows),
    "padded_ops": (["padded_ops.json"], draw_padded),
    "static": (["static.json", "lend.json"], draw_static),
    "bucketed": (["bucketed.json", "bucketed_training.json"], draw_bucketed),
}
"""The files of rows that each figure is drawn from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the rows (%(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw each figure whose rows are there; returns the exit status, 1 where there are none."""
    drawn = [name for name, (files, _) in FIGURES.items() if all((options.out / file).exists() for file in files)]
    for name in drawn:
        FIGURES[name][1](options.out)
        print(options.out / f"{name}.png")
    if not drawn:
        files = ", ".join(name for names, _ in FIGURES.values() for name in names)
        print(f"{options.out} has no rows to draw: figures are made of {files}", file=sys.stderr)
    return 0 if drawn else 1
