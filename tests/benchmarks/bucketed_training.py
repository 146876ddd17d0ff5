"""The benchmark of training with `st.bucketed`: GPT-2 on batches of varying lengths."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from rich.console import Console, Group
from torch import Tensor

from benchmarks.bucketed_training_variants import VARIANTS, Step
from benchmarks.gpt2_step import FULL, GPT2, TINY
from benchmarks.options import add_shared_options, names
from benchmarks.rows import Setting, from_json, save, to_json
from benchmarks.table import describe, figure, folded
from demo.timing import kernel_times, synchronize

LENGTHS = (16, 512)
STEPS = 100
PASSES = 3
SECONDS_A_ROW = 6
"""What measuring one takes at most, once it is ready."""
PROFILED = 10
"""Steps whose kernels are listed."""


@dataclass(frozen=True)
class TrainingRow:
    """One way to train on batches of varying lengths, in a process of its own.

    Args:
        variant: which way.
        batch: sequences a step.
        steps: of a pass.
        distinct: lengths among them.
        first_pass_s, second_pass_s: the first two passes, with all that is compiled and captured, while others got
            ready as well; who compiles and captures in one for each length captures in the second.
        step_ms: mean of a pass whose steps are enqueued back to back; the median of some passes, one process at a time.
        reserved_mb: the device memory that torch held at the end, pools of graphs included, MiB; None on a CPU.
        graphs: captured; None where nobody counts.
        recompiles: after the first compilation; None where nobody counts.
        loss: mean of the last pass.
        kernels, kernel_ms: how many a step of some runs on the device, and what they take together, gaps between them
            left out; None where that was not asked for.
        setting: where it was measured.
    """

    variant: str
    batch: int
    steps: int
    distinct: int
    first_pass_s: float
    second_pass_s: float
    step_ms: float
    reserved_mb: float | None
    graphs: int | None
    recompiles: int | None
    loss: float
    kernels: float | None
    kernel_ms: float | None
    setting: Setting = field(repr=False)


def measure(
    variant: str, batch: int, tiny: bool, device: str, wait: bool = False, kernels: Path | None = None
) -> TrainingRow:
    """Train one way.

    Args:
        variant: a key of `VARIANTS`.
        batch: sequences a step.
        tiny: a small model and few steps.
        device: "cpu" or "cuda".
        wait: say on stdout when the first two passes are done, and go on when there is a line on stdin.
        kernels: the folder to leave a list of kernels in, with the time of each; on a GPU.

    Returns:
        what was measured.
    """
    size, _, vocabulary = TINY if tiny else FULL
    longest = min(LENGTHS[1], size.context)
    source = random.Random(0)
    lengths = [source.randint(min(LENGTHS[0], longest // 2), longest) for _ in range(6 if tiny else STEPS)]
    torch.manual_seed(0)
    model = GPT2(size, vocabulary).to(device)
    batches = [torch.randint(vocabulary, (batch, n + 1), device=device) for n in lengths]
    pairs = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in batches]
    way = VARIANTS[variant].make(model, longest)
    # The longest come first, so that what is captured for the others finds the memory that it needs.
    first_pass_s, _ = _pass(way.step, sorted(pairs, key=lambda pair: -pair[0].shape[1]), device)
    second_pass_s, _ = _pass(way.step, pairs, device)
    if wait:
        print("ready", flush=True)
        sys.stdin.readline()
    times, losses = zip(*[_pass(way.step, pairs, device) for _ in range(PASSES)], strict=True)
    runner = way.runner
    listed = [] if kernels is None else kernel_times(lambda: [way.step(*pair) for pair in pairs[:PROFILED]])
    if kernels is not None:
        lines = [f"{k.count / PROFILED:9.1f} {k.ms / PROFILED:9.4f} {k.name}" for k in listed]
        (kernels / f"kernels-{variant}.txt").write_text("\n".join(["  a step   ms kernel", *lines, ""]))
    stats = None if runner is None else runner.stats()
    return TrainingRow(
        variant, batch, len(pairs), len(set(lengths)), first_pass_s, second_pass_s,
        step_ms=median(times) / len(pairs) * 1e3,
        reserved_mb=torch.cuda.memory_reserved() / 2**20 if device == "cuda" else None,
        graphs=None if stats is None else stats.captures,
        recompiles=None if stats is None else max(r.stats().recompiles for r in (runner, *way.inner)),
        loss=losses[-1],
        kernels=sum(k.count for k in listed) / PROFILED if listed else None,
        kernel_ms=sum(k.ms for k in listed) / PROFILED if listed else None,
        setting=Setting.now(device, tiny),
    )  # fmt: skip


def _pass(step: Step, pairs: Sequence[tuple[Tensor, Tensor]], device: str) -> tuple[float, float]:
    """Seconds of one pass, and its mean loss."""
    synchronize(device)
    started = time.perf_counter()
    losses = [step(*pair) for pair in pairs]
    synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, float(torch.stack(losses).mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step (%(default)s)")
    add_shared_options(parser, "a small model")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all rows together (%(default)s)")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of some steps beside the rows")
    parser.add_argument("--row", metavar="VARIANT", help="measure one row here, when told to, and print its JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Have all ways get ready side by side, and measure one at a time; 1 where a row could not be measured."""
    if options.row:
        folder = options.out if options.kernels else None
        row = measure(options.row, options.batch, options.tiny, options.device, wait=True, kernels=folder)
        print(to_json(row))
        return 0
    chosen = [
        v for v in names(options.variants, list(VARIANTS), "variant")
        if options.device == "cuda" or not VARIANTS[v].needs_gpu
    ]  # fmt: skip
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "bucketed_training.json"
    shared = ["--batch", str(options.batch), "--device", options.device, "--out", str(options.out)]
    shared += ["--tiny"] * options.tiny + ["--kernels"] * (options.kernels and options.device == "cuda")
    command = [sys.executable, "-m", "benchmarks", "bucketed-training", *shared, "--row"]
    rows: list[TrainingRow] = []
    for variant, out in _in_turn({v: [*command, v] for v in chosen}, options.limit):
        rows.append(from_json(TrainingRow, out.splitlines()[-1]))
        save(rows, data)  # after each: what is cut short leaves what it measured
        console.print(f"{variant:24} {rows[-1].step_ms:.4g} ms, {rows[-1].reserved_mb or 0:.0f} MiB")
    rows.sort(key=lambda row: chosen.index(row.variant))
    console.print(_table(rows))
    return int(len(rows) < len(chosen))


def _in_turn(commands: dict[str, list[str]], seconds: float) -> Iterator[tuple[str, str]]:
    """Start processes that say when they are ready; then let each do its work while the others are halted.

    Args:
        commands: by name.
        seconds: for all together; those that fail, or would take longer, give nothing.

    Yields:
        Names, in the order in which they got ready, each with what the process printed from then on.
    """
    processes = {
        name: subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for name, command in commands.items()
    }
    ready: queue.Queue[str] = queue.Queue()

    def listen(name: str) -> None:
        stdout = processes[name].stdout
        assert stdout is not None
        for line in stdout:
            if line.strip() == "ready":
                ready.put(name)
                return

    def send(to: Iterable[str], number: signal.Signals) -> None:
        for name in to:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(processes[name].pid, number)

    for name in processes:
        threading.Thread(target=listen, args=(name,), daemon=True).start()
    left, end = set(processes), time.monotonic() + seconds
    order: list[str] = []
    try:
        # Compilers are processes in groups of their own, and would take the host's time from who is measured.
        while left.difference(order) and time.monotonic() < end - SECONDS_A_ROW * (len(order) + 1):
            with contextlib.suppress(queue.Empty):
                order.append(ready.get(timeout=1))
            left = {n for n in left if processes[n].poll() is None}
        for name in order:
            left.discard(name)
            send(left, signal.SIGSTOP)
            time.sleep(0.2)
            try:
                out, _ = processes[name].communicate("now\n", timeout=end - time.monotonic())
            except subprocess.TimeoutExpired:
                return
            send(left, signal.SIGCONT)
            if processes[name].returncode == 0:
                yield name, out
    finally:
        send(processes, signal.SIGKILL)


def _table(rows: Sequence[TrainingRow]) -> Group:
    columns = "variant,first pass s,second,step ms,reserved MiB,graphs,recompiles,loss,kernels,kernel ms".split(",")
    lines = []
    for row in rows:
        cells = (row.first_pass_s, row.second_pass_s, row.step_ms, row.reserved_mb, row.graphs, row.recompiles,
                 row.loss, row.kernels, row.kernel_ms)  # fmt: skip
        lines.append([row.variant, *(figure(cell, 4) for cell in cells)])
    return folded(describe(rows), columns, lines, names=1)
