"""The benchmark of TRL's trainers: a batch's loss, its clipped gradients and a step, as they come and after one call.

The trainers are TRL's own, of SFT and of GRPO with an entropy bonus, and so is the code of the loss; what differs is
one call of `apply_to_trainer`, or an argument of TRL's. Batches are random tokens of one length, made before they are
timed: TRL collates and generates outside of the step. TRL's default loss runs in chunks by itself, without logits.
With `--errors` the loss and the gradients of a batch in bfloat16 are compared with TRL's own in float64, of the same
weights, and nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend

import subtensors as st
from benchmarks.options import add_shared_options, names
from benchmarks.rows import Setting, installed, save
from benchmarks.table import describe, figure, folded
from benchmarks.training_step import SIZES, TINY, WARM, Job, timed, unpatched

Batch = dict[str, Any]

COMPLETIONS = 8
"""Completions of a prompt, in a batch of GRPO."""


def tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of as many words; no batch needs it."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    words = ["<pad>", "<s>", "</s>", *map(str, range(vocabulary - 3))]
    level = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>")
    inner = tokenizers.Tokenizer(level)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def arguments(config: type, folder: str, job: Job, **more: object) -> Any:
    """Return a trainer's arguments: one batch a step, without checkpoints and logs."""
    return config(
        output_dir=folder,
        per_device_train_batch_size=job.batch,
        learning_rate=1e-4,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=job.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **more,
    )


def as_trained(trainer: Any) -> Any:
    """Return a trainer whose model is patched as `train()` would patch it when it begins."""
    if trainer.args.use_liger_kernel:
        import_module("transformers.integrations.liger").apply_liger_kernel(
            trainer.model, trainer.args.liger_kernel_config
        )
    return trainer


def sft(job: Job, folder: str, **more: object) -> Any:
    """Return TRL's trainer of the next token."""
    trl, datasets = import_module("trl"), import_module("datasets")
    trainer = trl.SFTTrainer(
        model=job.make(),
        args=arguments(trl.SFTConfig, folder, job, max_length=None, **more),
        train_dataset=datasets.Dataset.from_list([{"input_ids": [3, 4, 5]}]),
        processing_class=tokenizer(vocabulary(job)),
    )
    return as_trained(trainer)


def grpo(job: Job, folder: str, **more: object) -> Any:
    """Return TRL's trainer of a policy, with an entropy bonus."""
    trl, datasets = import_module("trl"), import_module("datasets")
    count = min(COMPLETIONS, job.batch)
    trainer = trl.GRPOTrainer(
        model=job.make(),
        reward_funcs=lambda completions, **others: [0.0] * len(completions),
        args=arguments(trl.GRPOConfig, folder, job, num_generations=count, entropy_coef=0.01, **more),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1 2"}] * count),
        processing_class=tokenizer(vocabulary(job)),
    )
    return as_trained(trainer)


TRAINERS: dict[str, Callable[..., Any]] = {"sft": sft, "grpo": grpo}

CUDNN = SDPBackend.CUDNN_ATTENTION

LIGER = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
"""Liger's kernels for layers: TRL's chunked scores need the forward that Liger's loss would replace."""

WAYS: dict[str, tuple[dict[str, object], dict[str, Any] | None]] = {
    "TRL": ({}, None),
    "TRL, cuDNN": ({}, {"loss": None, "attention": CUDNN}),
    "TRL, Liger, cuDNN": (LIGER, {"loss": None, "attention": CUDNN}),
    "apply_to_trainer": ({}, {"optimizer": "adamw"}),
    "apply_to_trainer, compile": ({}, {"optimizer": "adamw", "compile": True}),
    "apply_to_trainer, compile, cuDNN": ({}, {"optimizer": "adamw", "compile": True, "attention": CUDNN}),
}
"""TRL's arguments, and those of `apply_to_trainer`; None: it is not called."""


def vocabulary(job: Job) -> int:
    """Return the number of classes of the model."""
    found: int = (TINY if job.tiny else SIZES[job.model])["vocab_size"]
    return found


def batch_of(job: Job) -> Batch:
    """Return a batch as the trainer's collator, or its generation, makes it."""
    ids = torch.randint(3, vocabulary(job), (job.batch, job.length), device=job.device)
    mask = torch.ones_like(ids)
    if job.loss == "sft":
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    start = job.length // 4
    return {
        "prompt_ids": ids[:, :start],
        "prompt_mask": mask[:, :start],
        "completion_ids": ids[:, start:],
        "completion_mask": mask[:, start:],
        "advantages": torch.linspace(-1, 1, job.batch, device=job.device),
        "num_items_in_batch": mask[:, start:].sum(),
    }


@dataclass(frozen=True)
class TrlRow:
    """One way to train with TRL.

    Args:
        loss: "sft" or "grpo".
        variant: which way.
        batch, length: sequences a step, and tokens of each.
        step_ms: loss, gradients and a step of the optimizer; mean.
        interval_ms: half of its 95% interval.
        allocated_mb: the most device memory in a step, parameters and state included; None on a CPU.
        last_loss: of the last step.
        trl: version.
        setting: where it was measured.
    """

    loss: str
    variant: str
    batch: int
    length: int
    step_ms: float
    interval_ms: float
    allocated_mb: float | None
    last_loss: float
    trl: str | None
    setting: Setting = field(repr=False)


@dataclass(frozen=True)
class TrlErrorRow:
    """The errors of one way to train with TRL, in bfloat16, against TRL's own trainer in float64.

    Args:
        loss, variant, batch, length, trl, setting: as in `TrlRow`.
        loss_error: the relative error of the loss.
        gradient_error: the norm of the error of all gradients over their norm.
    """

    loss: str
    variant: str
    batch: int
    length: int
    loss_error: float
    gradient_error: float
    trl: str | None
    setting: Setting = field(repr=False)


@contextmanager
def new_trainer(job: Job, name: str) -> Iterator[Any]:
    """A context with a trainer of a new model that trains in one way; Liger's patches of its classes end with it."""
    theirs, ours = WAYS[name]
    with tempfile.TemporaryDirectory() as folder, unpatched(job.model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = TRAINERS[job.loss](job, folder, **theirs)
        applied = None if ours is None else st.integrations.transformers.apply_to_trainer(trainer, **ours)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        yield trainer
        if applied is not None:
            applied.revert()


def visit(job: Job, name: str, batches: list[Batch], steps: int) -> tuple[list[float], float | None, float]:
    """Train a new model in one way; returns milliseconds of each step, the most allocated MiB, and the last loss."""
    with new_trainer(job, name) as trainer:
        optimizer = trainer.create_optimizer()

        def clip(*args: object) -> None:
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)

        if trainer.args.max_grad_norm:  # `apply_to_trainer` clips in the optimizer's step
            optimizer.register_step_pre_hook(clip)
        taken, peaks, loss = timed(
            lambda batch: trainer.compute_loss(trainer.model, {**batch}), optimizer, batches, steps, job.device
        )
    return taken[WARM:], peaks[0] if peaks else None, loss


def gradients(job: Job, name: str, batch: Batch, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """Return the loss of a batch and its gradients, on the host, of a new model that is cast before."""
    with new_trainer(job, name) as trainer:
        trainer.model.to(dtype)
        loss = trainer.compute_loss(trainer.model, {**batch})
        loss.backward()
        return loss.item(), [p.grad.cpu() for p in trainer.model.parameters()]


def measure_errors(job: Job, ways: list[str]) -> list[TrlErrorRow]:
    """Measure the errors of ways on a batch."""
    torch.manual_seed(0)
    batch = batch_of(job)
    exact_loss, exact = gradients(job, "TRL", batch, torch.float64)
    norm = sum(g.square().sum() for g in exact) ** 0.5
    rows = []
    for name in ways:
        gc.collect()
        loss, found = gradients(job, name, batch, torch.bfloat16)
        difference = sum((g.double() - e).square().sum() for g, e in zip(found, exact, strict=True)) ** 0.5
        errors = abs(loss / exact_loss - 1), float(difference / norm)
        where = job.loss, name, job.batch, job.length
        rows.append(TrlErrorRow(*where, *errors, installed("trl"), Setting.now(job.device, job.tiny)))
    return rows


def measure(job: Job, ways: list[str], rounds: int, steps: int) -> list[TrlRow]:
    """Measure ways in rounds of random order, each visit with a new model from the same seed."""
    torch.manual_seed(0)
    batches = [batch_of(job) for _ in range(3)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, tuple[float | None, float]] = {}
    for _ in range(rounds):
        for name in random.sample(ways, len(ways)):
            gc.collect()
            taken, peak, loss = visit(job, name, batches, steps)
            times[name] += taken
            ends[name] = peak, loss
    return [
        TrlRow(
            *(job.loss, name, job.batch, job.length),
            *(mean(taken), 1.96 * stdev(taken) / len(taken) ** 0.5),
            *ends[name],
            installed("trl"),
            Setting.now(job.device, job.tiny),
        )
        for name, taken in times.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument(
        "--loss", choices=TRAINERS, default="sft", help="of the next token, or of a policy (%(default)s)"
    )
    parser.add_argument("--model", choices=SIZES, default="qwen3", help="whose sizes (%(default)s)")
    parser.add_argument("--variants", default=";".join(WAYS), help="separated by semicolons (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="visits of each variant (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed in a visit (%(default)s)")
    parser.add_argument("--errors", action="store_true", help="of loss and gradients against float64; no times")
    add_shared_options(parser, "a small model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    wanted = names(options.variants, [*WAYS], "variant", ";")
    if find_spec("trl") is None:
        raise SystemExit("this benchmark needs TRL: pip install trl")
    if options.device != "cuda" or find_spec("liger_kernel") is None:
        wanted = [name for name in wanted if "Liger" not in name]  # its kernels run on a GPU
    if options.device != "cuda":
        wanted = [name for name in wanted if "cuDNN" not in name]
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})
    batch, length = (2, 12) if options.tiny else (options.batch, options.length)
    dtype = torch.bfloat16 if options.errors else None
    job = Job(options.model, options.loss, options.tiny, options.device, batch, length, dtype)
    title = f"{job.model}, {job.loss}, {batch} x {length}"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.errors:
        errors = measure_errors(job, wanted)
        save(errors, options.out / f"trl_{options.loss}_errors.json")
        lines = [[row.variant, figure(row.loss_error, 2), figure(row.gradient_error, 3)] for row in errors]
        columns = ["variant", "error of the loss", "of the gradients"]
        Console().print(folded(f"{title}\n{describe(errors)}", columns, lines, names=1))
        return 0
    rows = measure(job, wanted, options.rounds, options.steps)
    save(rows, options.out / f"trl_{options.loss}.json")
    lines = [
        [
            row.variant,
            figure(row.step_ms),
            figure(row.interval_ms, 2),
            figure(row.batch * row.length / row.step_ms * 1e3, 6),
            figure(row.allocated_mb, 6),
            figure(row.last_loss, 5),
        ]
        for row in rows
    ]
    columns = ["variant", "step ms", "+-", "tokens/s", "allocated MiB", "loss"]
    Console().print(folded(f"{title}\n{describe(rows)}", columns, lines, names=1))
    return 0
