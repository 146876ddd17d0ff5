"""The command line: `python -m subtensors`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from subtensors.bench.__main__ import add_benchmarks


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    from rich.console import Console

    from subtensors.demo.compare import PLANS, demo  # here, so that a benchmark's process does not hold it

    plan = PLANS[options.device]
    if options.steps is not None:
        plan = dataclasses.replace(plan, steps=options.steps)
    demo(plan, options.out, Console())
    return 0


def at_least_two(text: str) -> int:
    """A whole number of steps: the first is measured apart, so there must be another."""
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps} is less than 2")
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; the process's own where there are none.

    Returns:
        the exit status.
    """
    parser = argparse.ArgumentParser(prog="subtensors", description="Tensor subclasses for PyTorch programs.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="train a small GPT with plain PyTorch and with subtensors, side by side")
    demo.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    demo.add_argument("--steps", type=at_least_two, help="optimizer steps of each run, two at least")
    demo.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the plot (%(default)s)")
    demo.set_defaults(run=run_demo)

    bench = commands.add_parser("bench", help="measure beside the peers; the same as python -m subtensors.bench")
    add_benchmarks(bench)

    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
