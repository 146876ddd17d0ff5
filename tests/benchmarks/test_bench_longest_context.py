"""The longest context that fits is found in a few runs, on a GPU alone."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.longest_context import MULTIPLE, longest_that_fits


@pytest.mark.parametrize("most", [4_000, 9_000, 17_000, 60_000, 80_000, 500_000])
def test_the_longest_context_is_found_in_a_few_runs(most: int) -> None:
    runs = []

    def peak(length: int) -> float | None:
        runs.append(length)
        return 10 + length / 1024 if length <= most else None

    found = longest_that_fits(peak, 10 + most / 1024 * 1.05, 8192)
    assert found <= most
    assert found == 0 if most < 8192 else most - found <= max(0.03 * most, 8192 if most < 2 * 8192 else MULTIPLE)
    assert len(runs) <= 8


def test_a_longest_context_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs one"):
        main(["training-step", "--tiny", "--device", "cpu", "--longest", "--variants", "eager"])
