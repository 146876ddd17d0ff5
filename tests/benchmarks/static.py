"""The benchmark of static state: one Adam step as a graph, in the ways there are to make one."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.lend import LentRow, lent_table
from benchmarks.optim import measure, measure_copy
from benchmarks.options import names
from benchmarks.processes import MeasurementFailed, run_cold
from benchmarks.rows import load, to_json
from benchmarks.sets import specs
from benchmarks.sweep import COPY, add_sweep_arguments, sweep
from benchmarks.table import table
from benchmarks.variants import Step, Variant, as_graph, as_it_is, compiled_adam

SETS = ["tiny1000", "mid1000", "llama1b"]


def _eager(parameters: list[Tensor]) -> Step:
    from subtensors.optim import Adam  # here, so that a peer's process does not hold it

    return Adam(parameters, lr=1e-3).step


def _captured(parameters: list[Tensor]) -> Step:
    from subtensors.optim import Adam

    return Adam(parameters, lr=1e-3, graph=True).step


def _packed(parameters: list[Tensor]) -> Step:
    from subtensors.optim import Adam

    leaves = [torch.nn.Parameter(parameter.detach()) for parameter in parameters]
    for leaf, parameter in zip(leaves, parameters, strict=True):
        leaf.grad = parameter.grad
    optimizer = Adam(leaves, lr=1e-3)
    optimizer.capture(packed=True)
    return optimizer.step


def _reduce_overhead(parameters: list[Tensor]) -> Step:
    return compiled_adam(parameters, "reduce-overhead")


def _reduce_overhead_packed(parameters: list[Tensor]) -> Step:
    """Adam's math over packed lists: the compiler is shown one tensor of each, and told that it stays."""
    from subtensors.lists.tensor_list import TensorList

    p, g = TensorList(parameters).pack(), TensorList([p.grad for p in parameters]).pack()
    m, v = (TensorList([torch.zeros_like(p) for p in parameters]).pack() for _ in range(2))
    count = torch.zeros((), device=parameters[0].device)
    for t in (p, g, m, v, count):
        torch._dynamo.mark_static_address(t)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, count: Tensor) -> None:
        count.add_(1)
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        scale = (1 - 0.999**count).sqrt()
        p.sub_(1e-3 / (1 - 0.9**count) * (m / (v.sqrt() / scale + 1e-8)))

    return torch.no_grad()(lambda: update(p, g, m, v, count))


def _fused(parameters: list[Tensor]) -> Step:
    on_gpu = parameters[0].device.type == "cuda"
    return torch.optim.Adam(parameters, lr=1e-3, fused=True, capturable=on_gpu).step


def _warmed_up(step: Step) -> Step:
    """The step after the calls in which compiled graphs are recorded."""
    for _ in range(3):
        step()
    return step


VARIANTS: dict[str, Variant] = {
    "fused-graph": Variant(_fused, as_graph, needs_gpu=True),
    "reduce-overhead": Variant(_reduce_overhead, _warmed_up, compiles_per_tensor=True),
    "reduce-overhead-packed": Variant(_reduce_overhead_packed, _warmed_up),
    "eager": Variant(_eager),
    "captured": Variant(_captured, as_it_is),
    "captured-packed": Variant(_packed, _warmed_up),
}
"""Torch's fused step in a graph made by hand, its compiled step, Adam's math over our lists compiled, our steps."""


def is_measured(set_name: str, variant_name: str, slow: bool, device: str) -> bool:
    """Is this variant measured on this set?

    >>> is_measured("tiny1000", "reduce-overhead", slow=False, device="cuda")
    False
    >>> is_measured("llama1b", "captured", slow=False, device="cuda")
    True
    """
    variant = VARIANTS[variant_name]
    if variant.needs_gpu and device == "cpu":
        return False
    return slow or not variant.compiles_per_tensor or len(specs(set_name, tiny=False)) < 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    add_sweep_arguments(parser)
    parser.add_argument("--no-lend", dest="lend", action="store_false", help="leave out what an arena's release takes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status, 1 where a row could not be measured."""
    if options.row:
        set_name, variant_name = options.row
        measured = (
            measure_copy(options.tiny, options.device)
            if set_name == COPY
            else measure(set_name, variant_name, options.tiny, options.device, VARIANTS)
        )
        print(to_json(measured))
        return 0
    pairs = [
        (set_name, variant_name)
        for set_name in names(options.sets, SETS, "set")
        for variant_name in names(options.variants, list(VARIANTS), "variant")
        if is_measured(set_name, variant_name, options.slow, options.device)
    ]
    console = Console()
    rows, failures = sweep("static", pairs, options, console)
    if rows:
        console.print(table(rows))
    if options.lend:
        arguments = ["lend", "--device", options.device, "--out", str(options.out)]
        try:
            run_cold("benchmarks", arguments)
            console.print(lent_table(load(LentRow, options.out / "lend.json")))
        except MeasurementFailed as error:
            console.print(f"lend: not measured\n{error}", markup=False)
            failures += 1
    return 1 if failures else 0
