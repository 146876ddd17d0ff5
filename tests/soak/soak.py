"""A soak: goes round all parts of the library for minutes, compares with plain torch, and watches memory.

    make soak MINUTES=5

Jobs of all kinds are drawn once, with shapes, dtypes and programs of their own. After each of them ran a few times, the
order is random and memory has to stay flat (`memory_gauges.py` says within which bounds). Exits with 1 where a value is
wrong or memory grows.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import time
from collections.abc import Callable, Collection
from math import inf

os.environ.setdefault("TRITON_INTERPRET", "0")

import torch
from memory_gauges import Gauge, gauges
from soak_jobs import Job, jobs

WARM_ROUNDS = 7
"""How often each job runs before memory is measured: recorded, captured, and replayed, at each length."""

SAMPLES = 24
"""How many times memory is measured in a soak."""


class Soak:
    """A number of jobs, run in random order.

    Args:
        device: "cpu" or "cuda".
        seed: of shapes, dtypes, programs and their order.
        variety: how many jobs of each kind.
        after_round: called after each round: to leak something, in a test.
        kinds: the names of the kinds of jobs; none: all.
    """

    def __init__(
        self,
        device: str,
        seed: int = 0,
        variety: int = 8,
        after_round: Callable[[], object] | None = None,
        kinds: Collection[str] = (),
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.rounds = device, 0
        self.jobs: list[Job] = jobs(seed, device, variety, kinds)
        self.gauges: list[Gauge] = gauges(device, self._pool_bytes)
        self._order = random.Random(seed)
        self._after_round = after_round
        self._measured_at: list[int] = []
        self._measured: list[list[int]] = [[] for _ in self.gauges]

    def run(
        self, seconds: float = inf, rounds: float = inf, every: float = 10.0, show: Callable[[str], object] = print
    ) -> str:
        """Go round, until so many seconds or rounds have passed.

        Args:
            seconds: how long, once everything is warm.
            rounds: how many, once everything is warm: a test takes as many on a busy machine.
            every: how many seconds there are between two lines.
            show: prints a line.

        Returns:
            What is wrong; "" if nothing is.
        """
        try:
            for job in self.jobs * WARM_ROUNDS:
                self._round(job)
            self._measure()
            began = shown = now = time.monotonic()
            first, samples = self.rounds, 0
            while (done := max((now - began) / seconds, (self.rounds - first) / rounds)) < 1:
                self._round(self._order.choice(self.jobs))
                if done * SAMPLES >= samples + 1:
                    self._measure()
                    samples += 1
                now = time.monotonic()
                if now - shown >= every:
                    show(self._line(now - began, self.rounds - first))
                    shown = now
            self._measure()
        except AssertionError as error:
            return f"round {self.rounds}: {error}"
        show(self._line(now - began, self.rounds - first))
        found = [g.complaint(self._measured_at, v) for g, v in zip(self.gauges, self._measured, strict=True)]
        return "; ".join(filter(None, found))

    def _round(self, job: Job) -> None:
        job()
        self.rounds += 1
        if self._after_round is not None:
            self._after_round()

    def _measure(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self._measured_at.append(self.rounds)
        for gauge, values in zip(self.gauges, self._measured, strict=True):
            values.append(gauge.read())

    def _pool_bytes(self) -> int:
        return sum(job.pool_bytes() for job in self.jobs if hasattr(job, "pool_bytes"))

    def _line(self, seconds: float, rounds: int) -> str:
        parts = [
            f"{gauge.name} {_short(values[-1])} ({gauge.growth(self._measured_at, values):+.2g} a round)"
            for gauge, values in zip(self.gauges, self._measured, strict=True)
        ]
        return f"{seconds:5.0f} s, {self.rounds} rounds, {rounds / seconds:.0f} a second; " + ", ".join(parts)


def _short(value: int) -> str:
    """Return a large number with three digits."""
    return f"{value / 1e6:.3g}M" if value >= 1e6 else str(value)


def main() -> None:
    """Run a soak of the length that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=float, default=inf, help="end after this many, if the minutes are not over")
    parser.add_argument("--every", type=float, default=10, help="seconds between two lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variety", type=int, default=8, help="jobs of each kind")
    parser.add_argument("--kinds", nargs="*", default=(), help="only these jobs, to find which one makes memory grow")
    parser.add_argument("--leak", action="store_true", help="keep a tensor a round, to see that it is noticed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # What was imported is no growth, and takes half a second to go through.
    gc.collect()
    gc.freeze()
    kept: list[torch.Tensor] = []
    leak = (lambda: kept.append(torch.ones(1000))) if options.leak else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    soak = Soak(device, options.seed, options.variety, leak, options.kinds)
    if wrong := soak.run(60 * options.minutes, options.rounds, options.every):
        raise SystemExit(wrong)
    print(f"{soak.rounds} rounds on {device}, no wrong value, no growth")


if __name__ == "__main__":
    main()
