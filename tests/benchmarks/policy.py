"""The benchmark of policy losses over a large head: time, memory and error, all ways interleaved in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.options import add_shared_options, names
from benchmarks.rounds import in_rounds, peak_mb
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded
from subtensors.chunked.chunked_tensor import ChunkedTensor, chunk

FULL, TINY = (8192, 2048, 151936), (64, 16, 300)
"""Tokens, width and classes."""

SEQUENCES = 16


def of_tokens(z: Tensor, old: Tensor, advantage: Tensor, tokens: Tensor, bonus: float = 0.0) -> Tensor:
    """GRPO's clipped policy loss, with `bonus` times the entropy."""
    log_p = z.log_softmax(-1)
    ratio = (log_p.gather(-1, tokens[:, None])[:, 0] - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return loss + bonus * (log_p.exp() * log_p).sum(-1).mean() if bonus else loss


def with_entropy(z: Tensor, old: Tensor, advantage: Tensor, tokens: Tensor) -> Tensor:
    """The same with an entropy bonus."""
    return of_tokens(z, old, advantage, tokens, 0.01)


def of_sequences(z: Tensor, old: Tensor, advantage: Tensor, tokens: Tensor) -> Tensor:
    """GSPO's ratio of whole sequences: its gradient is known when all of a sequence's tokens are."""
    chosen = z.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    ratio = (chosen - old).view(SEQUENCES, -1).mean(-1).exp()
    gain = advantage.view(SEQUENCES, -1)[:, 0]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "tokens": of_tokens,
    "entropy": with_entropy,
    "sequences": of_sequences,
}


@dataclass(frozen=True)
class PolicyRow:
    """One way to take one loss and the gradients of hidden states and weight.

    Args:
        loss: which.
        variant: which way.
        step_ms: forward and backward, median.
        low_ms, high_ms: the interval that holds the middle half of the steps.
        peak_mb: memory above the operands, gradients included, MiB; None on a CPU.
        hidden_error, weight_error: of the gradients against float64, over the norm of the truth.
        setting: where it was measured.
    """

    loss: str
    variant: str
    step_ms: float
    low_ms: float
    high_ms: float
    peak_mb: float | None
    hidden_error: float
    weight_error: float
    setting: Setting = field(repr=False)


Step = Callable[[], Tensor]


class PolicyHead:
    """The operands of all losses.

    Args:
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
    """

    def __init__(self, tiny: bool, device: str) -> None:
        torch.manual_seed(0)
        tokens, width, classes = TINY if tiny else FULL
        self.hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(classes, width, device=device, dtype=torch.bfloat16) * width**-0.5
        self.weight = weight.requires_grad_()
        self.rest = (
            torch.full((tokens,), -12.0, device=device),
            torch.randn(tokens, device=device),
            torch.randint(classes, (tokens,), device=device),
        )

    def step(self, loss: str, variant: str) -> Step:
        """Return a function that takes a loss in a way, and its gradients."""
        of = LOSSES[loss]

        def whole(hidden: Tensor, weight: Tensor) -> Tensor:
            return of(F.linear(hidden, weight).float(), *self.rest)

        kind, _, limit = variant.partition(" ")
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "eager": whole,
            "compile": torch.compile(whole) if kind == "compile" else whole,
            "chunk": lambda hidden, weight: whole(chunk(hidden, memory_limit=limit or None), weight),
        }
        if kind not in ways:
            raise SystemExit(f"unknown variant {variant!r}; there are eager, compile, chunk and 'chunk 1400MiB'")
        way = ways[kind]

        def run() -> Tensor:
            self.hidden.grad = self.weight.grad = None
            value = way(self.hidden, self.weight)
            value = value.realize() if isinstance(value, ChunkedTensor) else value
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return run

    def truth(self, loss: str) -> tuple[Tensor, Tensor]:
        """Return the gradients in float64, by the rows of a sequence or so: every loss is a mean over sequences."""
        hidden, weight = (t.detach().double() for t in (self.hidden, self.weight))
        weight.requires_grad_()
        parts = []
        for rows in torch.arange(len(hidden)).view(SEQUENCES, -1):
            part = hidden[rows].requires_grad_()
            old, advantage, tokens = (t[rows.to(t.device)] for t in self.rest)
            log_p = F.linear(part, weight).log_softmax(-1)
            chosen = log_p.gather(-1, tokens[:, None])[:, 0] - old.double()
            ratio = chosen.mean(0, keepdim=True).exp() if loss == "sequences" else chosen.exp()
            gain = advantage.double()[: len(ratio)]
            value = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            if loss == "entropy":
                value = value + 0.01 * (log_p.exp() * log_p).sum(-1).mean()
            (value / SEQUENCES).backward()  # type: ignore[no-untyped-call]
            assert part.grad is not None
            parts.append(part.grad)
        assert weight.grad is not None
        return torch.cat(parts), weight.grad


def measure(losses: list[str], variants: list[str], tiny: bool, device: str, repeats: int) -> list[PolicyRow]:
    """Measure every loss in every way, in rounds of random order.

    Args:
        losses, variants: which.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
        repeats: rounds.
    """
    rows: list[PolicyRow] = []
    head = PolicyHead(tiny, device)
    for loss in losses:
        steps = {variant: head.step(loss, variant) for variant in variants}
        truth = head.truth(loss)
        peaks, errors = dict[str, float | None](), dict[str, list[float]]()
        for variant, step in steps.items():
            step()
            step()
            grads = head.hidden.grad, head.weight.grad
            errors[variant] = [
                float((g.double() - t).norm() / t.norm()) for g, t in zip(grads, truth, strict=True) if g is not None
            ]
            peaks[variant] = peak_mb(step, [head.hidden, head.weight])
        del truth, grads
        for variant, bounds in in_rounds(steps, device, repeats).items():
            setting = Setting.now(device, tiny)
            rows.append(
                PolicyRow(loss, variant, *bounds, peaks[variant], errors[variant][0], errors[variant][1], setting)
            )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--losses", default="tokens,entropy,sequences", help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default="eager,compile,chunk,chunk 1900MiB,chunk 1400MiB,chunk 900MiB")
    add_shared_options(parser, repeats=9)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    losses, variants = names(options.losses, [*LOSSES], "loss"), options.variants.split(",")
    rows = measure(losses, variants, options.tiny, options.device, options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    save(rows, options.out / "policy.json")
    lines = []
    for row in rows:
        span = f"{figure(row.low_ms)} to {figure(row.high_ms)}"
        cells = figure(row.step_ms), span, figure(row.peak_mb, 6), figure(row.hidden_error), figure(row.weight_error)
        lines.append([row.loss, row.variant, *cells])
    columns = ["loss", "variant", "ms", "middle half", "peak MiB", "error of dX", "of dW"]
    Console().print(folded(describe(rows), columns, lines))
    return 0
