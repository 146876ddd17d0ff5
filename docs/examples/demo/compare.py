"""The demo command: the training of `train_gpt`, without subtensors and with it, step by step side by side.

Each step is taken by every variant before the next one, in an order that is drawn anew: a machine that is slower for a
while is so for all of them. Losses differ by rounding, and by how much is shown: how far each run is from a plain
training in higher precision, and how far a second plain training is from the first. Its loss is scaled by 3 and its
gradients are divided by 3, which is mathematically the same, but rounded otherwise.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demo.evaluate import Evaluation, evaluate
from demo.memory import peak_mb
from demo.timing import Span, count_kernels, synchronize
from subtensors.optim import Optimizer
from train_gpt import PLANS as TRAINING_PLANS
from train_gpt import Data, Plan, Training

PLAIN = "plain PyTorch"
SCALED = "plain, loss times 3"
OURS = "subtensors"
UNCAPTURED = "its step not captured"

PLANS = {device: dataclasses.replace(plan, token_bytes=2) for device, plan in TRAINING_PLANS.items()}
"""With pairs of bytes as tokens: thousands of them, so that logits are as large beside the rest as they usually are."""

DOCUMENTS = {"cpu": 30, "cuda": 300}
MEMORY_STEPS = 8
"""Steps of a variant alone, whose memory is measured; on a CPU the one with the longest documents."""


def high_precision(plan: Plan) -> Plan:
    """Return the plan in float64, on a GPU in float32 without autocast."""
    if plan.device == "cuda":
        return dataclasses.replace(plan, autocast=False)
    return dataclasses.replace(plan, dtype=torch.float64)


class Scaled(Training):
    """The same training with its loss scaled, as by `torch.amp.GradScaler`; its step divides the gradients, too."""

    SCALE = 3.0

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add up gradients, and return the loss."""
        with self.loss.register_forward_hook(lambda module, arguments, loss: loss * self.SCALE):
            loss = super().forward_backward(inputs, targets)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.SCALE
        return loss / self.SCALE


def variants(plan: Plan, data: Data) -> dict[str, Callable[[], Training]]:
    """Return what makes each training, by its name in the report; the first is the reference."""
    made: dict[str, Callable[[], Training]] = {
        PLAIN: lambda: Training(plan, data, ours=False),
        SCALED: lambda: Scaled(plan, data, ours=False),
        OURS: lambda: Training(plan, data),
    }
    if plan.device == "cuda":
        made[UNCAPTURED] = lambda: Training(plan, data, graph=False)
    return made


@dataclass
class Run:
    """The measurements of one variant.

    Args:
        name: of the variant.
        training: the variant.
        losses: one a step, in nats a token.
        errors: how far each loss is from that of the plain training in higher precision.
        first_step_ms: the first whole step, with the state it makes and what it compiles.
        step_ms: each later step: batch, forward, backward, optimizer.
        optimizer_ms: the optimizer's part of each of them.
        peak_mb: the most memory that torch held while the variant was alone, in MiB; on a CPU, that of the tensors that
            a forward and backward makes.
        kernels: in one optimizer step, clipping included; 0 on a CPU.
        replayed: how many optimizer steps were the replay of a graph; "-" where none was to be.
    """

    name: str
    training: Training
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    first_step_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    kernels: int = 0
    replayed: str = "-"

    def step(self) -> None:
        """Take a step, and note what it took."""
        device = self.training.plan.device
        synchronize(device)
        started = time.perf_counter()
        span = Span(device)
        self.losses.append(self.training.step(span))
        synchronize(device)
        elapsed = (time.perf_counter() - started) * 1e3
        if len(self.losses) == 1:
            self.first_step_ms = elapsed
        else:
            self.step_ms.append(elapsed)
            self.optimizer_ms.append(span.ms())


def memory_alone(make: Callable[[], Training], plan: Plan) -> float:
    """Return the most memory of a variant that runs by itself, in MiB."""
    if plan.device == "cpu":
        training = make()
        training.local_loss.run = None  # which counting ops would keep from replaying
        longest = max((training.batch(step) for step in range(MEMORY_STEPS)), key=lambda batch: batch[0].shape[1])
        return peak_mb(lambda: training.forward_backward(*longest))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    training = make()
    for _ in range(MEMORY_STEPS):
        training.step()
    return (torch.cuda.max_memory_reserved() - before) / 2**20


def compare(plan: Plan, on_step: Callable[[float], None] = lambda loss: None) -> list[Run]:
    """Train every variant from the same seed on the same data, and measure it.

    Args:
        plan: the model, the data and the steps, two at least.
        on_step: told the reference's loss after each step of all.

    Returns:
        one run a variant.
    """
    data = Data(plan)
    made = variants(plan, data)
    peaks = {name: memory_alone(make, plan) for name, make in made.items()}
    gc.collect()
    runs = [Run(name, make(), peak_mb=peaks[name]) for name, make in made.items()]
    high_precision_training = Training(high_precision(plan), data, ours=False)
    order = random.Random(plan.seed)
    for _ in range(plan.steps):
        for run in order.sample(runs, len(runs)):
            run.step()
        truth = high_precision_training.step()
        for run in runs:
            run.errors.append(abs(run.losses[-1] - truth))
        on_step(runs[0].losses[-1])
    for run in runs:
        optimizer = run.training.optimizer
        if isinstance(optimizer, Optimizer) and optimizer.replays is not None:
            run.replayed = f"{optimizer.replays} of {plan.steps}"
        if plan.device == "cuda":
            run.kernels = count_kernels(run.training.update)
    return runs


def evaluated(run: Run) -> list[Evaluation]:
    """Evaluate a trained model over documents of varying lengths, one by one."""
    training = run.training
    training.model.chunked = False
    return evaluate(training.model, training.data.evaluation.documents[: DOCUMENTS[training.plan.device]])
