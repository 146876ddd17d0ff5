"""The benchmark of a whole training step of a Llama of transformers: one call of `apply` beside the peers' one call."""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import subtensors as st
from benchmarks.rows import Setting, installed, save
from benchmarks.table import describe, figure, folded
from demo.timing import seconds, synchronize

SIZES: dict[bool, dict[str, Any]] = {
    False: {
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
    True: {
        "vocab_size": 97,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    },
}
"""Sizes of Llama-3.2-1B, and of a tiny model, by whether they are tiny."""

MODULE = "transformers.models.llama.modeling_llama"

Loss = Callable[[Tensor], Tensor]
"""The loss of a batch of tokens, (batch, length)."""

Made = tuple[Loss, torch.optim.Optimizer]


def plain(model: nn.Module) -> Made:
    """The model as it comes, with torch's fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return lambda ids: model(input_ids=ids, labels=ids).loss, optimizer


def compiled(model: nn.Module, **options: Any) -> Made:
    """The same, compiled whole."""
    _, optimizer = plain(model)
    whole = torch.compile(model, **options)
    return lambda ids: whole(input_ids=ids, labels=ids).loss, optimizer


def without_mask(model: nn.Module, **options: Any) -> Made:
    """The same, compiled whole, with the causal mask left out by hand, so that attention has its flash kernel."""
    vars(importlib.import_module(MODULE))["create_causal_mask"] = lambda *args, **kwargs: None
    return compiled(model, **options)


def with_cudnn(loss_of: Loss, optimizer: torch.optim.Optimizer) -> Made:
    """The same with attention's kernels from cuDNN, by hand."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def loss(ids: Tensor) -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return loss_of(ids)

    return loss, optimizer


APART: dict[str, Any] = {"options": {"size_asserts": True}}
"""Arguments of `torch.compile` that change nothing but which compiled code is taken: that of other kernels isn't."""


def liger(model: nn.Module) -> Made:
    """The model patched by Liger."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    apply_liger_kernel_to_llama(model=model)
    return plain(model)


def liger_compiled(model: nn.Module) -> Made:
    """The model patched by Liger and compiled, with the causal mask left out by hand."""
    liger(model)
    return without_mask(model)


def ours(model: nn.Module, **options: Any) -> Made:
    """The model after one call of `apply`."""
    optimizer = st.integrations.transformers.apply(model, "adamw", lr=1e-4, **options).optimizer
    assert optimizer is not None
    return lambda ids: model(input_ids=ids, labels=ids).loss, optimizer


WAYS: dict[str, Callable[[nn.Module], Made]] = {
    "eager": plain,
    "compile": compiled,
    "compile, no mask": without_mask,
    "compile, no mask, cuDNN": lambda model: with_cudnn(*without_mask(model, **APART)),
    "Liger": liger,
    "Liger, cuDNN": lambda model: with_cudnn(*liger(model)),
    "Liger, compile": liger_compiled,
    "apply": ours,
    "apply, compile": lambda model: ours(model, compile=True),
    "apply, compile, cuDNN": lambda model: ours(model, compile=APART, attention=SDPBackend.CUDNN_ATTENTION),
    "apply, compile, cuDNN, int8": lambda model: ours(
        model, compile=APART, attention=SDPBackend.CUDNN_ATTENTION, state_dtype="int8"
    ),
}


@dataclass(frozen=True)
class LlamaRow:
    """One way to train.

    Args:
        variant: which.
        batch, length: sequences a step, and tokens of each.
        first_s: the first step in this process, with what it compiles.
        step_ms: of a whole step up to a synchronized device; mean.
        interval_ms: half of its 95% interval.
        allocated_mb, reserved_mb: the most device memory in a step, parameters and state included; None on a CPU.
        loss: of the last step.
        transformers: version.
        setting: where it was measured.
    """

    variant: str
    batch: int
    length: int
    first_s: float
    step_ms: float
    interval_ms: float
    allocated_mb: float | None
    reserved_mb: float | None
    loss: float
    transformers: str | None
    setting: Setting = field(repr=False)


@contextmanager
def unpatched() -> Iterator[None]:
    """Take back, at the end, what a way changes in the module of the model."""
    module = vars(importlib.import_module(MODULE))
    kept = dict(module)
    try:
        yield
    finally:
        module.update(kept)


def visit(
    name: str, tiny: bool, device: str, ids: Tensor, steps: int, warm: int
) -> tuple[list[float], list[float], float]:
    """Train a new model in one way.

    Args:
        name: of the way.
        tiny: cut the model down.
        device: "cpu" or "cuda".
        ids: (batches, batch, length).
        steps: that are timed.
        warm: steps before them.

    Returns:
        milliseconds of each step, the first `warm` ones in front; allocated and reserved MiB; the last loss.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(tie_word_embeddings=True, use_cache=False, **SIZES[tiny])
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model: nn.Module = transformers.LlamaForCausalLM(config)
        model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    with unpatched():
        loss_of, optimizer = WAYS[name](model)
        taken: list[float] = []
        last: list[Tensor] = []

        def step(batch: Tensor) -> None:
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last[:] = [loss.detach()]

        for i in range(warm + steps):
            if i == warm and device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            taken.append(1e3 * seconds(partial(step, ids[i % len(ids)]), device))
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if device == "cuda" else []
    return taken, [peak / 2**20 for peak in peaks], float(last[0])


def measure(
    names: list[str], tiny: bool, device: str, rounds: int, steps: int, deadline: float = float("inf")
) -> list[LlamaRow]:
    """Measure ways in rounds of random order, each visit with a new model from the same seed.

    Args:
        names: of the ways.
        tiny: cut the model down.
        device: "cpu" or "cuda".
        rounds: how often each is visited.
        steps: that are timed in a visit.
        deadline: on `time.monotonic`, after which no round begins.
    """
    batch, length = (2, 12) if tiny else (8, 2048)
    ids = torch.randint(SIZES[tiny]["vocab_size"], (3, batch, length), device=device)
    first, times = dict[str, float](), {name: list[float]() for name in names}
    peaks, losses = dict[str, list[float]](), dict[str, float]()
    for turn in range(rounds):
        if turn and time.monotonic() > deadline:
            break
        for name in random.sample(names, len(names)):
            gc.collect()
            warm = 2
            taken, peaks[name], losses[name] = visit(name, tiny, device, ids, steps, warm)
            first.setdefault(name, taken[0] / 1e3)
            times[name] += taken[warm:]
    found = []
    for name, taken in times.items():
        half = 1.96 * stdev(taken) / len(taken) ** 0.5
        allocated, reserved = peaks[name] or (None, None)
        found.append(
            LlamaRow(
                name,
                *(batch, length),
                *(first[name], mean(taken), half),
                *(allocated, reserved),
                losses[name],
                installed("transformers"),
                Setting.now(device, tiny),
            )
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--variants", default=";".join(WAYS), help="separated by semicolons (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="visits of each variant (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed in a visit (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument("--tiny", action="store_true", help="a small model: shows that it runs, no more")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results (%(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    names = [name.strip() for name in options.variants.split(";")]
    if unknown := set(names) - set(WAYS):
        raise SystemExit(f"unknown variants {sorted(unknown)}; there are {'; '.join(WAYS)}")
    if installed("liger-kernel") is None:
        names = [name for name in names if "Liger" not in name]
    deadline = time.monotonic() + options.seconds
    rows = measure(names, options.tiny, options.device, options.rounds, options.steps, deadline)
    options.out.mkdir(parents=True, exist_ok=True)
    save(rows, options.out / "llama_step.json")
    lines = [
        [
            f"{row.batch} x {row.length}",
            row.variant,
            figure(row.first_s, 3),
            figure(row.step_ms),
            figure(row.interval_ms, 2),
            figure(row.allocated_mb, 6),
            figure(row.reserved_mb, 6),
            figure(row.loss, 5),
        ]
        for row in rows
    ]
    columns = ["tokens", "variant", "first s", "step ms", "+-", "allocated MiB", "reserved MiB", "loss"]
    Console().print(folded(describe(rows), columns, lines))
    return 0
