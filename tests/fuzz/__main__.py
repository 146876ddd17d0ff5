"""Fuzz the public functions for some minutes: `make fuzz MINUTES=5`. Ends with the first wrong error, shrunk."""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TRITON_INTERPRET", "1")

from fuzzed_calls import Value, calls, outcome
from hypothesis import HealthCheck, given, seed, settings


def main() -> None:
    """Draw calls until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    first = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    end, made = time.monotonic() + 60 * options.minutes, 0
    while time.monotonic() < end:

        @seed(first + made)
        @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(calls())
        def fuzz(call: tuple[str, dict[str, Value]]) -> None:
            assert not (found := outcome(*call)), found

        fuzz()
        made += 500
        print(f"{made} calls, seed {first}, {max(end - time.monotonic(), 0) / 60:.1f} minutes left", flush=True)


if __name__ == "__main__":
    main()
