"""The benchmark of long contexts runs end to end, and every way has the gradients of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_a_tiny_run_leaves_rows_and_a_table_and_errors_of_rounding_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["long-rows", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--repeats", "2"]
    assert main([*options, "--variants", "eager,checkpoint,subtensors"]) == 0
    rows = json.loads((tmp_path / "long_rows.json").read_text())
    measured = [(row["part"], row["tokens"]) for row in rows[::3]]
    assert measured == [("loss", 64), ("loss", 128), ("mlp", 64), ("mlp", 128)]
    for plain, *others in (rows[start : start + 3] for start in range(0, len(rows), 3)):
        for row in others:
            for error in ("error", "weight_error"):
                assert row[error] <= 1.5 * plain[error] + 2**-9, "a rounding of bfloat16"
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out
    assert main(["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "long_rows.png").exists()


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"magic.*there are"):
        main(["long-rows", "--tiny", "--device", "cpu", "--parts", "magic"])
