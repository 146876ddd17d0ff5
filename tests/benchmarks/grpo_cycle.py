"""The benchmark of GRPO whose memory is lent: the example's cycle, beside TRL's functions and torch_memory_saver.

Both train the same model on prompts of the same lengths by the same update: AdamW over float32 masters, gradients
clipped. The peer samples by `model.generate`, scores tokens by TRL's function over whole logits, steps by torch's
fused AdamW, and has torch_memory_saver keep parameters and state on the host while memory is lent.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.options import add_shared_options, names
from benchmarks.processes import run_cold
from benchmarks.rows import Setting, load, save
from benchmarks.table import describe, figure, folded


class Saver(Protocol):
    """The methods of torch_memory_saver's that are called."""

    def region(self, *, enable_cpu_backup: bool) -> AbstractContextManager[None]: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class MasterAdamW:
    """torch's fused AdamW over float32 copies of a model's parameters, with clipped gradients.

    Args:
        model: whose parameters are moved to memory that a saver can release, as are the copies and the state.
        learning_rate: constant.
        region: a context in which such memory is allocated.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float, region: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.parameters, self.region = list[Tensor](model.parameters()), region
        with region():
            for p in self.parameters:
                p.data = p.data.clone()
            self.masters = list[Tensor](nn.Parameter(p.detach().float()) for p in self.parameters)
        self.adam = torch.optim.AdamW(self.masters, lr=learning_rate, fused=True)

    def step(self) -> None:
        """Take a step by the parameters' gradients."""
        for master, p in zip(self.masters, self.parameters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        with nullcontext() if self.adam.state else self.region():
            self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        self.adam.zero_grad()

    def zero_grad(self) -> None:
        """Drop the parameters' gradients."""
        for p in self.parameters:
            p.grad = None


def trl_job(plan: Any, saver: Saver) -> Any:
    """Return the example's job by TRL's functions, torch's optimizer and a saver of memory."""
    example: Any = import_module("grpo_cycle")  # which needs transformers
    trl = import_module("trl.trainer.utils")

    class TrlJob(example.Job):  # type: ignore[misc]
        def __init__(self) -> None:
            self.plan, self.cycles = plan, 0
            self.model = self.run = example.new_model(plan)
            region = partial(saver.region, enable_cpu_backup=True)
            self.optimizer = MasterAdamW(self.model, plan.learning_rate, region)
            self.arena = SimpleNamespace(release=saver.pause, restore=saver.resume, used=0)

        def scores(self, hidden: Tensor, tokens: Tensor) -> Any:
            return trl.selective_log_softmax_and_entropy(self.model.lm_head(hidden), tokens)

    return TrlJob()


def saver() -> Saver:
    """Return torch_memory_saver, by the allocator of a pool unless its library is preloaded."""
    found: Any = import_module("torch_memory_saver").torch_memory_saver
    found.hook_mode = "preload" if "torch_memory_saver" in os.environ.get("LD_PRELOAD", "") else "torch"
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CycleRow:
    """One cycle: sample, learn, lend the memory, take it back.

    Args:
        variant: "subtensors" or "TRL".
        cycle: from 0 on; the first captures graphs, compiles and page-locks the host's memory.
        seconds: of each part.
        freed_mb: more of the device's memory that was free while it was lent, as nvidia-smi counts.
        free_mb: all of the device's memory that was free then; 0 on a CPU.
        reward, loss: of the cycle's update.
        setting: where it was measured.
    """

    variant: str
    cycle: int
    seconds: dict[str, float]
    freed_mb: float
    free_mb: float
    reward: float
    loss: float
    setting: Setting = field(repr=False)


def measure(variant: str, cycles: int, tiny: bool, device: str) -> Iterator[CycleRow]:
    """Run cycles of one way in this process; yields a row after each."""
    example = import_module("grpo_cycle")
    plan = replace(example.plan_on("cpu" if tiny else device), device=device)
    job = example.Job(plan) if variant == "subtensors" else trl_job(plan, saver())
    for number in range(cycles):
        free: list[int] = []

        def lend(size: int, free: list[int] = free) -> int:
            free.append(example.free_bytes(device))
            return size

        found = job.cycle(lend)
        freed, setting = found.freed_bytes / 2**20, Setting.now(device, tiny)
        yield CycleRow(variant, number, found.seconds, freed, free[0] / 2**20, found.reward, found.loss, setting)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--variants", default="subtensors,TRL", help="each in its own process (%(default)s)")
    parser.add_argument("--cycles", type=int, default=3, help="of each (%(default)s)")
    parser.add_argument("--here", action="store_true", help="one variant in this process; its rows join those in --out")
    add_shared_options(parser, "a small model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    wanted = names(options.variants, ["subtensors", "TRL"], "variant")
    data = options.out / "grpo_cycle.json"
    if options.here:
        rows = load(CycleRow, data) if data.exists() else []
        for row in measure(wanted[0], options.cycles, options.tiny, options.device):
            rows.append(row)
            save(rows, data)  # a run that is cut short leaves what it measured
        print(f"{wanted[0]}: {options.cycles} cycles", flush=True)
        if wanted[0] == "TRL":
            os._exit(0)  # torch_memory_saver aborts a process in which torch frees its memory at the end
        return 0
    missing = [name for name in ("trl", "torch_memory_saver") if find_spec(name) is None]
    if "TRL" in wanted and (missing or options.device != "cuda"):
        print(f"TRL is left out: it needs {' and '.join(missing) if missing else 'a GPU'}")
        wanted.remove("TRL")
    options.out.mkdir(parents=True, exist_ok=True)
    save([], data)
    here = ["grpo-cycle", "--here", "--cycles", str(options.cycles), "--device", options.device]
    for name in wanted:
        run_cold("benchmarks", [*here, "--variants", name, "--out", str(options.out), *["--tiny"] * options.tiny])
    rows = load(CycleRow, data)
    columns = ["variant", "cycle", "seconds", *rows[0].seconds, "freed MiB", "free MiB", "loss"]
    cells = [
        [
            *(row.variant, str(row.cycle)),
            *(figure(x, 3) for x in (sum(row.seconds.values()), *row.seconds.values())),
            *(figure(row.freed_mb, 6), figure(row.free_mb, 6), figure(row.loss)),
        ]
        for row in rows
    ]
    Console().print(folded(describe(rows), columns, cells))
    return 0
