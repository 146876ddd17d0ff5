"""The benchmarks' command line: `python -m subtensors bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import (
    bucketed,
    bucketed_training,
    chunked,
    figures,
    fit_plan,
    gpt2_step,
    grpo_cycle,
    heads,
    lend,
    long_rows,
    optim,
    padded_calls,
    padded_ops,
    plan_choice,
    pointwise,
    policy,
    sharded_head,
    static,
    training_step,
    trl_step,
    varying,
)

# Each benchmark declares its options, and with them the function that runs it.
BENCHMARKS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "optim": ("one Adam step: torch's foreach, fused and compiled beside subtensors", optim.add_arguments),
    "pointwise": ("a step of each pointwise optimizer against the bytes that it must move", pointwise.add_arguments),
    "chunked": ("linear + cross entropy: time, memory and error beside the peers", chunked.add_arguments),
    "heads": ("the same, of five models' heads, in turns with the strongest peers", heads.add_arguments),
    "policy": ("policy losses of a large head: time, memory and error, whole and chunked", policy.add_arguments),
    "long-rows": ("a loss and a gated MLP over up to 262,144 tokens: time and memory", long_rows.add_arguments),
    "sharded-head": ("a head that is sharded over processes, beside gathered ones", sharded_head.add_arguments),
    "fit-plan": ("the rates of a chunked loss's plan, from rows of `chunked`", fit_plan.add_arguments),
    "plan-choice": ("how near a chunked loss's plan is to the best schedule", plan_choice.add_arguments),
    "gpt2-step": ("a training step of GPT-2: whole logits beside chunked ones", gpt2_step.add_arguments),
    "training-step": ("a training step of a model of transformers, beside peers", training_step.add_arguments),
    "trl-step": ("a step of TRL's trainers, as they are and after one call", trl_step.add_arguments),
    "lend": ("an arena with AdamW's state, released and restored", lend.add_arguments),
    "grpo-cycle": ("GRPO that lends its memory, beside TRL and torch_memory_saver", grpo_cycle.add_arguments),
    "static": ("one Adam step as a graph: captured here, compiled and by hand; then lend", static.add_arguments),
    "bucketed": ("requests of varying lengths: eager, compiled, bucketed by hand and here", bucketed.add_arguments),
    "bucketed-training": ("training on batches of varying lengths, the same ways", bucketed_training.add_arguments),
    "varying": ("whole jobs over varying lengths: eager, compiled, by hand, packed and here", varying.add_arguments),
    "padded-ops": ("ops over what is real in a padded tensor, beside masked torch", padded_ops.add_arguments),
    "padded-calls": ("what an eager padded call takes the host, beside a plain one", padded_calls.add_arguments),
    "figures": ("draw what the rows of a folder show, measuring nothing", figures.add_arguments),
}

EXAMPLES = {
    "lend": " --device cpu",
    "fit-plan": " --rows docs/benchmarks/chunked.json",
    "figures": " --out docs/benchmarks",
}
"""The options in the example of those that have no tiny sizes."""


def why_not_measurable(options: argparse.Namespace, is_device_given: bool) -> str:
    """The reason why this machine can't measure what the options ask for; "" if it can."""
    device = getattr(options, "device", None)
    if device is None or torch.cuda.is_available():
        return ""
    if device == "cuda":
        return "--device cuda: torch finds no GPU here; `python -m subtensors doctor` says why"
    if not is_device_given:
        shows = "--tiny --device cpu" if hasattr(options, "tiny") else "--device cpu"
        return f"this measures a GPU and torch finds none: {shows} shows that it runs"
    return ""


def add_benchmarks(parser: argparse.ArgumentParser) -> None:
    """Give a parser one command a benchmark."""
    commands = parser.add_subparsers(required=True, metavar="benchmark")
    for name, (summary, add_arguments) in BENCHMARKS.items():
        example = f"example: python -m subtensors bench {name}" + EXAMPLES.get(name, " --tiny --device cpu")
        command = commands.add_parser(name, help=summary, description=summary, epilog=example)
        add_arguments(command)
        command.set_defaults(command=command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line names; returns the exit status.

    Args:
        arguments: of the command line; the process's own where there are none.
    """
    # A measurement may be a process of its own, which finds this package where this one did.
    beside = str(Path(__file__).parents[1])
    if beside not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([beside, *filter(None, [os.environ.get("PYTHONPATH")])])
    parser = argparse.ArgumentParser(
        prog="subtensors bench",
        description="Measure beside the peers.",
        epilog="example: python -m subtensors bench optim --sets llama1b --out out/one",
    )
    add_benchmarks(parser)
    given = sys.argv[1:] if arguments is None else arguments
    options, unknown = parser.parse_known_args(given)
    if unknown:
        options.command.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of the benchmark
    if reason := why_not_measurable(options, any(part.startswith("--device") for part in given)):
        print(reason, file=sys.stderr)
        return 2
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
