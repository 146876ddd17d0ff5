"""The demo command: the same training, plain and with subtensors, side by side."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from demo.evaluate import documents, evaluate
from demo.model import Size
from demo.report import evaluation_table, plot, table
from demo.text import corpus, pairs
from demo.train import OptimizerFactory, Plan, Run, train
from subtensors.optim import AdamW

CORPUS_BYTES = 2 << 20
PLAIN = "plain PyTorch"
DOCUMENTS = {"cpu": 30, "cuda": 300}
PLANS = {
    "cpu": Plan(Size(layers=4, width=128, heads=4, context=128), batch=8, steps=120, device="cpu", learning_rate=1e-3),
    "cuda": Plan(
        Size(layers=12, width=768, heads=12, context=512), batch=32, steps=300, device="cuda", learning_rate=3e-4
    ),
}


def optimizers(learning_rate: float) -> dict[str, OptimizerFactory]:
    """The optimizers that are compared, by the name they have in the report; all but the first with a chunked loss."""
    return {
        PLAIN: lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        "subtensors": lambda parameters: AdamW(parameters, lr=learning_rate),
        "captured step": lambda parameters: AdamW(parameters, lr=learning_rate, graph=True),
    }


def demo(plan: Plan, figure: Path, console: Console) -> list[Run]:
    """Train in each way from the same seed on the same data, evaluate the last, print tables and write a plot.

    Args:
        plan: the model, the data and the steps; `PLANS` has one a device.
        figure: where the plot goes, a PNG.
        console: where the progress bar and the table go.

    Returns:
        one run an optimizer.
    """
    text = corpus(CORPUS_BYTES)
    columns = [
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    ]
    runs: list[Run] = []
    with Progress(*columns, console=console) as progress:
        for name, make_optimizer in optimizers(plan.learning_rate).items():
            task = progress.add_task(name, total=plan.steps, loss=float("nan"))

            def show(loss: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=loss)

            for done in runs:
                done.model = None  # its memory is not the next run's
            runs.append(train(name, make_optimizer, plan, text, chunked=name != PLAIN, on_step=show))
            if not console.is_terminal:  # which would show the bars at the end alone
                console.print(f"{name}: {plan.steps} steps, loss {runs[-1].losses[-1]:.3f}")
    console.print(table(runs, plan))
    plot(runs, plan, figure)
    console.print(f"plot: {figure}")
    console.print(evaluated(runs[-1], plan, text))
    return runs


def evaluated(run: Run, plan: Plan, text: Tensor) -> Table:
    """The evaluation of a trained model over documents of varying lengths."""
    assert run.model is not None
    run.model.chunked = False
    texts = documents(pairs(text)[0], DOCUMENTS[plan.device], plan.size.context, plan.seed + 1)
    return evaluation_table(evaluate(run.model, texts, plan.device), len(texts))
