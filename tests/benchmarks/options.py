"""The options that benchmarks share: where they measure, how much, and where their rows go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def add_shared_options(parser: argparse.ArgumentParser, tiny: str = "small sizes", repeats: int | None = None) -> None:
    """Declare `--tiny`, `--device` and `--out`.

    Args:
        parser: of the benchmark.
        tiny: what is measured with `--tiny`.
        repeats: the default of `--repeats`; None: there is no such option.
    """
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="rounds (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help=f"{tiny}: shows that it runs, no more")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results (%(default)s)")


def names(given: str, known: Sequence[str], what: str, separator: str = ",") -> list[str]:
    """The names in a list, each of them known.

    >>> names("b, a", ["a", "b"], "letter")
    ['b', 'a']
    """
    found = [name.strip() for name in given.split(separator)]
    for name in found:
        if name not in known:
            raise SystemExit(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return found
