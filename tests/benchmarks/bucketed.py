"""The benchmark of `st.bucketed`: a service whose requests have varying lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.bucketed_cases import CASES, Case
from benchmarks.bucketed_rows import VaryingRow, table
from benchmarks.bucketed_variants import VARIANTS, Answer, Way
from benchmarks.options import add_shared_options, names
from benchmarks.processes import MeasurementFailed, run_cold
from benchmarks.rows import Setting, from_json, load, save, to_json
from benchmarks.table import describe
from demo.timing import synchronize

OF_A_RUNNER = ("graphs", "recompiles", "capture_ms", "runner_ms", "results_ms", "pool_mb", "largest_mb")


@torch.no_grad()
def measure(case: str, variant: str, tiny: bool, device: str) -> VaryingRow:
    """Answer the requests three times.

    Args:
        case: a key of `CASES`.
        variant: a key of `VARIANTS`.
        tiny: a small model and few requests.
        device: "cpu" or "cuda".

    Returns:
        what was measured.
    """
    asked = CASES[case]
    model = asked.prepared(tiny, device)
    requests = asked.requested(tiny, device)
    started = time.perf_counter()
    way = VARIANTS[variant].make(model, asked)
    _pass(way.answer, requests, device)
    first_pass_s = time.perf_counter() - started
    _pass(way.answer, requests, device)
    walls, hosts = _pass(way.answer, requests, device)
    reserved = torch.cuda.memory_reserved() / 2**20 if device == "cuda" else None
    ours = _of_runner(way, asked, requests, device) if way.runner is not None else {}
    return VaryingRow(
        case, variant, len(requests), len({r.shape[asked.dim] for r in requests}), first_pass_s,
        p50_ms=median(walls),
        p99_ms=sorted(walls)[int(len(walls) * 0.99)],
        host_ms=median(hosts),
        **{name: ours.get(name) for name in OF_A_RUNNER},
        reserved_mb=reserved,
        error=error_over_plain(way.first or way.answer, VARIANTS["eager"].make, model, asked, requests[:3]),
        setting=Setting.now(device, tiny),
    )  # fmt: skip


def _pass(answer: Callable[[Tensor], Any], requests: list[Tensor], device: str) -> tuple[list[float], list[float]]:
    """Milliseconds of each request up to a synchronized device, and until the call returned."""
    walls, hosts = [], []
    synchronize(device)
    for request in requests:
        started = time.perf_counter()
        answer(request)
        hosts.append((time.perf_counter() - started) * 1e3)
        synchronize(device)
        walls.append((time.perf_counter() - started) * 1e3)
    return walls, hosts


def _of_runner(way: Way, case: Case, requests: list[Tensor], device: str) -> dict[str, Any]:
    """What a runner knows of itself, and what a call costs above its graph's replay."""
    stats = [part.stats() for part in (list(way.runner.programs.values()) or [way.runner])]
    found: dict[str, Any] = {
        "graphs": sum(s.captures for s in stats),
        "recompiles": sum(s.recompiles for s in stats),
        "capture_ms": median(b.capture_ms for s in stats for b in s.buckets),
        "pool_mb": sum(s.pool_bytes for s in stats) / 2**20,
    }
    if device == "cpu" or case.new_tokens:
        return found
    request = requests[0]
    size = -(-request.shape[case.dim] // case.step) * case.step
    bucket = next(b for b in way.runner.captured_buckets() if size in b.statistics.sizes.values())
    copies = bucket.outputs.cuts(bucket.spec.host)
    calls, replays, copied = [], [], []
    for _ in range(100):
        calls += _pass(way.answer, [request], device)[0]
        replays += _pass(lambda _: bucket.graph.replay(), [request], device)[0]
        copied += _pass(lambda _: (bucket.graph.replay(), [copy() for copy in copies]), [request], device)[0]
    found["runner_ms"] = median(calls) - median(replays)
    found["results_ms"] = median(copied) - median(replays)
    way.runner.release()
    way.answer(max(requests, key=Tensor.numel))
    found["largest_mb"] = way.runner.stats().pool_bytes / 2**20
    return found


def error_over_plain(
    answer: Answer, plainly: Callable[[nn.Module, Case], Way], model: nn.Module, case: Case, requests: list[Tensor]
) -> float:
    """Return the largest error against float64 divided by the plain model's; of tokens, that of the first one's scores.

    Args:
        answer: what is judged; it calls `model`.
        plainly: makes the plain program of a model.
        model: is in float64 afterwards.
        case: what is asked of the model.
        requests: the inputs.
    """
    eager = plainly(model, case)
    plain = eager.first or eager.answer
    answers, own = ([way(request).double() for request in requests] for way in (answer, plain))
    exact = plainly(model.double(), case)
    wide = [request.double() if request.is_floating_point() else request for request in requests]
    truth = [(exact.first or exact.answer)(request).double() for request in wide]
    errors = (max(float((a - t).abs().max()) for a, t in zip(found, truth, strict=True)) for found in (answers, own))
    ours, plains = errors
    return ours / plains if plains else float(ours > 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    add_shared_options(parser, "a small model")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a row may take (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep rows already in --out that this run does not measure")
    parser.add_argument("--row", nargs=2, metavar=("CASE", "VARIANT"), help="measure one row here and print its JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status, 1 where a row could not be measured."""
    if options.row:
        case, variant = options.row
        print(to_json(measure(case, variant, options.tiny, options.device)))
        return 0
    pairs = [
        (case, variant)
        for case in names(options.cases, list(CASES), "case")
        for variant in names(options.variants, list(VARIANTS), "variant")
        if (options.device == "cuda" or not VARIANTS[variant].needs_gpu) and VARIANTS[variant].answers(CASES[case])
    ]
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "bucketed.json"
    earlier = load(VaryingRow, data) if options.keep and data.exists() else []
    rows = [row for row in earlier if (row.case, row.variant) not in pairs]
    failures = 0
    for case, variant in pairs:
        arguments = ["bucketed", "--row", case, variant, "--device", options.device]
        with console.status(f"{case}  {variant}"):
            try:
                line = run_cold("benchmarks", arguments + ["--tiny"] * options.tiny, options.limit)
            except MeasurementFailed as error:
                console.print(f"{case} {variant}: not measured\n{error}", markup=False)
                failures += 1
                continue
        row = from_json(VaryingRow, line)
        rows.append(row)
        save(rows, data)  # after each row: a long run that is cut short still leaves what it measured
        console.print(f"{case:14} {variant:18} p50 {row.p50_ms:.4g} ms, first pass {row.first_pass_s:.3g} s")
    if rows:
        rows.sort(key=lambda row: (list(CASES).index(row.case), list(VARIANTS).index(row.variant)))
        save(rows, data)
        console.print(table(rows, describe(rows)))
    return 1 if failures else 0
