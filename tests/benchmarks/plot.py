"""Benchmark rows as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import Row
from benchmarks.sets import FIRST_STEP_SETS, MAIN_SETS
from benchmarks.table import describe, figure
from benchmarks.variants import VARIANTS


def bars(axes: Axes, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    """Groups of bars, a group a set and a colour a variant, each with its number, on a logarithmic scale.

    The bars of a set stand side by side: a variant that was not measured there leaves no gap.
    """
    sets = list(dict.fromkeys(row.set for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    width = 0.85 / max(len(variants), 1)
    measured = {
        name: [x for x in variants if any((row.set, row.variant) == (name, x) for row in rows)] for name in sets
    }
    for variant in variants:
        mine = [row for row in rows if row.variant == variant]
        beside = [measured[row.set] for row in mine]
        places = [
            sets.index(row.set) + (own.index(variant) - (len(own) - 1) / 2) * width
            for row, own in zip(mine, beside, strict=True)
        ]
        drawn = axes.bar(places, [value(row) for row in mine], width, label=variant)
        axes.bar_label(drawn, [figure(value(row), 3) for row in mine], fontsize=7, rotation=90, padding=2)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_yscale("log")
    axes.margins(y=0.15)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write step times, first-step times and how the latter grow with the number of tensors to a PNG.

    A step as a graph made by hand is left out: beside torch's own as graphs it is a row of their table.
    """
    eager = [name for name, variant in VARIANTS.items() if not variant.needs_gpu]
    main = [row for row in rows if row.set in MAIN_SETS and row.variant in eager]
    growth = sorted((row.tensors, row.first_s) for row in rows if row.set in FIRST_STEP_SETS)
    drawing = Figure(figsize=(15, 5), layout="constrained")
    drawing.suptitle(describe(rows), fontsize=9)
    steps, first, scaling = drawing.subplots(1, 3, width_ratios=[3, 3, 1.5])
    bars(steps, main, lambda row: row.wall_ms)
    bars(first, main, lambda row: row.first_s)
    steps.set(title="one Adam step", ylabel="wall time, ms")
    first.set(title="the first step, cold caches", ylabel="s")
    scaling.plot([tensors for tensors, _ in growth], [seconds for _, seconds in growth], "o-")
    scaling.set_ylim(0, 1.25 * max((seconds for _, seconds in growth), default=1))
    scaling.set(title="first step of subtensors", xlabel="tensors", ylabel="s")
    drawing.legend(*steps.get_legend_handles_labels(), loc="outside lower center", ncols=len(eager))
    drawing.savefig(path, dpi=120)
