"""The benchmark of a head that is sharded over the vocabulary: a loss and its gradients, a process a GPU.

Hidden states are the same in each process, each of which has its own classes of the head, as after a column-wise
`parallelize_module`. Ways are measured in rounds of random order, which is the same in all processes, and each time is
the slowest process's. The gathered ways send the whole head; the others, numbers a row and the gradient of the hidden
states.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import subtensors as st
from benchmarks.options import add_shared_options, names
from benchmarks.ranks import on_ranks
from benchmarks.rounds import peak_mb
from benchmarks.rows import Setting, save
from benchmarks.table import describe, figure, folded
from demo.timing import Span, synchronize

TOKENS, WIDTH, CLASSES = 8192, 4096, 128256
"""The sizes of a loss over Llama-3-8B's head."""

TINY = (24, 16, 60)

Way = Callable[[Tensor, Tensor, Tensor, DeviceMesh], Tensor]
"""The loss of hidden states, this process's classes of the head, and targets."""


def _sharded(weight: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)


def gathered(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole head gathered, and all logits."""
    return F.cross_entropy(F.linear(hidden, _sharded(weight, mesh).full_tensor()).float(), target)


def _plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def gathered_compiled(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same, with the loss compiled."""
    loss: Tensor = torch.compile(_plain_loss)(hidden, _sharded(weight, mesh).full_tensor(), target)
    return loss


def gathered_chunked(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole head gathered, logits by chunks."""
    return F.cross_entropy(F.linear(st.chunk(hidden), _sharded(weight, mesh).full_tensor()), target)


def parallel(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """Torch's loss-parallel: logits of this process's classes, in full."""
    rows = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    logits = F.linear(rows, _sharded(weight, mesh)).float()
    loss: Any = F.cross_entropy(logits, DTensor.from_local(target, mesh, [Replicate()], run_check=False))
    return loss  # type: ignore[no-any-return]  # a DTensor; its backward needs loss_parallel, too


def chunked(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """Logits of this process's classes, by blocks of columns."""
    return F.cross_entropy(F.linear(st.chunk(hidden), _sharded(weight, mesh)), target)


def liger(hidden: Tensor, weight: Tensor, target: Tensor, mesh: DeviceMesh) -> Tensor:
    """Liger's tensor-parallel fused head, whose numbers are a token's."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearScaledCrossEntropyTPFunction as Function,
    )

    loss: Tensor = Function.apply(hidden, weight, target, mesh.get_group()).mean()
    return loss


WAYS: dict[str, Way] = {
    "gathered": gathered,
    "gathered, compiled": gathered_compiled,
    "gathered, st.chunk": gathered_chunked,
    "loss-parallel": parallel,
    "st.chunk": chunked,
    "Liger, tensor-parallel": liger,
}


@dataclass(frozen=True)
class ShardedRow:
    """One way to compute the loss of a sharded head.

    Args:
        variant: which way.
        processes: how many, a GPU each.
        tokens, width, classes: of the loss; the classes of all processes.
        step_ms: loss and gradients, of the slowest process; median.
        peak_mb: above the operands, MiB, gradients included, of the process that takes the most; None on a CPU.
        weight_error: of the weight's gradient of the first process, relative, against float64.
        setting: where it was measured.
    """

    variant: str
    processes: int
    tokens: int
    width: int
    classes: int
    step_ms: float
    peak_mb: float | None
    weight_error: float
    setting: Setting = field(repr=False)


def true_gradient(hidden: Tensor, weights: list[Tensor], target: Tensor) -> Tensor:
    """Return the gradient of the first process's classes in float64, a part of the rows at a time."""
    found = torch.zeros_like(weights[0], dtype=torch.float64)
    whole = torch.cat(weights).double()
    for rows, classes in zip(hidden.split(1024), target.split(1024), strict=True):
        of_logits = torch.softmax(rows.double() @ whole.t(), -1)
        of_logits[torch.arange(len(rows), device=rows.device), classes] -= 1
        found += of_logits[:, : len(found)].t() @ rows.double() / len(hidden)
    return found


def rows_of_process(names: Sequence[str], tiny: bool, device: str, repeats: int) -> list[ShardedRow]:
    """Measure ways in this process, as all others do; returns rows of all processes."""
    ways = {name: WAYS[name] for name in names}
    processes, rank = dist.get_world_size(), dist.get_rank()
    tokens, width, classes = TINY if tiny else (TOKENS, WIDTH, CLASSES)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    whole = torch.randn(classes, width, device=device, dtype=dtype).mul_(width**-0.5)
    target = torch.randint(classes, (tokens,), device=device)
    weights = [part.clone() for part in whole.chunk(processes)]
    truth = true_gradient(hidden.detach(), weights, target) if rank == 0 else None
    weight = weights[rank].requires_grad_()
    del whole, weights
    mesh = init_device_mesh(device, (processes,))

    def step(way: Way) -> None:
        hidden.grad = weight.grad = None
        with loss_parallel():
            way(hidden, weight, target, mesh).backward()  # type: ignore[no-untyped-call]

    peaks, errors = dict[str, float | None](), dict[str, float]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        step(way)
        peaks[name] = peak_mb(lambda way=way: step(way), [hidden, weight])  # type: ignore[misc]
        assert weight.grad is not None
        if truth is not None:
            errors[name] = float((weight.grad.double() - truth).norm() / truth.norm())
    order = random.Random(0)  # the same in each process
    for _ in range(repeats):
        for name in order.sample([*ways], len(ways)):
            dist.barrier()
            with Span(device) as span:
                step(ways[name])
            synchronize(device)
            times[name].append(span.ms())
    rows = []
    for name in ways:
        of_all: list[Any] = [None] * processes
        dist.all_gather_object(of_all, (times[name], peaks[name], errors.get(name)))
        slowest = [max(each) for each in zip(*(taken for taken, _, _ in of_all), strict=True)]
        taken_mb = [peak for _, peak, _ in of_all if peak is not None]
        sizes = processes, tokens, width, classes
        most = max(taken_mb, default=None)
        rows.append(ShardedRow(name, *sizes, median(slowest), most, of_all[0][2], Setting.now(device, tiny)))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--variants", default=";".join(WAYS), help="separated by semicolons (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="how many, a GPU each (%(default)s)")
    add_shared_options(parser, repeats=9)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    wanted = names(options.variants, [*WAYS], "variant", ";")
    if options.device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        wanted = [name for name in wanted if "Liger" not in name]  # its kernels run on a GPU
    given = wanted, options.tiny, options.device, options.repeats
    rows = on_ranks(rows_of_process, options.processes, options.device, *given)
    options.out.mkdir(parents=True, exist_ok=True)
    save(rows, options.out / "sharded_head.json")
    lines = [[row.variant, figure(row.step_ms), figure(row.peak_mb), figure(row.weight_error, 2)] for row in rows]
    columns = ["variant", "ms", "peak MiB", "error of dW"]
    Console().print(folded(describe(rows), columns, lines, names=1))
    return 0
