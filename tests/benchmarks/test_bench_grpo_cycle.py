"""The benchmark of lent cycles runs where there is no GPU, and its peer makes the same updates."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from benchmarks.__main__ import main

pytest.importorskip("transformers")

import grpo_cycle
from benchmarks.grpo_cycle import trl_job


def test_the_command_measures_cycles_and_says_in_a_line_what_the_peer_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo-cycle", "--tiny", "--device", "cpu", "--cycles", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "grpo_cycle.json").read_text())
    assert [(row["variant"], row["cycle"]) for row in rows] == [("subtensors", 0), ("subtensors", 1)]
    assert [*rows[0]["seconds"]] == ["generate", "update", "release", "restore"]
    assert rows[0]["freed_mb"] > 0
    assert "TRL is left out: it needs " in capsys.readouterr().out


def test_the_peer_samples_and_learns_alike() -> None:
    pytest.importorskip("trl", reason="needs the package trl")
    saver = MagicMock()
    plan = grpo_cycle.plan_on("cpu")
    ours, theirs = grpo_cycle.Job(plan), trl_job(plan, saver)
    for _ in range(2):
        mine, found = ours.cycle(), theirs.cycle(lambda size: size)
        assert found.reward == mine.reward
        assert found.loss == pytest.approx(mine.loss, rel=1e-4)
    kept = {"enable_cpu_backup": True}
    assert saver.method_calls == [
        *(call.region(**kept), call.region(**kept)),
        *(call.pause(), call.resume()) * 2,
    ]
