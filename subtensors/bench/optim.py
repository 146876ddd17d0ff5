"""The optimizer benchmark: Adam over several parameter sets, beside torch's own."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from subtensors.bench.plot import plot
from subtensors.bench.processes import MeasurementFailed, run_cold
from subtensors.bench.rows import Row, Setting, from_json, load, save, to_json
from subtensors.bench.sets import FIRST_STEP_SETS, MAIN_SETS, SETS, least_traffic, parameters, specs
from subtensors.bench.table import table
from subtensors.bench.timing import count_kernels, synchronize, time_call
from subtensors.bench.variants import VARIANTS, Step

COPY = "copy"


def _seconds(step: Step, device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def measure_copy(tiny: bool, device: str) -> Row:
    """The copy of 2 GiB from device to device, which reads and writes each byte."""
    size = 1 << (20 if tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()  # zeros would copy faster than data
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    first, second = _seconds(copy, device), _seconds(copy, device)
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


def measure(set_name: str, variant_name: str, tiny: bool, device: str) -> Row:
    """Measure one variant on one set, in this process.

    Args:
        set_name: a key of `SETS`.
        variant_name: a key of `VARIANTS`.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".

    Returns:
        the row, without its share of the copy's bandwidth.

    >>> measure("tiny1000", "fused", tiny=True, device="cpu").numel
    96
    """
    variant = VARIANTS[variant_name]
    tensors = parameters(set_name, tiny, device)
    step = variant.make(tensors)
    first, second = _seconds(step, device), _seconds(step, device)
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
        gbps=least_traffic(set_name, tiny, variant.master_weights) / times.device_ms / 1e6,
        extra_peak_mb=extra_peak_mb,
        kernels_per_step=count_kernels(step) if device == "cuda" else None,
        setting=Setting.now(device, tiny),
    )


def is_measured(set_name: str, variant_name: str, slow: bool, device: str) -> bool:
    """Is this variant measured on this set?

    >>> is_measured("mid1000", "compile", slow=False, device="cuda")
    False
    >>> is_measured("llama1b", "compile", slow=False, device="cuda")
    True
    """
    variant = VARIANTS[variant_name]
    kinds = specs(set_name, tiny=False)
    if set_name in FIRST_STEP_SETS:
        return variant_name == "subtensors"
    if variant.needs_gpu and device == "cpu":
        return False
    if variant.compiles_per_tensor and len(kinds) >= 1000 and not slow:
        return False
    return not variant.master_weights or any(dtype.itemsize < 4 for _, dtype in kinds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--sets", default=",".join(MAIN_SETS + FIRST_STEP_SETS), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    parser.add_argument("--slow", action="store_true", help="also compile over 1000 tensors, minutes each")
    parser.add_argument("--tiny", action="store_true", help="a few small tensors a set: shows that it runs, no more")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep rows already in --out that this run does not measure")
    parser.add_argument("--row", nargs=2, metavar=("SET", "VARIANT"), help="measure one row here and print its JSON")
    parser.set_defaults(run=run)


def _names(given: str, known: dict[str, object], what: str) -> list[str]:
    """The names in a comma-separated list, each of them known."""
    names = given.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return names


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

    pairs = [(COPY, COPY)] + [
        (set_name, variant_name)
        for set_name in _names(options.sets, dict(SETS), "set")
        for variant_name in _names(options.variants, dict(VARIANTS), "variant")
        if is_measured(set_name, variant_name, options.slow, options.device)
    ]
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a log: wide enough for every column
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "optim.json"
    kept = [row for row in load(data) if (row.set, row.variant) not in pairs] if options.keep and data.exists() else []
    rows: list[Row] = []
    failures = 0
    for number, (set_name, variant_name) in enumerate(pairs, 1):
        arguments = ["optim", "--row", set_name, variant_name, "--device", options.device]
        with console.status(f"{number}/{len(pairs)}  {set_name}  {variant_name}"):
            try:
                row = from_json(run_cold("subtensors.bench", arguments + ["--tiny"] * options.tiny))
            except MeasurementFailed as error:
                console.print(f"{set_name} {variant_name}: not measured\n{error}", markup=False)
                failures += 1
                continue
        if rows and rows[0].set == COPY and row.set != COPY:
            row = replace(row, copy_percent=100 * row.gbps / rows[0].gbps)
        rows.append(row)
        save(kept + rows, data)  # after each row: a long run that is cut short still leaves what it measured
        console.print(f"{set_name:10} {variant_name:18} step {row.step_ms:.4g} ms, first step {row.first_s:.3g} s")
    if kept or rows:
        console.print(table(kept + rows))
        plot(kept + rows, options.out / "optim.png")
    return 1 if failures else 0
