"""The benchmark of sharded heads runs in two processes, and every way has the same gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.sharded_head import WAYS


def test_a_tiny_run_leaves_a_row_a_way_with_the_same_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [name for name in WAYS if "compiled" not in name]
    options = ["sharded-head", "--tiny", "--device", "cpu", "--repeats", "2", "--variants", ";".join(ways)]
    assert main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "sharded_head.json").read_text())
    assert [row["variant"] for row in rows] == [name for name in ways if "Liger" not in name]
    assert all(row["weight_error"] < 1e-6 and row["processes"] == 2 for row in rows)
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out
