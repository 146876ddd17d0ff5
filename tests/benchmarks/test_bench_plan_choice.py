"""The benchmark of plans runs end to end, and compares a plan with schedules that take no more memory than it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.chunked_variants import SHAPES
from benchmarks.plan_choice import LIMITS, SUMS, schedules
from subtensors.dispatch.chunked.cost_model import H200, LossShape, plan_linear_cross_entropy, possible_plans


def test_a_tiny_run_leaves_a_row_a_limit_and_way_to_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan-choice", "--tiny", "--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]
    assert main(options) == 0
    rows = json.loads((tmp_path / "plan_choice.json").read_text())
    assert [row["accumulate"] for row in rows] == [way for way in SUMS for _ in LIMITS]
    assert all(row["best_ms"] <= row["chosen_ms"] for row in rows)
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("accumulate", SUMS)
def test_what_is_chosen_is_measured_beside_rivals_where_there_is_room(name: str, accumulate: str) -> None:
    shape = LossShape(SHAPES[name].tokens, SHAPES[name].hidden, SHAPES[name].vocabulary)
    way = SUMS[SUMS.index(accumulate)]
    measured = schedules(shape, way, H200)
    least = min(plan.bytes for plan in possible_plans(shape, way, None, None, H200))
    for share in LIMITS:
        limit = int(share * least)
        chosen = plan_linear_cross_entropy(shape, accumulate=way, memory_limit=limit, rates=H200)
        assert chosen.schedule in measured
        assert share < 2 or sum(plan.bytes <= limit for plan in measured.values()) > 4
