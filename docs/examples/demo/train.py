"""One training run, measured: the same model and data whatever the optimizer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch._dynamo  # torch.optim imports it in its first step; here, so that no run pays for it
import torch.nn.functional as F
from torch import Tensor, nn

from demo.memory import peak_mb
from demo.model import GPT, Size
from demo.text import batches, pairs
from demo.timing import Span, count_aten_calls, count_kernels, synchronize
from subtensors.optim import Optimizer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Plan:
    """What is trained, where and for how long.

    Args:
        size: of the model.
        batch: sequences a step.
        steps: optimizer steps, two at least.
        device: "cpu" or "cuda".
        learning_rate: constant.
        dtype: of the parameters.
        seed: of the parameters and the data.
    """

    size: Size
    batch: int
    steps: int
    device: str
    learning_rate: float
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Run:
    """What one training run gave.

    Args:
        name: of the optimizer.
        losses: one a step.
        first_step_ms: the first whole step, with the state it makes and what it compiles.
        step_ms: each later step: forward, backward, optimizer.
        optimizer_ms: the optimizer's part of each of them.
        peak_mb: the most memory in use, in MiB; on a CPU, that of the tensors which a step makes.
        calls: kernels (GPU) or aten calls (CPU) in one optimizer step.
        replayed: how many optimizer steps were the replay of a graph, or why none was; "-" where none was asked for.
        model: as it was trained.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    first_step_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    calls: int = 0
    replayed: str = "-"
    model: GPT | None = field(default=None, repr=False)


def train(
    name: str,
    make_optimizer: OptimizerFactory,
    plan: Plan,
    text: Tensor,
    chunked: bool = False,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Run:
    """Train one model from the plan's seed and measure it.

    Args:
        name: of the optimizer, for the report.
        make_optimizer: gives the optimizer of the model's parameters.
        plan: the model, the data and the steps.
        text: uint8, `(size,)`.
        chunked: chunk the hidden states before the head.
        on_step: told each step's loss.

    Returns:
        the losses and the measurements.

    >>> from demo.text import corpus
    >>> plan = Plan(Size(layers=1, width=8, heads=2, context=8), batch=2, steps=3, device="cpu", learning_rate=1e-3)
    >>> len(train("SGD", torch.optim.SGD, plan, corpus(1000)).losses)
    3
    """
    on_gpu = plan.device == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    torch.manual_seed(plan.seed)
    tokens, vocabulary = pairs(text)
    model = GPT(plan.size, vocabulary, chunked).to(plan.device, plan.dtype)
    optimizer = make_optimizer(model.parameters())
    run = Run(name, model=model)
    data = [
        (inputs.to(plan.device), targets.reshape(-1).to(plan.device))
        for inputs, targets in batches(tokens, plan.batch, plan.size.context, plan.steps, plan.seed)
    ]
    # The device's libraries start up in the first forward and backward: that is no optimizer's time either.
    _forward_backward(model, plan, *data[0])
    for inputs, targets in data:
        _step(run, model, optimizer, plan, inputs, targets)
        on_step(run.losses[-1])

    run.replayed = _replayed(optimizer, plan)
    if on_gpu:
        run.peak_mb = torch.cuda.max_memory_allocated() / 2**20
    else:
        optimizer.zero_grad()
        run.peak_mb = peak_mb(lambda: _forward_backward(model, plan, *data[-1]))
    run.calls = count_kernels(optimizer.step) if on_gpu else count_aten_calls(optimizer.step)
    return run


def _forward_backward(model: GPT, plan: Plan, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(plan.device, dtype=torch.bfloat16, enabled=plan.device == "cuda"):
        logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).to(plan.dtype), targets)
    loss.backward()
    return loss.detach()


def _step(run: Run, model: GPT, optimizer: torch.optim.Optimizer, plan: Plan, inputs: Tensor, targets: Tensor) -> None:
    """Take a step, and note what it took."""
    synchronize(plan.device)
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = _forward_backward(model, plan, inputs, targets)
    with Span(plan.device) as span:
        optimizer.step()
    synchronize(plan.device)
    elapsed = (time.perf_counter() - started) * 1e3
    if not run.losses:
        run.first_step_ms = elapsed
    else:
        run.step_ms.append(elapsed)
        run.optimizer_ms.append(span.ms())
    run.losses.append(float(loss))


def _replayed(optimizer: torch.optim.Optimizer, plan: Plan) -> str:
    """How many of the steps were replays, for an optimizer that was asked for them; on a CPU there is no graph."""
    if not isinstance(optimizer, Optimizer) or optimizer.replays is None:
        return "-"
    return f"{optimizer.replays} of {plan.steps}" if plan.device == "cuda" else "none: no GPU"
