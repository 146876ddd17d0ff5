"""A soak finds nothing in the library as it is, and finds a leak or a wrong value where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak_jobs
import torch
from memory_gauges import Gauge
from soak import WARM_ROUNDS, Soak

ROOT = Path(__file__).parents[2]


ROUNDS = 96
"""A fixed number, so that a busy machine takes longer and samples no less."""


def test_a_short_soak_finds_no_growth_and_no_wrong_value() -> None:
    soak = Soak("cpu", variety=1)
    assert soak.run(rounds=ROUNDS, show=list) == ""
    assert soak.rounds == ROUNDS + WARM_ROUNDS * len(soak.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_longer_soak_finds_no_growth_and_no_wrong_value(device: str, seed: int) -> None:
    assert Soak(device, seed, variety=4).run(rounds=2000) == ""


def test_one_kind_of_job_can_be_soaked_alone() -> None:
    soak = Soak("cpu", variety=1, kinds=["lists"])
    assert len(soak.jobs) == 1
    assert soak.run(rounds=ROUNDS, show=list) == ""
    with pytest.raises(ValueError, match=r"kinds are padded, lists, .*; got list"):
        Soak("cpu", kinds=["list"])


def test_a_leaked_tensor_a_round_is_found() -> None:
    kept: list[torch.Tensor] = []
    soak = Soak("cpu", variety=1, after_round=lambda: kept.extend(torch.ones(9) for _ in range(5)))
    assert "tensors grows by " in soak.run(rounds=ROUNDS, show=list)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak("cpu", variety=1)
    monkeypatch.setattr(soak_jobs.st, "total_norm", lambda tensors: torch.zeros((), dtype=tensors[0].dtype))
    assert "lists, value" in soak.run(rounds=ROUNDS, show=list)


@pytest.mark.slow
def test_the_program_ends_with_an_error_where_memory_grows() -> None:
    program = [sys.executable, "tests/soak/soak.py", "--rounds", str(ROUNDS), "--variety", "1", "--leak"]
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "support"]))
    environment = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout
    assert "tensors grows by" in ended.stderr


def test_growth_is_told_from_noise() -> None:
    rounds = [100 * i for i in range(12)]
    gauge = Gauge("bytes", lambda: 0, bound=10, noise=2000)
    assert gauge.complaint(rounds, [5000 + 3000 * (i % 2) for i in range(12)]) == ""
    assert gauge.complaint(rounds, [5000] * 4 + [9000] * 8) == "" or gauge.growth(rounds, [5000] * 4 + [9000] * 8) > 0
    assert gauge.complaint(rounds, [15 * n for n in rounds]) != ""
    assert gauge.complaint(rounds, [n // 10 for n in rounds]) == ""
