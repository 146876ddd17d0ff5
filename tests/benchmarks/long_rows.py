"""The benchmark of long contexts: a loss over a large head, and a gated MLP, over many tokens on one GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.chunked_variants import PEERS, LossOf
from benchmarks.options import add_shared_options, names
from benchmarks.rounds import Step, in_rounds, peak_mb
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded
from subtensors.chunked.chunked_tensor import ChunkedTensor, chunk

WIDTH, CLASSES, INNER = (4096, 32), (128256, 200), (14336, 96)
"""The sizes of Llama-3-8B: hidden states, the head's classes and the MLP's middle; full, tiny."""

LENGTHS = {"loss": (16384, 32768, 65536, 131072, 262144), "mlp": (65536,)}
"""The tokens that each part is measured at."""

VARIANTS = ("eager", "compile", "checkpoint", "liger", "liger tiled", "subtensors", "subtensors compiled")
"""What is measured unless other names are asked for; not every part has them all."""

TRUE_ROWS = 1024
"""The rows that are computed at once in float64; the error of the first ones' gradients is measured."""

TRUE_CLASSES = 256
"""The first rows of a head's weight, of whose gradients the error is measured."""


@dataclass(frozen=True)
class LongRow:
    """One way to take a loss or an MLP, and its gradients, over some tokens.

    Args:
        part: "loss", "mlp", or the model of a head.
        variant: which way.
        tokens: the number of rows.
        reason: why it was not measured; "" if it was.
        setting: where it was measured.
        step_ms: forward and backward, median.
        low_ms, high_ms: the interval that holds the middle half of the steps.
        peak_mb: memory above the operands, gradients included, MiB; None on a CPU.
        error: of the gradient of the first hidden states against float64, over the norm of the truth.
        weight_error: the same of the last weight's gradient, which is a sum over all tokens; of a head, of its first
            rows.
    """

    part: str
    variant: str
    tokens: int
    reason: str
    setting: Setting = field(repr=False)
    step_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    peak_mb: float | None = None
    error: float | None = None
    weight_error: float | None = None


class Operands:
    """The operands that all ways of one part share.

    Args:
        tokens, width: rows of the hidden states, and their size.
        device: "cpu" or "cuda".
    """

    def __init__(self, tokens: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        self.width = width
        self.hidden = self.made(tokens, self.width, device=device, scale=1.0)
        self.leaves = [self.hidden]

    def made(self, *shape: int, device: str, scale: float) -> nn.Parameter:
        """Return a leaf of normal numbers in bfloat16."""
        return nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(scale))

    def truth(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the first hidden states and of the last weight, or its first rows, in float64."""
        raise NotImplementedError

    def errors(self, truth: tuple[Tensor, Tensor]) -> list[float]:
        """Return the errors of the gradients that a step has left, over the norms of the true ones."""
        found = []
        for leaf, true in zip((self.hidden, self.leaves[-1]), truth, strict=True):
            assert leaf.grad is not None
            found.append(float((leaf.grad[: len(true)] - true).norm() / true.norm()))
        return found

    def ways(self) -> Mapping[str, Callable[[], Step]]:
        """Return what makes each way's step, by name."""
        raise NotImplementedError


class Loss(Operands):
    """The mean cross entropy of a linear head."""

    def __init__(self, tokens: int, width: int, classes: int, device: str) -> None:
        super().__init__(tokens, width, device)
        self.weight = self.made(classes, width, device=device, scale=width**-0.5)
        self.target = torch.randint(classes, (tokens,), device=device)
        self.leaves.append(self.weight)

    def truth(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the first hidden states and classes in float64."""
        weight, of_hidden, of_classes = self.weight.detach().double(), list[Tensor](), torch.zeros(())
        for hidden, target in zip(self.hidden.detach().split(TRUE_ROWS), self.target.split(TRUE_ROWS), strict=True):
            rows = hidden.double()
            of_logits = torch.softmax(rows @ weight.t(), -1)
            of_logits[torch.arange(len(rows)), target] -= 1
            of_classes = of_classes.to(rows) + of_logits[:, :TRUE_CLASSES].t() @ rows / len(self.hidden)
            if not of_hidden:
                of_hidden.append(of_logits @ weight / len(self.hidden))
        return of_hidden[0], of_classes

    def ways(self) -> Mapping[str, Callable[[], Step]]:
        """Return what makes each way's step, by name."""

        def step(of: LossOf) -> Step:
            return lambda: backward(of(self.hidden, self.weight, self.target))

        peers = {name: peer for name, peer in PEERS.items() if peer.is_here}
        made = {name: (lambda peer=peer: step(peer.make())) for name, peer in peers.items()}
        return made | {"subtensors": lambda: step(chunked())}


class Gated(Operands):
    """A SwiGLU MLP, whose result's gradient is given."""

    def __init__(self, tokens: int, width: int, inner: int, device: str) -> None:
        super().__init__(tokens, width, device)
        self.gate, self.up = (self.made(inner, width, device=device, scale=width**-0.5) for _ in range(2))
        self.down = self.made(width, inner, device=device, scale=inner**-0.5)
        self.given = torch.randn_like(self.hidden)
        self.leaves += [self.gate, self.up, self.down]

    def plain(self, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return the MLP of hidden states."""
        return F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    def truth(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the first hidden states and of the last weight in float64."""
        of_hidden, of_down = list[Tensor](), torch.zeros(())
        weights = [w.detach().double() for w in self.leaves[1:]]
        weights[-1].requires_grad_()
        for part, given in zip(self.hidden.detach().split(TRUE_ROWS), self.given.split(TRUE_ROWS), strict=True):
            hidden = part.double().requires_grad_()
            grads = torch.autograd.grad(self.plain(hidden, *weights), [hidden, weights[-1]], given.double())
            of_hidden, of_down = of_hidden or [grads[0]], of_down.to(hidden) + grads[1]
        return of_hidden[0], of_down

    def ways(self) -> Mapping[str, Callable[[], Step]]:
        """Return what makes each way's step, by name."""

        def step(of: Callable[[Tensor], Tensor]) -> Step:
            return lambda: backward(of(self.hidden), self.given)

        weights = self.leaves[1:]
        ways: dict[str, Callable[[], Step]] = {
            "eager": lambda: step(lambda h: self.plain(h, *weights)),
            "compile": lambda: step(torch.compile(lambda h: self.plain(h, *weights))),
            "checkpoint": lambda: step(lambda h: checkpoint(self.plain, h, *weights, use_reentrant=False)),
            "subtensors": lambda: step(lambda h: self.plain(chunk(h), *weights)),
            "subtensors compiled": lambda: step(lambda h: self.plain(chunk(h, compile=True), *weights)),
        }
        if find_spec("liger_kernel") is not None:
            ways["liger tiled"] = lambda: step(self.tiled())
        return ways

    def tiled(self) -> nn.Module:
        """Return Liger's MLP, which goes over the rows in parts, with these weights."""
        from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP  # type: ignore[import-not-found]

        sizes = SimpleNamespace(hidden_size=self.width, intermediate_size=len(self.gate), hidden_act="silu")
        with torch.device("meta"):
            mlp: nn.Module = LigerTiledSwiGLUMLP(sizes)
        for name in ("gate", "up", "down"):
            mlp.get_submodule(f"{name}_proj").weight = getattr(self, name)
        return mlp


PARTS: dict[str, Callable[[int, bool, str], Operands]] = {
    "loss": lambda tokens, tiny, device: Loss(tokens, WIDTH[tiny], CLASSES[tiny], device),
    "mlp": lambda tokens, tiny, device: Gated(tokens, WIDTH[tiny], INNER[tiny], device),
}


def chunked(**options: Any) -> LossOf:
    """Return the loss as a user writes it, over chunks with these options of `chunk`."""
    return lambda hidden, weight, target: F.cross_entropy(F.linear(chunk(hidden, **options), weight).float(), target)


def backward(value: Tensor, given: Tensor | None = None) -> None:
    """Compute gradients."""
    full = value.realize() if isinstance(value, ChunkedTensor) else value
    full.backward(given)  # type: ignore[no-untyped-call]


def measure(
    part: str, operands: Operands, variants: Sequence[str], setting: Setting, device: str, repeats: int
) -> list[LongRow]:
    """Measure the ways of one part, in rounds of random order.

    Args:
        part: for the rows.
        operands: of all ways.
        variants: the ways; those that this part does not have are left out.
        setting: for the rows.
        device: "cpu" or "cuda".
        repeats: rounds.
    """
    truth, steps = operands.truth(), dict[str, Step]()
    peaks, errors, reasons = dict[str, float | None](), dict[str, list[float]](), dict[str, str]()
    ways = {name: way for name, way in operands.ways().items() if name in variants}
    for variant, way in ways.items():
        try:
            step = cleared(way(), operands.leaves)
            step()
            errors[variant] = operands.errors(truth)
            peaks[variant] = peak_mb(step, operands.leaves)
            steps[variant] = step
        except torch.cuda.OutOfMemoryError:
            reasons[variant] = "out of memory"
        except Exception as error:  # a peer that refuses a size
            if variant not in PEERS:
                raise
            reasons[variant] = f"{type(error).__name__}: {error}"[:100]
    times = in_rounds(steps, device, repeats)
    rows = []
    for variant in ways:
        figures = (*times[variant], peaks[variant], *errors[variant]) if variant in steps else ()
        rows.append(LongRow(part, variant, len(operands.hidden), reasons.get(variant, ""), setting, *figures))
    return rows


def cleared(step: Step, leaves: Sequence[Tensor]) -> Step:
    """Return a step that begins without gradients."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        step()

    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tokens", type=int, nargs="+", help="of every part; each part's own by default")
    add_shared_options(parser, repeats=5)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    parts, variants = names(options.parts, [*PARTS], "part"), names(options.variants, VARIANTS, "variant")
    rows = list[LongRow]()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        lengths = options.tokens or ([64, 128] if options.tiny else LENGTHS[part])
        for tokens in lengths:
            operands = PARTS[part](tokens, options.tiny, options.device)
            setting = Setting.now(options.device, options.tiny)
            rows += measure(part, operands, variants, setting, options.device, options.repeats)
            save(rows, options.out / "long_rows.json")  # a run that is cut short leaves what it measured
    show(rows)
    return 0


def show(rows: Sequence[LongRow]) -> None:
    """Print rows as a table."""
    columns = ["part", "tokens", "variant", "ms", "us a token", "peak MiB", "error of dX", "of dW"]
    Console().print(folded(describe(rows), columns, [cells(row) for row in rows]))


def cells(row: LongRow) -> list[str]:
    """Return a row as cells of a table."""
    named = [row.part, str(row.tokens), row.variant]
    if row.step_ms is None:
        return [*named, row.reason, "", "", "", ""]
    times = figure(row.step_ms), figure(row.step_ms / row.tokens * 1e3)
    return [*named, *times, figure(row.peak_mb, 6), figure(row.error), figure(row.weight_error)]
