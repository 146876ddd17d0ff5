"""The demo's report: a table and a plot of the runs.

Times are compared on a GPU alone. On a CPU kernels run through plain torch, which is right and no faster: there the
table has what a CPU can show, losses and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.table import Table

from demo.compare import OURS, PLAIN, SCALED, Run
from demo.evaluate import Evaluation
from train_gpt import Plan

ON_A_CPU = (
    "A CPU runs the kernels through plain torch, so there is no time to compare: that takes a GPU. "
    "Measured ones are in docs/benchmarks.md."
)


def largest_loss_difference(run: Run, reference: Run) -> float:
    """Return how far two loss curves are apart where they are furthest."""
    return max(abs(loss - other) for loss, other in zip(run.losses, reference.losses, strict=True))


def median_with_interval(values: Sequence[float]) -> str:
    """Return a median and, of six values or more, its 95% interval by order statistics.

    >>> median_with_interval([1.0, 2.0, 3.0])
    '2.00'
    >>> median_with_interval([float(n) for n in range(100)])
    '49.50 (40.00 to 59.00)'
    """
    ordered = sorted(values)
    if len(ordered) < 6:
        return f"{median(ordered):.2f}"
    half = 0.98 * len(ordered) ** 0.5  # of a binomial's 95%, which is 1.96 times sqrt(n) / 2
    low = max(0, int(len(ordered) / 2 - half))
    return f"{median(ordered):.2f} ({ordered[low]:.2f} to {ordered[len(ordered) - 1 - low]:.2f})"


def device_name(device: str) -> str:
    """Return the name of the device, with the count of threads for a CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def evaluation_table(found: Sequence[Evaluation], plan: Plan) -> Table:
    """Return one column a way, one row a measure."""
    result = Table(title=f"evaluation of {found[0].documents} documents of varying lengths, one by one")
    result.add_column("")
    for each in found:
        result.add_column(each.name, justify="right")
    result.add_row("loss, mean over tokens", *(f"{each.loss:.4f}" for each in found))
    if plan.device == "cuda":
        result.add_row("first pass, s", *(f"{each.seconds[0]:.2f}" for each in found))
        result.add_row("last pass, s", *(f"{each.seconds[-1]:.2f}" for each in found))
    result.caption = next((each.summary for each in found if each.summary), None)
    return result


def table(runs: Sequence[Run], plan: Plan) -> Table:
    """Return one column a run, one row a measure; the first run is the reference of the loss curves."""
    last = min(10, plan.steps)
    rows = [
        (f"loss, mean of the last {last} steps", [f"{sum(run.losses[-last:]) / last:.4f}" for run in runs]),
        (
            "largest difference between the loss curves",
            ["reference", *(f"{largest_loss_difference(run, runs[0]):.1e}" for run in runs[1:])],
        ),
    ]
    precision = "float32 without autocast" if plan.device == "cuda" else "float64"
    rows += [(f"largest error of a loss, against {precision}", [f"{max(run.errors):.1e}" for run in runs])]
    if plan.device == "cuda":
        rows += [
            ("first step, ms", [f"{run.first_step_ms:.0f}" for run in runs]),
            ("step, median ms (95% interval)", [median_with_interval(run.step_ms) for run in runs]),
            ("of it the optimizer, median ms", [f"{median(run.optimizer_ms):.2f}" for run in runs]),
            ("memory that torch holds, MiB", [f"{run.peak_mb:.0f}" for run in runs]),
            ("kernels in one optimizer step", [str(run.kernels) for run in runs]),
            ("optimizer steps that were replays", [run.replayed for run in runs]),
        ]
    else:
        rows += [("memory of a forward and backward, MiB", [f"{run.peak_mb:.0f}" for run in runs])]
    size = plan.size
    result = Table(
        title=f"{size.layers}-layer GPT of byte pairs, width {size.width}, "
        f"{plan.steps} steps of {plan.batch} documents of up to {size.context} tokens\n"
        f"{device_name(plan.device)}, torch {torch.__version__}"
    )
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    for label, cells in rows:
        result.add_row(label, *cells)
    spread = largest_loss_difference(next(run for run in runs if run.name == SCALED), runs[0])
    result.caption = (
        f"Two plain runs, one with its loss scaled by 3, differ by {spread:.1e}, by rounding alone."
        f"{'' if plan.device == 'cuda' else ' ' + ON_A_CPU}"
    )
    return result


def plot(runs: Sequence[Run], plan: Plan, path: Path) -> None:
    """Write the loss curves, and the times or on a CPU the memory, to a PNG, making its folder."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 1])
    for run, style in zip(runs, ["-", ":", "--", "-."], strict=False):
        curves.plot(run.losses, style, label=run.name)
    curves.set(xlabel="step", ylabel="loss, nats a pair of bytes", title="loss curves")
    curves.legend()
    shown = [run for run in runs if run.name in (PLAIN, OURS)]
    on_gpu = plan.device == "cuda"
    heights = [median(run.step_ms) if on_gpu else run.peak_mb for run in shown]
    bars.bar([run.name.replace(" ", "\n") for run in shown], heights, color=["C0", "C2"])
    label = "step, median ms" if on_gpu else "memory of a forward and backward, MiB"
    bars.set(ylabel=label, title=device_name(plan.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
