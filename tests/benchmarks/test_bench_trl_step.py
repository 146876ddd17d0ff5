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
