"""The benchmark of linear + cross entropy beside the strongest peers: all ways of a model's head in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.chunked_variants import PEERS, SHAPES, TINY, Shape
from benchmarks.long_rows import LongRow, Loss, backward, chunked, measure, show
from benchmarks.options import add_shared_options, names
from benchmarks.rounds import Step
from benchmarks.rows import Setting, save

HEADS = SHAPES | {"qwen3-0.6b": Shape(8192, 1024, 151936, ()), "llama3-8b-long": Shape(8192, 4096, 128256, ())}
"""The heads, by model; of a shape the sizes alone count here."""

LIMITS = {"gpt2": 300, "llama3-8b": 1150, "gemma2-2b": 2300, "qwen3-0.6b": 620, "llama3-8b-long": 1400}
"""The memory limit of the ways that have one, MiB."""

VARIANTS = (
    *("compile", "liger 16", "liger hopper", "quack"),
    *("st.chunk", "st.chunk fast", "st.chunk limited", "st.chunk fast limited"),
)
"""The ways that are measured by default."""


class Head(Loss):
    """The loss of a model's head, by peers and by `chunk`, with its options in the way's name.

    Args:
        name: a key of `HEADS`.
        tiny: cut the sizes down.
        device: "cpu" or "cuda".
    """

    def __init__(self, name: str, tiny: bool, device: str) -> None:
        shape = TINY if tiny else HEADS[name]
        super().__init__(shape.tokens, shape.hidden, shape.vocabulary, device)
        self.limit = f"{LIMITS[name]}MiB"

    def ways(self) -> Mapping[str, Callable[[], Step]]:
        """Return what makes each way's step, by name."""

        def step(way: str) -> Step:
            of = chunked(
                accumulate="fast" if "fast" in way else "exact", memory_limit=self.limit if "limited" in way else None
            )
            return lambda: backward(of(self.hidden, self.weight, self.target))

        ours = [name for name in VARIANTS if name.startswith("st.chunk")]
        return {**super().ways(), **{way: partial(step, way) for way in ours}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument("--heads", default=",".join(HEADS), help="comma-separated (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (%(default)s)")
    add_shared_options(parser, repeats=12)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; returns the exit status."""
    heads, variants = names(options.heads, [*HEADS], "head"), names(options.variants, [*PEERS, *VARIANTS], "variant")
    rows = list[LongRow]()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in heads:
        head = Head(name, options.tiny, options.device)
        setting = Setting.now(options.device, options.tiny)
        rows += measure(name, head, variants, setting, options.device, options.repeats)
        save(rows, options.out / "heads.json")  # a run that is cut short leaves what it measured
    show(rows)
    return 0
