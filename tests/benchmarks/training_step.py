"""The benchmark of whole training steps of models of transformers: one call of `apply` beside the peers' one call.

Two losses: "sft" is the model's own, of the next token; "grpo" is a clipped policy loss with an entropy bonus, written
in plain torch over the model's logits, of completions that follow prompts of a quarter of the length. Peers have it
compiled, too.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend

import subtensors as st
from benchmarks.longest_context import ContextRow, longest_context, report_contexts
from benchmarks.options import add_shared_options
from benchmarks.ranks import on_ranks
from benchmarks.rows import Setting, installed, save
from benchmarks.table import describe, figure, folded
from demo.timing import seconds, synchronize

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
"""Sizes of Llama-3.2-1B and of Qwen3-1.7B, whose embeddings are tied, by the type of the model."""

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
}

Loss = Callable[[Tensor], Tensor]
"""The loss of a batch of tokens, (batch, length)."""

LossOf = Callable[[Callable[..., Any], Tensor], Tensor]
"""The loss of such a batch, given the model."""

Made = tuple[Callable[..., Any], torch.optim.Optimizer]
"""The callable in the model's place, and the optimizer."""


def model_type(model: Any) -> str:
    """Return the type of a model of transformers."""
    return str(model.config.model_type)


def module_of(kind: str) -> dict[str, Any]:
    """Return the names in the module of a type of model."""
    return vars(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"))


def sft(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """The model's own loss of the next token."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def policy_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The policy loss of completions, with an entropy bonus; each sequence has its own advantage."""
    start, length = ids.shape[1] // 4, ids.shape[1]
    log_p = logits[:, start - 1 : length - 1].float().log_softmax(-1)
    chosen = log_p.gather(-1, ids[:, start:, None]).squeeze(-1)
    advantage = torch.linspace(-1, 1, len(ids), device=ids.device)[:, None]
    ratio = (chosen - (chosen.detach() - 0.1)).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss: Tensor = -(gain + 0.01 * entropy).mean()
    return loss


def grpo(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """The policy loss over the model's logits."""
    return policy_loss(model(input_ids=ids).logits, ids)


def grpo_compiled(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """The same, with the loss compiled for itself."""
    loss: Tensor = torch.compile(policy_loss)(model(input_ids=ids).logits, ids)
    return loss


LOSSES: dict[str, LossOf] = {"sft": sft, "grpo": grpo}


def plain(model: nn.Module) -> Made:
    """The model as it comes, with torch's fused AdamW."""
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def compiled(model: nn.Module) -> Made:
    """The same, compiled whole."""
    return torch.compile(model), plain(model)[1]


def without_mask(model: nn.Module) -> Made:
    """The same, compiled whole, with the causal mask left out by hand, so that attention has its flash kernel."""
    module_of(model_type(model))["create_causal_mask"] = lambda *args, **kwargs: None
    return compiled(model)


def liger(model: nn.Module) -> Made:
    """The model patched by Liger."""
    import liger_kernel.transformers as patches  # type: ignore[import-not-found]

    getattr(patches, f"apply_liger_kernel_to_{model_type(model)}")(model=model)
    return plain(model)


def liger_compiled(model: nn.Module) -> Made:
    """The model patched by Liger and compiled, with the causal mask left out by hand."""
    liger(model)
    return without_mask(model)


def ours(model: nn.Module, **options: Any) -> Made:
    """The model after one call of `apply`."""
    optimizer = st.integrations.transformers.apply(model, "adamw", lr=1e-4, **options).optimizer
    assert optimizer is not None
    return model, optimizer


def with_cudnn(model: Any, way: Callable[[nn.Module], Made]) -> Made:
    """Another way, with attention's kernels from cuDNN by hand."""
    st.integrations.transformers.apply(model, loss=None, attention=SDPBackend.CUDNN_ATTENTION)
    return way(model)


WAYS: dict[str, Callable[[nn.Module], Made]] = {
    "eager": plain,
    "compile": compiled,
    "compile, no mask": without_mask,
    "compile, no mask, cuDNN": lambda model: with_cudnn(model, without_mask),
    "Liger": liger,
    "Liger, cuDNN": lambda model: with_cudnn(model, liger),
    "Liger, compile": liger_compiled,
    "apply": ours,
    "apply, pointwise": lambda model: ours(model, compile="pointwise"),
    "apply, pointwise, cuDNN": lambda model: ours(model, compile="pointwise", attention=SDPBackend.CUDNN_ATTENTION),
    "apply, compile": lambda model: ours(model, compile=True),
    "apply, compile, cuDNN": lambda model: ours(model, compile=True, attention=SDPBackend.CUDNN_ATTENTION),
    "apply, compile, cuDNN, 4GiB": lambda model: ours(
        model, compile=True, attention=SDPBackend.CUDNN_ATTENTION, loss={"memory_limit": "4GiB"}
    ),
    "apply, compile, cuDNN, int8": lambda model: ours(
        model, compile=True, attention=SDPBackend.CUDNN_ATTENTION, state_dtype="int8"
    ),
}


WARM = 2
"""Steps before those that are timed."""


def timed(
    loss_of: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any] | Tensor,
    steps: int,
    device: str,
    warm: int = WARM,
) -> tuple[list[float], list[float], float]:
    """Train on batches in turn.

    Args:
        loss_of: a batch's loss.
        optimizer: of the step.
        batches: that are repeated.
        steps: that are timed.
        device: "cpu" or "cuda".
        warm: steps before them.

    Returns:
        milliseconds of each step, the first `warm` ones in front; allocated and reserved MiB; the last loss.
    """
    is_cuda, taken = device == "cuda", list[float]()
    last: list[Tensor] = []

    def step(batch: Any) -> None:
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last[:] = [loss.detach()]

    for i in range(warm + steps):
        if i == warm - 1 and is_cuda:  # the last of them takes memory anew
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        taken.append(1e3 * seconds(partial(step, batches[i % len(batches)]), device))
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if is_cuda else []
    return taken, [peak / 2**20 for peak in peaks], float(last[0])


@dataclass(frozen=True)
class StepRow:
    """One way to train.

    Args:
        model: its type.
        loss: "sft" or "grpo".
        variant: which way.
        batch, length: sequences a step of each process, and tokens of each.
        first_s: the first step in this process, with what it compiles.
        step_ms: of a whole step up to a synchronized device; mean.
        interval_ms: half of its 95% interval.
        allocated_mb, reserved_mb: the most device memory in a step, parameters and state included; None on a CPU.
        last_loss: of the last step.
        transformers: version.
        setting: where it was measured.
        processes: how many, a GPU each, with FSDP2 at its default flags where there are several.
    """

    model: str
    loss: str
    variant: str
    batch: int
    length: int
    first_s: float
    step_ms: float
    interval_ms: float
    allocated_mb: float | None
    reserved_mb: float | None
    last_loss: float
    transformers: str | None
    setting: Setting = field(repr=False)
    processes: int = 1


@contextmanager
def unpatched(kind: str) -> Iterator[None]:
    """Take back, at the end, what a way changes in the module of the model."""
    module = module_of(kind)
    kept = dict(module)
    try:
        yield
    finally:
        module.update(kept)


@dataclass(frozen=True)
class Job:
    """A training to measure.

    Args:
        model: its type.
        loss: "sft" or "grpo".
        tiny: cut the model down.
        device: "cpu" or "cuda".
        batch, length: sequences a step, and tokens of each; in each process.
        dtype: of the model; None: bfloat16 on a GPU, float32 on a CPU.
    """

    model: str
    loss: str
    tiny: bool
    device: str
    batch: int
    length: int
    dtype: torch.dtype | None = None

    def make(self) -> nn.Module:
        """Return a new model, the same each time."""
        transformers = importlib.import_module("transformers")
        sizes = TINY if self.tiny else SIZES[self.model]
        config = transformers.CONFIG_MAPPING[self.model](tie_word_embeddings=True, use_cache=False, **sizes)
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config)
        usual = torch.bfloat16 if self.device == "cuda" else torch.float32
        made: nn.Module = model.to(self.dtype or usual).train()
        if dist.is_initialized():
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        return made

    def visit(self, name: str, ids: Tensor, steps: int, warm: int = WARM) -> tuple[list[float], list[float], float]:
        """Train a new model in one way on tokens, (batches, batch, length), as `timed` says."""
        model = self.make()
        with unpatched(self.model):
            called, optimizer = WAYS[name](model)
            loss_of = LOSSES[self.loss]
            if loss_of is grpo and name.startswith(("compile", "Liger")):
                loss_of = grpo_compiled
            return timed(partial(loss_of, called), optimizer, ids, steps, self.device, warm)

    def measure(self, names: list[str], rounds: int, steps: int, deadline: float = float("inf")) -> list[StepRow]:
        """Measure ways in rounds of random order, each visit with a new model from the same seed.

        Args:
            names: of the ways.
            rounds: how often each is visited.
            steps: that are timed in a visit.
            deadline: on `time.monotonic`, after which no round begins.
        """
        vocabulary = (TINY if self.tiny else SIZES[self.model])["vocab_size"]
        processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        order = random.Random(0 if processes > 1 else None)  # all processes go the same ways
        torch.manual_seed(rank)
        ids = torch.randint(vocabulary, (3, self.batch, self.length), device=self.device)
        first, times = dict[str, float](), {name: list[float]() for name in names}
        peaks, losses = dict[str, list[float]](), dict[str, float]()
        for turn in range(rounds):
            if turn and time.monotonic() > deadline:
                break
            for name in order.sample(names, len(names)):
                gc.collect()
                taken, peaks[name], losses[name] = self.visit(name, ids, steps)
                first.setdefault(name, taken[0] / 1e3)
                times[name] += taken[WARM:]
        found = []
        for name, taken in times.items():
            half = 1.96 * stdev(taken) / len(taken) ** 0.5
            allocated, reserved = peaks[name] or (None, None)
            found.append(
                StepRow(
                    *(self.model, self.loss, name),
                    *(self.batch, self.length),
                    *(first[name], mean(taken), half),
                    *(allocated, reserved),
                    losses[name],
                    installed("transformers"),
                    Setting.now(self.device, self.tiny),
                    processes,
                )
            )
        return found

    def longest(self, name: str) -> ContextRow:
        """Find the longest sequence that one way trains on, a sequence a step."""
        vocabulary = (TINY if self.tiny else SIZES[self.model])["vocab_size"]

        def peaks(length: int) -> list[float]:
            return self.visit(name, torch.randint(vocabulary, (1, 1, length), device=self.device), 1, 1)[1]

        length, allocated = longest_context(peaks, self.length, self.device)
        setting = Setting.now(self.device, self.tiny)
        return ContextRow(self.model, self.loss, name, length, allocated, installed("transformers"), setting)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--model", choices=SIZES, default="llama", help="Llama-3.2-1B or Qwen3-1.7B (%(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="sft", help="of the next token, or of a policy (%(default)s)")
    parser.add_argument("--variants", default=";".join(WAYS), help="separated by semicolons (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="visits of each variant (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed in a visit (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument(
        "--longest", action="store_true", help="find the longest sequence that fits, one a step; no times"
    )
    parser.add_argument("--processes", type=int, default=1, help="sharded by FSDP2, a GPU each (%(default)s)")
    add_shared_options(parser, "a small model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    names = [name.strip() for name in options.variants.split(";")]
    if unknown := set(names) - set(WAYS):
        raise SystemExit(f"unknown variants {sorted(unknown)}; there are {'; '.join(WAYS)}")
    if installed("liger-kernel") is None:
        names = [name for name in names if "Liger" not in name]
    deadline = time.monotonic() + options.seconds
    batch, length = (2, 12) if options.tiny else (options.batch, options.length)
    job = Job(options.model, options.loss, options.tiny, options.device, batch, length)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.longest:
        if job.device != "cuda":
            raise SystemExit("--longest fills a GPU's memory: it needs one")
        report_contexts(map(job.longest, names), options.out / f"{job.model}_{job.loss}_longest.json")
        return 0
    several = options.processes > 1
    if several and deadline < float("inf"):
        raise SystemExit("--seconds ends one process before another: give --rounds")
    given = names, options.rounds, options.steps
    rows = (
        on_ranks(job.measure, options.processes, options.device, *given) if several else job.measure(*given, deadline)
    )
    save(rows, options.out / f"{options.model}_{options.loss}{'_sharded' * several}.json")
    lines = [
        [
            row.variant,
            figure(row.first_s, 3),
            figure(row.step_ms),
            figure(row.interval_ms, 2),
            figure(row.processes * row.batch * row.length / row.step_ms * 1e3, 6),
            figure(row.allocated_mb, 6),
            figure(row.reserved_mb, 6),
            figure(row.last_loss, 5),
        ]
        for row in rows
    ]
    columns = ["variant", "first s", "step ms", "+-", "tokens/s", "allocated MiB", "reserved MiB", "loss"]
    Console().print(folded(f"{job.model}, {job.loss}, {batch} x {length}\n{describe(rows)}", columns, lines))
    return 0
