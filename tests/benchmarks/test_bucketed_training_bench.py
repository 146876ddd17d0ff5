"""The benchmark of training on varying lengths runs end to end, and every way trains alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.bucketed_training import measure

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow
def test_a_tiny_run_leaves_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bucketed-training", "--tiny", "--device", "cpu", "--batch", "2", "--out", str(tmp_path)]
    assert main([*options, "--variants", "eager"]) == 0
    (row,) = json.loads((tmp_path / "bucketed_training.json").read_text())
    assert (row["variant"], row["steps"], row["reserved_mb"]) == ("eager", 6, None)
    assert row["step_ms"] > 0
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


def test_ours_train_as_eager_torch_does() -> None:
    plain = measure("eager", 2, tiny=True, device="cpu")
    for variant in ("bucketed", "whole-step"):
        row = measure(variant, 2, tiny=True, device="cpu")
        # Some two dozen steps in bfloat16: rounding moves the loss by less than a rounding of the logits.
        assert abs(row.loss - plain.loss) < 2**-8 * plain.loss
        assert row.recompiles == 0
