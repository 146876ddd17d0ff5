"""Rows of the benchmark of linear + cross entropy, as JSON, a table and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group

from benchmarks.rows import Setting
from benchmarks.table import figure, in_sections


@dataclass(frozen=True)
class LossRow:
    """One way to take a loss and its gradients, once forward and backward.

    Args:
        shape: which loss.
        variant: which way; of ours, how gradients add up and the part of the logits that is in memory at once.
        tokens, hidden, vocabulary: N, H, V.
        first_s: the first time, with what it makes and compiles.
        step_ms: device time from the first to the last work of one forward and backward; median.
        peak_mb: memory above what is allocated before, gradients included, MiB; None on a CPU.
        gradients_mb: of the gradients alone.
        loss_error: of the loss against float64.
        hidden_error, weight_error: of the gradients against float64: norm of the difference over norm.
        setting: where it was measured.
    """

    shape: str
    variant: str
    tokens: int
    hidden: int
    vocabulary: int
    first_s: float
    step_ms: float
    peak_mb: float | None
    gradients_mb: float
    loss_error: float
    hidden_error: float
    weight_error: float
    setting: Setting = field(repr=False)


COLUMNS: dict[str, Callable[[LossRow], str]] = {
    "shape": lambda row: row.shape,
    "variant": lambda row: row.variant,
    "first s": lambda row: figure(row.first_s, 3),
    "step ms": lambda row: figure(row.step_ms),
    "peak MiB": lambda row: figure(row.peak_mb, 5),
    "gradients MiB": lambda row: figure(row.gradients_mb),
    "loss error": lambda row: f"{row.loss_error:.1e}",
    "dX error": lambda row: f"{row.hidden_error:.2e}",
    "dW error": lambda row: f"{row.weight_error:.2e}",
}


def table(rows: Sequence[LossRow], title: str) -> Group:
    """One line a row, shapes apart from each other."""
    return in_sections(rows, COLUMNS, title)


def is_ours(row: LossRow) -> bool:
    """Is it one of our settings, and no peer?"""
    return "/" in row.variant


def unmatched(rows: Sequence[LossRow], as_right: float = 2.0) -> list[LossRow]:
    """The peers that none of our settings is at least as fast as in no more memory.

    Args:
        rows: of any shapes, each with eager torch's.
        as_right: a peer whose gradients err by more than so many times eager's is left out.
    """
    found = []
    for row in rows:
        same = [other for other in rows if other.shape == row.shape]
        eager = next((other for other in same if other.variant == "eager"), None)
        if is_ours(row) or eager is None:
            continue
        errors = max(row.hidden_error / eager.hidden_error, row.weight_error / eager.weight_error)
        if errors <= as_right and not any(_matches(mine, row) for mine in same if is_ours(mine)):
            found.append(row)
    return found


def _matches(mine: LossRow, peer: LossRow) -> bool:
    return mine.step_ms <= peer.step_ms and (mine.peak_mb or 0) <= (peer.peak_mb or 0)


def plot(rows: Sequence[LossRow], title: str, path: Path) -> None:
    """Write time against memory to a PNG: a panel a shape, a point a peer, a line through each of our orders' sizes."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    ways = list(dict.fromkeys(row.variant.partition("/")[0] for row in rows))
    colours = dict(zip(ways, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    drawing = Figure(figsize=(6 * len(shapes), 5), layout="constrained")
    drawing.suptitle(title, fontsize=9)
    panels: Sequence[Axes] = drawing.subplots(1, len(shapes), squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in rows if row.shape == shape]
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in mine:
            lines.setdefault(row.variant.partition("/")[0], []).append((row.peak_mb or row.gradients_mb, row.step_ms))
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-" if len(points) > 1 else "s", label=name, color=colours[name])
        axes.axvline(mine[0].gradients_mb, color="grey", linestyle=":", label="gradients alone")
        axes.set(title=shape, xlabel="peak memory, MiB", ylabel="forward and backward, ms", xscale="log", yscale="log")
        axes.legend(fontsize=7)
    drawing.savefig(path, dpi=120)
