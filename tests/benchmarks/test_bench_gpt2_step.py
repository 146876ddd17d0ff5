"""The benchmark of a GPT-2 training step runs end to end, and every way trains alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_a_tiny_run_leaves_rows_and_a_table_and_all_losses_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["eager", "eager exact/16", "eager fast/16"]
    options = ["gpt2-step", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*options, "--variants", ",".join(names)]) == 0
    rows = json.loads((tmp_path / "gpt2_step.json").read_text())
    assert [row["variant"] for row in rows] == names
    assert all(row["step_ms"] > 0 and row["peak_mb"] is None for row in rows)
    plain = rows[0]["loss"]
    # A bfloat16 training run of two dozen steps: rounding moves its loss by less than a rounding of the logits.
    assert all(abs(row["loss"] - plain) < 2**-8 * plain for row in rows)
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown variant 'magic'; there are eager, compile"):
        main(["gpt2-step", "--device", "cpu", "--variants", "magic"])
