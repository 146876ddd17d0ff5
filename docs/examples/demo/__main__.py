"""The demo's command line: `make demo`, or `python -m subtensors demo`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo.compare import OURS, PLAIN, PLANS, SCALED, UNCAPTURED, Run, compare, evaluated
from demo.report import evaluation_table, plot, table
from train_gpt import Plan


def at_least_two(text: str) -> int:
    """A whole number of steps: the first is measured apart, so there must be another."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"a whole number, 2 at least; got {text!r}")
    return int(text)


def image_path(text: str) -> Path:
    """The path of a plot, of a kind that can be written."""
    path = Path(text)
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise argparse.ArgumentTypeError(f"the plot is a file ending in .png, .svg or .pdf; got {text!r}")
    return path


SECONDS_A_STEP = {"cpu": 5.0, "cuda": 0.5}
"""Seconds of one step of all trainings, the one in higher precision included: on two cores of a CPU, on an H200."""


def announcement(plan: Plan) -> str:
    """Return what will be done, and about how long it takes, in two lines.

    >>> print(announcement(PLANS["cpu"]))
    120 steps of each of: plain PyTorch; plain, loss times 3; subtensors.
    Then an evaluation and a plot: about 10 minutes in all on two cores of a CPU.
    """
    names = [PLAIN, SCALED, OURS, *([UNCAPTURED] if plan.device == "cuda" else [])]
    where = "two cores of a CPU" if plan.device == "cpu" else "an H200"
    return (
        f"{plan.steps} steps of each of: {'; '.join(names)}.\n"
        f"Then an evaluation and a plot: about {duration(plan.steps * SECONDS_A_STEP[plan.device])} in all on {where}."
    )


def duration(seconds: float) -> str:
    """Return a duration in words, rounded to whole minutes where there are several.

    >>> duration(7.4), duration(600)
    ('7 seconds', '10 minutes')
    """
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def demo(plan: Plan, figure: Path, console: Console) -> list[Run]:
    """Compare, print tables and write a plot.

    Args:
        plan: the model, the data and the steps; `PLANS` has one a device.
        figure: where the plot goes, a PNG.
        console: where the progress bar and the tables go.

    Returns:
        one run a variant.
    """
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    ]
    console.print(announcement(plan))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps of all variants", total=plan.steps, loss=float("nan"))
        ends: list[float] = []

        def show(loss: float) -> None:
            progress.update(task, advance=1, loss=loss)
            ends.append(time.perf_counter())
            done = len(ends)
            if console.is_terminal or (done > 2 and done % max(plan.steps // 10, 1)):  # a terminal shows the bar
                return
            left = "" if done == 1 else f", {duration((ends[-1] - ends[0]) / (done - 1) * (plan.steps - done))} left"
            console.print(f"step {done} of {plan.steps}: loss {loss:.3f}{left}")

        runs = compare(plan, show)
    console.print(table(runs, plan))
    plot(runs, plan, figure)
    console.print(f"plot: {figure}")
    ours = next(run for run in runs if run.name == OURS)
    found = evaluated(ours)
    console.print(evaluation_table(found, plan))
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: of the command line; the process's own where there are none.

    Returns:
        the exit status.
    """
    parser = argparse.ArgumentParser(
        prog="subtensors demo",
        description="Train a small GPT with plain PyTorch and with subtensors, side by side.",
        epilog="example: python -m subtensors demo --steps 20",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=at_least_two, help="optimizer steps of each run, two at least")
    parser.add_argument("--out", type=image_path, default=Path("out/demo.png"), help="the plot (%(default)s)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU here; `python -m subtensors doctor` says why", file=sys.stderr)
        return 2
    plan = PLANS[options.device]
    if options.steps is not None:
        plan = dataclasses.replace(plan, steps=options.steps)
    demo(plan, options.out, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
