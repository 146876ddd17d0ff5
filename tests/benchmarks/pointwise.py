"""The pointwise optimizers, each against the bytes that its own step must move, beside torch's foreach and fused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.optim import measure_copy
from benchmarks.options import add_shared_options
from benchmarks.rows import Row, Setting, save
from benchmarks.sets import SETS, parameters
from benchmarks.table import table
from demo.timing import count_kernels, seconds, time_call
from subtensors import optim

# What each is measured with, beside its defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {},
    "Rprop": {},
    "ASGD": {},
    "Lion": {},
    "SignSGD": {"momentum": 0.9},
    "AdEMAMix": {},
    "AdamWScheduleFree": {},
    "LAMB": {},
}

# Tensors of the parameter's size that a step must read a second time. LAMB's share of the update is its norm's, which
# is known when all of it was computed once: then the parameter and both moments are read again.
SECOND_READS = {"LAMB": 3}

# torch's classes with a fused kernel for CUDA.
FUSED = ("SGD", "Adam", "AdamW")


def least_bytes(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> int:
    """What a step must move: parameters and their state are read and written, gradients are read; see `SECOND_READS`.

    >>> w = torch.zeros(100, requires_grad=True)
    >>> w.grad = torch.zeros(100)
    >>> adam = torch.optim.Adam([w])
    >>> adam.step()
    >>> least_bytes(adam, [w])
    2800
    """
    total = 0
    for p in tensors:
        assert p.grad is not None
        entries = [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape and t.dim()]
        total += 2 * p.nbytes + p.grad.nbytes + 2 * sum(t.nbytes for t in entries)
        total += SECOND_READS.get(type(optimizer).__name__, 0) * p.nbytes
    return total


def measure(set_name: str, name: str, peer: str | None, tiny: bool, device: str) -> Row:
    """Measure one class on one set, in this process, where what another one compiled may serve its first step too.

    Args:
        set_name: a key of `SETS`.
        name: a key of `ARGUMENTS`.
        peer: "foreach" or "fused" for torch's class, None for that of this package.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".

    >>> measure("tiny1000", "Lion", None, tiny=True, device="cpu").variant
    'Lion'
    """
    tensors = parameters(set_name, tiny, device)
    cls = getattr(optim if peer is None else torch.optim, name)
    optimizer = cls(tensors, **ARGUMENTS[name], **({} if peer is None else {peer: True}))
    first, second = seconds(optimizer.step, device), seconds(optimizer.step, device)
    times = time_call(optimizer.step, device, repeats=10, warm_up=3)
    return Row(
        set=set_name,
        variant=name if peer is None else f"torch {name} {peer}",
        tensors=len(tensors),
        numel=sum(tensor.numel() for tensor in tensors),
        first_s=first,
        second_s=second,
        step_ms=times.device_ms,
        wall_ms=times.wall_ms,
        cpu_ms=times.enqueue_ms,
        gbps=least_bytes(optimizer, tensors) / times.device_ms / 1e6,
        extra_peak_mb=None,
        kernels_per_step=count_kernels(optimizer.step) if device == "cuda" else None,
        setting=Setting.now(device, tiny),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument(
        "--set", default="llama1b", choices=list(SETS), metavar="SET", help="of %(choices)s (%(default)s)"
    )
    parser.add_argument("--names", default=",".join(ARGUMENTS), help="comma-separated (%(default)s)")
    parser.add_argument("--peers", action="store_true", help="also torch's foreach, and fused where there is one")
    add_shared_options(parser, "a few small tensors")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    copy = measure_copy(options.tiny, options.device)
    rows = [copy]
    for name in options.names.split(","):
        peers: list[str | None] = [None]
        if options.peers and hasattr(torch.optim, name):
            peers += ["foreach", *(["fused"] if name in FUSED else [])]
        for peer in peers:
            row = measure(options.set, name, peer, options.tiny, options.device)
            rows.append(replace(row, copy_percent=100 * row.gbps / copy.gbps))
            save(rows, options.out / "pointwise.json")
    Console().print(table(rows))
    return 0
