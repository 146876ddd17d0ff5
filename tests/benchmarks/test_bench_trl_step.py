"""The benchmark of TRL's trainers runs end to end, and one call changes no loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

pytest.importorskip("trl", reason="needs the package trl")
pytest.importorskip("datasets", reason="needs the package datasets")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_environment")]


@pytest.mark.parametrize("loss", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_tiny_run_leaves_a_row_a_way_with_the_same_loss(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["trl-step", "--tiny", "--device", "cpu", "--rounds", "1", "--steps", "2", "--loss", loss]
    assert main([*options, "--variants", "TRL;TRL, cuDNN;apply_to_trainer", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"trl_{loss}.json").read_text())
    assert [row["variant"] for row in rows] == ["TRL", "apply_to_trainer"]
    assert rows[1]["last_loss"] == pytest.approx(rows[0]["last_loss"], rel=1e-4)
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


def test_errors_are_those_of_gradients_in_bfloat16_against_float64(tmp_path: Path) -> None:
    options = ["trl-step", "--tiny", "--device", "cpu", "--errors", "--variants", "TRL;apply_to_trainer"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    theirs, ours = json.loads((tmp_path / "trl_sft_errors.json").read_text())
    assert 1e-4 < theirs["gradient_error"] < 0.05
    assert ours["gradient_error"] < 1.2 * theirs["gradient_error"]
    assert ours["loss_error"] < 1e-3
