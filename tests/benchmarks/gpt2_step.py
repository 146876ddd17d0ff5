"""The benchmark of a whole training step of GPT-2: what a chunked loss costs in time and saves in memory."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.options import add_shared_options
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure
from demo.model import Block, Size
from demo.timing import Span, synchronize
from subtensors.chunked.chunked_tensor import chunk

VOCABULARY = 50304
FULL, TINY = (Size(12, 768, 12, 1024), 32, VOCABULARY), (Size(2, 16, 2, 16), 4, 320)
"""The model, sequences a step, and classes."""


class GPT2(nn.Module):
    """GPT-2 with the head tied to the embedding, without dropout.

    Args:
        size: of the trunk.
        vocabulary: classes.
    """

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length), int64
        """The head's input, `(batch * length, width)`, in bfloat16."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x).to(torch.bfloat16).flatten(0, 1)
        return out


@dataclass(frozen=True)
class Way:
    """How the loss is taken.

    Args:
        name: of the row.
        rows: of a chunk; None for whole logits.
        accumulate: how the head's gradient adds up.
        inside: whether the chunked loss is compiled with the trunk, or stays outside of it.
        compiled: whether anything is compiled.
        budget: the share of activations that the compiler may keep; below one it computes cheap ones again.
    """

    name: str
    rows: int | None = None
    accumulate: Literal["exact", "fast"] = "fast"
    inside: bool = False
    compiled: bool = True
    budget: float = 1.0


def way(name: str) -> Way:
    """The way of a name.

    >>> way("chunk exact/2048")
    Way(name='chunk exact/2048', rows=2048, accumulate='exact', inside=False, compiled=True, budget=1.0)
    >>> way("inside fast/1024@0.95").budget
    0.95
    """
    text, _, budget = name.partition("@")
    kind, _, sizes = text.partition(" ")
    if kind not in ("eager", "compile", "chunk", "inside"):
        raise SystemExit(f"unknown variant {name!r}; there are eager, compile, 'chunk fast/ROWS', 'inside exact/ROWS'")
    accumulate, _, rows = sizes.partition("/")
    return Way(
        name,
        int(rows) if rows else None,
        "exact" if accumulate == "exact" else "fast",
        kind == "inside",
        kind != "eager",
        float(budget or 1),
    )


def loss_function(model: GPT2, chosen: Way) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens, targets) -> the mean loss."""

    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        x = hidden if chosen.rows is None else chunk(hidden, rows=chosen.rows, accumulate=chosen.accumulate)
        return F.cross_entropy(F.linear(x, model.token.weight).float(), targets.flatten())

    is_outside = chosen.rows is not None and not chosen.inside
    trunk: Callable[[Tensor], Tensor] = torch.compile(model) if chosen.compiled and is_outside else model

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return head(trunk(tokens), targets)

    if chosen.compiled and not is_outside:
        whole: Callable[[Tensor, Tensor], Tensor] = torch.compile(loss, fullgraph=True)
        return whole
    return loss


@dataclass(frozen=True)
class StepRow:
    """One way to take a training step.

    Args:
        variant: which.
        first_s: the first step, with what it compiles.
        step_ms: of steps enqueued back to back.
        peak_mb: the most device memory in a step, parameters and optimizer's state included, MiB; None on a CPU.
        loss: of the last step.
        setting: where it was measured.
    """

    variant: str
    first_s: float
    step_ms: float
    peak_mb: float | None
    loss: float
    setting: Setting = field(repr=False)


def measure(names: list[str], tiny: bool, device: str, report: Callable[[StepRow], None]) -> list[StepRow]:
    """Measure ways in this process, each from the same parameters.

    Args:
        names: of the ways.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
        report: told each row.
    """
    size, batch, vocabulary = TINY if tiny else FULL
    rows: list[StepRow] = []
    for name in names:
        chosen = way(name)
        torch._dynamo.reset()  # it would keep the model of the way before, and not see another budget
        gc.collect()
        torch.manual_seed(0)
        model = GPT2(size, vocabulary).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        tokens = torch.randint(vocabulary, (batch, size.context + 1), device=device)
        losses: list[Tensor] = []
        with functorch_config.patch(activation_memory_budget=chosen.budget):
            loss_of = loss_function(model, chosen)

            def step(
                loss_of: Callable[[Tensor, Tensor], Tensor] = loss_of,
                optimizer: torch.optim.Optimizer = optimizer,
                tokens: Tensor = tokens,
                losses: list[Tensor] = losses,
            ) -> None:
                optimizer.zero_grad()
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())

            started = time.perf_counter()
            step()
            synchronize(device)
            first_s = time.perf_counter() - started
            for _ in range(2):
                step()
            synchronize(device)
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            times = [_milliseconds(step, device) for _ in range(3)]
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
        rows.append(StepRow(name, first_s, median(times), peak, float(losses[-1]), Setting.now(device, tiny)))
        report(rows[-1])
        del model, optimizer, loss_of, step, tokens, losses
    return rows


def _milliseconds(step: Callable[[], None], device: str, steps: int = 8) -> float:
    with Span(device) as span:
        for _ in range(steps):
            step()
    synchronize(device)
    return span.ms() / steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--variants", default="compile,inside fast/896", help="comma-separated")
    add_shared_options(parser, "a small model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    console = Console()
    names = [name.strip() for name in options.variants.split(",")]
    for name in names:
        way(name)

    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[StepRow] = []

    def report(row: StepRow) -> None:
        console.print(f"{row.variant:24} {row.step_ms:.4g} ms, {figure(row.peak_mb)} MiB, loss {row.loss:.4f}")
        measured.append(row)
        save(measured, options.out / "gpt2_step.json")  # after each: a run may be cut short

    rows = measure(names, options.tiny, options.device, report)
    shown = Table(title=describe(rows))
    for name in ("variant", "first s", "step ms", "peak MiB", "loss"):
        shown.add_column(name, justify="left" if name == "variant" else "right")
    for row in rows:
        cells = (figure(row.first_s, 3), figure(row.step_ms), figure(row.peak_mb, 6), figure(row.loss, 5))
        shown.add_row(row.variant, *cells)
    console.print(shown)
    return 0
