"""The benchmark of linear + cross entropy: time, memory and error of every way to take it."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
import torch._dynamo
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.chunked_rows import LossRow, plot, table, unmatched
from benchmarks.chunked_variants import PEERS, SHAPES, TINY, LossOf, Shape
from benchmarks.options import add_shared_options, names
from benchmarks.rounds import peak_mb
from benchmarks.rows import Setting, load, save
from benchmarks.table import describe, figure
from demo.timing import Span, synchronize
from subtensors.chunked.chunked_tensor import chunk
from subtensors.kernels.cross_entropy.linear_cross_entropy import Accumulate

REST_S = 1.0
"""Seconds without work before a way is timed: a GPU that the ones before have heated would be up to 4% slower."""

OURS = "subtensors"
"""All of our settings."""


def inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a weight in bfloat16, both of which want gradients, and targets.

    >>> [t.shape for t in inputs(TINY, "cpu")]
    [torch.Size([32, 8]), torch.Size([96, 8]), torch.Size([32])]
    """
    torch.manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=torch.bfloat16) * shape.hidden**-0.5
    target = torch.randint(shape.vocabulary, (shape.tokens,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), target


@torch.no_grad()
def truth(hidden: Tensor, weight: Tensor, target: Tensor, rows: int = 256) -> tuple[float, Tensor, Tensor]:
    """The loss and its gradients in float64, a few rows at a time.

    >>> hidden, weight, target = inputs(TINY, "cpu")
    >>> loss = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target)
    >>> abs(truth(hidden, weight, target, rows=5)[0] - loss.item()) < 1e-12
    True
    """
    count, wide = target.shape[0], weight.double()
    loss, hidden_grad, weight_grad = 0.0, torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(wide)
    for begin in range(0, count, rows):
        x, t = hidden[begin : begin + rows].double(), target[begin : begin + rows, None]
        scores = (x @ wide.T).log_softmax(1)
        loss -= scores.gather(1, t).sum().item() / count
        gradient = scores.exp_().scatter_add_(1, t, torch.full_like(t, -1, dtype=torch.float64)).div_(count)
        hidden_grad[begin : begin + rows] = gradient @ wide
        weight_grad.addmm_(gradient.T, x)
    return loss, hidden_grad, weight_grad


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the error over the norm of what is expected, a few rows at a time.

    >>> round(relative_error(torch.tensor([[3.0], [4.0]]), torch.tensor([[3.0], [5.0]]).double()), 6)  # 1 / 34**0.5
    0.171499
    """
    parts = zip(actual.detach().split(4096), expected.split(4096), strict=True)
    error = sum(float((a.double() - e).square().sum()) for a, e in parts)
    return float((error / expected.square().sum()) ** 0.5)


def _through_chunk(hidden: Tensor, weight: Tensor, target: Tensor, rows: int, accumulate: Accumulate) -> Tensor:
    """The plain program, its hidden states chunked."""
    return F.cross_entropy(F.linear(chunk(hidden, rows=rows, accumulate=accumulate), weight).float(), target)


def _settings(shape: Shape) -> Iterator[tuple[str, LossOf]]:
    """Our settings of a shape: their names and their loss functions."""
    from subtensors.kernels.cross_entropy.cross_entropy_autograd import Schedule, differentiable_cross_entropy

    for rows in shape.rows:
        for accumulate in ("exact", "fast"):
            if accumulate == "exact" or rows < shape.tokens:
                schedule = Schedule(rows=rows, accumulate=accumulate)  # type: ignore[arg-type]
                yield f"{accumulate}/{rows}", functools.partial(differentiable_cross_entropy, schedule=schedule)
    for columns, kept in shape.columns:
        schedule = Schedule(columns=columns, kept=kept * columns)
        name = f"columns/{columns}" + (f"+{kept * columns}" if kept else "")
        yield name, functools.partial(differentiable_cross_entropy, schedule=schedule)
    for accumulate, rows in shape.through:
        yield f"st.chunk {accumulate}/{rows}", functools.partial(_through_chunk, rows=rows, accumulate=accumulate)


def measure(
    shape_name: str, variants: Sequence[str], tiny: bool, device: str, settings: Sequence[str] | None = None
) -> Iterator[LossRow]:
    """Measure ways to take a loss, one after another in this process.

    Args:
        shape_name: a key of `SHAPES`.
        variants: keys of `PEERS`, or "subtensors" for all of our settings.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
        settings: names of those of ours to measure; None for all.

    Yields:
        a row for each.

    >>> [row.variant for row in measure("gpt2", ["eager"], tiny=True, device="cpu")]
    ['eager']
    """
    shape = TINY if tiny else SHAPES[shape_name]
    values = inputs(shape, device)
    exact_loss, exact_hidden, exact_weight = truth(*values)
    for variant in variants:
        torch._dynamo.reset()  # the compiler's own ways differ by its settings alone, which it would not see
        ours = variant not in PEERS
        ways = _settings(shape) if ours else [(variant, None)]
        for name, chosen in ways:
            if ours and settings is not None and name not in settings:
                continue
            started = time.perf_counter()
            step = functools.partial(_step, chosen or PEERS[variant].make(), *values)
            loss = step()
            synchronize(device)
            first_s = time.perf_counter() - started
            peak, step_ms = peak_mb(step, step.args[1:3]), _milliseconds(step, device)
            hidden_grad, weight_grad = values[0].grad, values[1].grad
            assert hidden_grad is not None
            assert weight_grad is not None
            yield LossRow(
                shape_name,
                name,
                *(shape.tokens, shape.hidden, shape.vocabulary),
                first_s=first_s,
                step_ms=step_ms,
                peak_mb=peak,
                gradients_mb=sum(leaf.nbytes for leaf in values[:2]) / 2**20,
                loss_error=abs(float(loss.detach()) - exact_loss),
                hidden_error=relative_error(hidden_grad, exact_hidden),
                weight_error=relative_error(weight_grad, exact_weight),
                setting=Setting.now(device, tiny),
            )
            del step, loss, hidden_grad, weight_grad


def _step(loss_of: LossOf, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Forward and backward, from no gradients to both."""
    hidden.grad = weight.grad = None
    loss = loss_of(hidden, weight, target)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _milliseconds(step: functools.partial[Tensor], device: str, repeats: int = 12, warm_up: int = 12) -> float:
    """The device time of a step, of steps that wait for each other; median.

    The first dozen steps are not counted: an interpreter that has yet to learn its code keeps the device waiting.
    """
    if device == "cuda":
        time.sleep(REST_S)
    times = []
    for _ in range(warm_up + repeats):
        with Span(device) as span:
            step()
        synchronize(device)
        times.append(span.ms())
    return median(times[warm_up:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join([*PEERS, OURS]), help="comma-separated (%(default)s)")
    parser.add_argument("--settings", help="comma-separated: of ours, measure these alone")
    add_shared_options(parser, "a small shape")
    parser.add_argument("--keep", action="store_true", help="keep rows already in --out that this run does not measure")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    shapes = names(options.shapes, list(SHAPES), "shape")
    variants = names(options.variants, [*PEERS, OURS], "variant")
    settings = None if options.settings is None else options.settings.split(",")
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "chunked.json"
    rows = load(LossRow, data) if options.keep and data.exists() else []
    for name in [name for name in variants if name in PEERS and not PEERS[name].is_here]:
        console.print(
            f'{name}: not installed here; in the clone, pip install ".[bench]" brings the peers', markup=False
        )
        variants.remove(name)
    for shape in shapes if variants else []:
        for row in measure(shape, variants, options.tiny, options.device, settings):
            rows = [other for other in rows if (other.shape, other.variant) != (row.shape, row.variant)] + [row]
            save(rows, data)  # after each: a long run that is cut short still leaves what it measured
            console.print(f"{row.shape:10} {row.variant:22} {row.step_ms:.4g} ms, {figure(row.peak_mb)} MiB")
    if rows:
        rows.sort(key=lambda row: list(SHAPES).index(row.shape))
        save(rows, data)
        console.print(table(rows, describe(rows)))
        for row in unmatched(rows):
            console.print(f"{row.shape} {row.variant}: no setting of ours is as fast in as little memory")
        plot(rows, describe(rows), options.out / "chunked.png")
    return 0
