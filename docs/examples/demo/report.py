"""What the demo shows: a table and a plot of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.table import Table

from demo.evaluate import Evaluation
from demo.train import Plan, Run


def largest_loss_difference(run: Run, reference: Run) -> float:
    """How far two loss curves are apart where they are furthest.

    >>> largest_loss_difference(Run("a", losses=[3.0, 2.0]), Run("b", losses=[3.0, 2.5]))
    0.5
    """
    return max(abs(loss - other) for loss, other in zip(run.losses, reference.losses, strict=True))


def device_name(device: str) -> str:
    """What the device is called, with the count of threads for a CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def evaluation_table(found: Sequence[Evaluation], count: int) -> Table:
    """One column a way, one row a measure."""
    result = Table(title=f"evaluation of {count} documents of varying lengths, one by one")
    result.add_column("")
    for each in found:
        result.add_column(each.name, justify="right")
    result.add_row("loss, mean over tokens", *(f"{each.loss:.4f}" for each in found))
    result.add_row("first pass, s", *(f"{each.first_s:.2f}" for each in found))
    result.add_row("second pass, s", *(f"{each.again_s:.2f}" for each in found))
    result.caption = next((each.summary for each in found if each.summary), None)
    return result


def table(runs: Sequence[Run], plan: Plan) -> Table:
    """One column a run, one row a measure; the first run is the reference of the loss curves."""
    last = min(10, plan.steps)
    calls = "kernels in one optimizer step" if plan.device == "cuda" else "aten calls in one optimizer step"
    rows = [
        (f"loss, mean of the last {last} steps", [f"{sum(run.losses[-last:]) / last:.4f}" for run in runs]),
        (
            "largest difference between the loss curves",
            ["reference", *(f"{largest_loss_difference(run, runs[0]):.1e}" for run in runs[1:])],
        ),
        ("first step, ms", [f"{run.first_step_ms:.0f}" for run in runs]),
        ("step, median ms", [f"{median(run.step_ms):.2f}" for run in runs]),
        ("of it the optimizer, median ms", [f"{median(run.optimizer_ms):.2f}" for run in runs]),
        ("peak memory, MiB", [f"{run.peak_mb:.0f}" for run in runs]),
        (calls, [str(run.calls) for run in runs]),
        ("steps replayed as a graph", [run.replayed for run in runs]),
    ]
    size = plan.size
    result = Table(
        title=f"{size.layers}-layer GPT of byte pairs, width {size.width}, "
        f"{plan.steps} steps of {plan.batch} x {size.context}\n"
        f"{device_name(plan.device)}, torch {torch.__version__}"
    )
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    for label, cells in rows:
        result.add_row(label, *cells)
    return result


def plot(runs: Sequence[Run], plan: Plan, path: Path) -> None:
    """Write the loss curves and the optimizers' times to a PNG, making its folder."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 1])
    for run, style in zip(runs, ["-", "--", ":"], strict=False):
        curves.plot(run.losses, style, label=run.name)
    curves.set(xlabel="step", ylabel="loss, nats a pair of bytes", title="loss curves")
    curves.legend()
    heights = [median(run.optimizer_ms) for run in runs]
    bars.bar([run.name.replace(" ", "\n") for run in runs], heights, color=["C0", "C1", "C2"][: len(runs)])
    bars.set(ylabel="optimizer, median ms a step", title=device_name(plan.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
