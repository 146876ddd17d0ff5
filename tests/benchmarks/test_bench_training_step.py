"""The benchmark of training steps runs end to end, every way trains alike, and none changes the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.training_step import module_of


@pytest.mark.parametrize(("model", "loss"), [("llama", "sft"), ("qwen3", "grpo")])
def test_a_tiny_run_leaves_rows_and_a_table_and_all_losses_are_alike(
    model: str, loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = module_of(model)
    before = dict(module)
    options = ["training-step", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--rounds", "2", "--steps", "2"]
    assert main([*options, "--model", model, "--loss", loss, "--variants", "eager;apply"]) == 0
    assert module == before
    rows = json.loads((tmp_path / f"{model}_{loss}.json").read_text())
    assert [row["variant"] for row in rows] == ["eager", "apply"]
    assert all(row["step_ms"] > 0 and row["interval_ms"] >= 0 and row["allocated_mb"] is None for row in rows)
    assert rows[1]["last_loss"] == pytest.approx(rows[0]["last_loss"], rel=1e-5)
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_train_a_sharded_model_alike(tmp_path: Path) -> None:
    options = ["training-step", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--rounds", "1", "--steps", "2"]
    assert main([*options, "--processes", "2", "--variants", "eager;apply"]) == 0
    rows = json.loads((tmp_path / "llama_sft_sharded.json").read_text())
    assert [row["processes"] for row in rows] == [2, 2]
    assert rows[1]["last_loss"] == pytest.approx(rows[0]["last_loss"], rel=1e-5)
    with pytest.raises(SystemExit, match="give --rounds"):
        main([*options, "--processes", "2", "--variants", "eager", "--seconds", "9"])


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"unknown variants \['magic'\]; there are eager; compile;"):
        main(["training-step", "--device", "cpu", "--variants", "magic"])
