"""The optimizer benchmark: Adam over several parameter sets, and others on the set that suits them, beside torch's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from rich.console import Console

from benchmarks.options import names
from benchmarks.other_optimizers import OTHERS
from benchmarks.plot import plot
from benchmarks.rows import Row, Setting, installed, to_json
from benchmarks.sets import FIRST_STEP_SETS, MATRIX_SETS, SETS, least_traffic, parameters, specs
from benchmarks.sweep import COPY, add_sweep_arguments, sweep
from benchmarks.table import table
from benchmarks.variants import VARIANTS, Variant
from demo.timing import count_copied_bytes, count_kernels, seconds, time_call

EVERY = {**VARIANTS, **OTHERS}


def measure_copy(tiny: bool, device: str) -> Row:
    """The copy of 2 GiB from device to device, which reads and writes each byte."""
    size = 1 << (20 if tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()  # zeros would copy faster than data
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    first, second = seconds(copy, device), seconds(copy, device)
    times = time_call(copy, device)
    return Row(
        set=COPY,
        variant=COPY,
        tensors=1,
        numel=size,
        first_s=first,
        second_s=second,
        step_ms=times.device_ms,
        wall_ms=times.wall_ms,
        cpu_ms=times.enqueue_ms,
        gbps=2 * size / times.device_ms / 1e6,
        extra_peak_mb=None,
        kernels_per_step=None,
        setting=Setting.now(device, tiny),
    )


def measure(set_name: str, variant_name: str, tiny: bool, device: str, variants: Mapping[str, Variant] = EVERY) -> Row:
    """Measure one variant on one set, in this process.

    Args:
        set_name: a key of `SETS`.
        variant_name: a key of `variants`.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
        variants: by name.

    Returns:
        the row, without its share of the copy's bandwidth.

    >>> measure("tiny1000", "fused", tiny=True, device="cpu").numel
    96
    """
    variant = variants[variant_name]
    tensors = parameters(set_name, tiny, device)
    step = variant.make(tensors)
    first, second = seconds(step, device), seconds(step, device)
    step = variant.settle(step)
    step()
    extra_peak_mb = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        between_steps = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        extra_peak_mb = (torch.cuda.max_memory_allocated() - between_steps) / 2**20
    times = time_call(step, device)
    return Row(
        set=set_name,
        variant=variant_name,
        tensors=len(tensors),
        numel=sum(tensor.numel() for tensor in tensors),
        first_s=first,
        second_s=second,
        step_ms=times.device_ms,
        wall_ms=times.wall_ms,
        cpu_ms=times.enqueue_ms,
        gbps=_least_bytes(variant, set_name, tiny) / times.device_ms / 1e6,
        extra_peak_mb=extra_peak_mb,
        kernels_per_step=count_kernels(step) if device == "cuda" else None,
        copied_bytes=count_copied_bytes(step) if device == "cuda" else None,
        setting=Setting.now(device, tiny),
    )


def _least_bytes(variant: Variant, set_name: str, tiny: bool) -> float:
    if variant.element_bytes is None:
        return least_traffic(set_name, tiny, variant.master_weights)
    return variant.element_bytes * sum(torch.Size(shape).numel() for shape, _ in specs(set_name, tiny))


def is_measured(set_name: str, variant_name: str, slow: bool, device: str) -> bool:
    """Is this variant measured on this set?

    >>> is_measured("mid1000", "compile", slow=False, device="cuda")
    False
    >>> is_measured("llama1b", "compile", slow=False, device="cuda")
    True
    """
    variant = EVERY[variant_name]
    kinds = specs(set_name, tiny=False)
    if variant.package is not None and installed(variant.package) is None:
        return False
    if variant.sets is not None or set_name in MATRIX_SETS:
        return set_name in (variant.sets or ()) and not (variant.needs_gpu and device == "cpu")
    if set_name in FIRST_STEP_SETS:
        return variant_name == "subtensors"
    if variant.needs_gpu and device == "cpu":
        return False
    if variant.compiles_per_tensor and len(kinds) >= 1000 and not slow:
        return False
    return not variant.master_weights or any(dtype.itemsize < 4 for _, dtype in kinds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(EVERY), help="comma-separated (%(default)s)")
    add_sweep_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status, 1 where a row could not be measured."""
    if options.row:
        set_name, variant_name = options.row
        measured = (
            measure_copy(options.tiny, options.device)
            if set_name == COPY
            else measure(set_name, variant_name, options.tiny, options.device)
        )
        print(to_json(measured))
        return 0

    pairs = [
        (set_name, variant_name)
        for set_name in names(options.sets, list(SETS), "set")
        for variant_name in names(options.variants, list(EVERY), "variant")
        if is_measured(set_name, variant_name, options.slow, options.device)
    ]
    console = Console()
    rows, failures = sweep("optim", pairs, options, console)
    if rows:
        console.print(table(rows))
        plot(rows, options.out / "optim.png")
    return 1 if failures else 0
