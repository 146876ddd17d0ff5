"""The benchmark of what an eager call on a PaddedTensor takes the host, beside a plain tensor and torch's nested one.

Tensors are small, so that what is timed is the call: a bucket of (4, 32, 64) float32, 29 of 32 positions valid; the
nested tensor is jagged, of four rows of 29. Calls are timed in turn, and the least time of each counts, as nothing
makes the host faster than it is. A transformer block is what calls of all kinds come to.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import subtensors as st
from benchmarks.options import add_shared_options, names
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded

ROWS, SEQ, VALID, WIDTH = 4, 32, 29, 64

WINDOW = 4e-4
"""Seconds that calls are timed together."""

Call = Callable[..., Any]


@cache
def weights(tracked: bool) -> list[Tensor]:
    """Return the weights of the block's six linear layers."""
    shapes = *[(WIDTH, WIDTH)] * 4, (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    return [torch.randn(*shape).mul_(0.1).requires_grad_(tracked) for shape in shapes]


def block(x: Tensor) -> Tensor:
    """Return what a transformer block with norms first makes of activations."""
    *qkv, out, up, down = [w.to(x.device) for w in weights(x.requires_grad)]
    h = F.layer_norm(x, (WIDTH,))
    q, k, v = [F.linear(h, w).view(ROWS, -1, 4, WIDTH // 4).transpose(1, 2) for w in qkv]
    x = x + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), out)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), up)), down)


def train_block(x: Tensor) -> Tensor:
    """Return the block's sum, once its gradients are computed if it has any."""
    total = block(x).sum()
    if total.requires_grad:
        torch.autograd.grad(total, [x, *weights(True)])
    return total


CALLS: dict[str, Call] = {
    "relu": lambda x, y: F.relu(x),
    "gelu": lambda x, y: F.gelu(x),
    "x + y": lambda x, y: x + y,
    "x * 2.0": lambda x, y: x * 2.0,
    "x > 0": lambda x, y: x > 0,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clone": lambda x, y: x.clone(),
    "half": lambda x, y: x.half(),
    "sum(-1)": lambda x, y: x.sum(-1),
    "sum(1), over padding": lambda x, y: x.sum(1),
    "mean(1), over padding": lambda x, y: x.mean(1),
    "amax(1), over padding": lambda x, y: x.amax(1),
    "argmax(1), over padding": lambda x, y: x.argmax(1),
    "cumsum(1), over padding": lambda x, y: x.cumsum(1),
    "softmax(-1)": lambda x, y: x.softmax(-1),
    "softmax(1), over padding": lambda x, y: x.softmax(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x, y: F.rms_norm(x, (WIDTH,)),
    "x.mT @ y, over padding": lambda x, y: x.mT @ y,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "chunk": lambda x, y: x.chunk(2, -1),
    "transpose": lambda x, y: x.transpose(1, 2),
    "unsqueeze": lambda x, y: x.unsqueeze(1),
    "view": lambda x, y: x.view(ROWS, -1, 8, WIDTH // 8),
    "x[:, 1:]": lambda x, y: x[:, 1:],
    "x[..., 0]": lambda x, y: x[..., 0],
    "a transformer block": lambda x, y: block(x),
    "its sum and gradients": lambda x, y: train_block(x),
}


@dataclass(frozen=True)
class CallRow:
    """The time that a call takes the host.

    Args:
        call: its name.
        tracked: whether autograd tracks it.
        plain_us, padded_us: microseconds.
        nested_us: those of a nested tensor; None where torch refuses the call.
        setting: where it was measured.
    """

    call: str
    tracked: bool
    plain_us: float
    padded_us: float
    nested_us: float | None
    setting: Setting = field(repr=False)

    @property
    def times(self) -> float:
        """The padded call's time over the plain one's."""
        return self.padded_us / self.plain_us


def least(call: Call, operands: Sequence[Tensor], repeats: int) -> float:
    """Return the least time of a call, in microseconds, over windows of some calls each."""
    best = math.inf
    count = 2
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(count):
            call(*operands)
        took = time.perf_counter() - began
        best = min(best, took / count)
        count = max(2, round(WINDOW / best))
    return best * 1e6


def measure(name: str, tracked: bool, device: str, tiny: bool, repeats: int) -> CallRow:
    """Measure a call of plain, padded and nested tensors in turn; all are made before they are timed."""
    torch.manual_seed(0)
    seq = st.Dim("seq", max=SEQ, buckets=[SEQ])
    rows = [torch.randn(ROWS, VALID, WIDTH, device=device) for _ in range(2)]
    padded = [st.pad(x, {1: seq}) for x in rows]
    plain = [x.dense.clone() for x in padded]
    offsets = VALID * torch.arange(ROWS + 1, device=device)  # shared, by which torch takes sizes to be the same
    nested = [torch.nested.nested_tensor_from_jagged(x.flatten(0, 1).clone(), offsets) for x in rows]
    for x in (*padded, *plain, *nested):
        x.requires_grad_(tracked)
    call = CALLS[name]
    for _ in range(4):  # taken apart, recorded, repeated
        call(*padded)
    variants: list[Sequence[Tensor]] = [plain, padded, nested] if _runs(call, nested) else [plain, padded]
    taken = [[least(call, operands, 5) for operands in variants] for _ in range(repeats)]
    best = [min(times) for times in zip(*taken, strict=True)]
    return CallRow(name, tracked, best[0], best[1], best[2] if len(best) > 2 else None, Setting.now(device, tiny))


def _runs(call: Call, operands: Sequence[Tensor]) -> bool:
    logging.disable(logging.WARNING)  # torch's, of each reason why attention refuses
    try:
        call(*operands)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    finally:
        logging.disable(logging.NOTSET)
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--calls", help="separated by semicolons; all by default")
    add_shared_options(parser, "few windows", repeats=40)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    calls = [*CALLS] if options.calls is None else names(options.calls, [*CALLS], "call", ";")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            measure(name, tracked, options.device, options.tiny, 1 if options.tiny else options.repeats)
            for tracked in (False, True)
            for name in calls
        ]
    finally:
        torch.set_num_threads(threads)
    options.out.mkdir(parents=True, exist_ok=True)
    save(rows, options.out / "padded_calls.json")
    console = Console()
    for tracked in (False, True):
        own = [row for row in rows if row.tracked is tracked]
        cells = [
            [row.call, *(figure(x, 3) if x else "-" for x in (row.plain_us, row.padded_us, row.nested_us, row.times))]
            for row in own
        ]
        title = f"{describe(own)}\n{'with gradients' if tracked else 'without gradients'}"
        console.print(folded(title, ["call", "plain us", "padded us", "nested us", "times"], cells, names=1))
        mean = math.exp(sum(math.log(row.times) for row in own) / len(own))
        within = sum(row.times <= 5 for row in own)
        console.print(f"geometric mean {figure(mean, 3)} times; at most 5 times: {within} of {len(own)} calls")
    return 0
