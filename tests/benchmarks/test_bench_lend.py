"""The benchmark of lent memory runs where there is no GPU, and its figures hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.lend import measure_lending

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks" / "lend.json"


def test_each_sleep_gives_a_row_and_the_state_comes_back() -> None:
    rows = measure_lending(0.0001, "cpu", sleeps=2)
    assert [row.sleep for row in rows] == ["first", "next"]
    for row in rows:
        assert row.is_equal
        assert row.setting.tiny
        assert row.restore_gbps == pytest.approx(row.state_bytes / row.restore_s / 1e9)
        assert row.restore_percent == pytest.approx(100 * row.restore_gbps / row.from_host_gbps)


def test_the_command_prints_a_table_and_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "lend", "--device", "cpu", "--sleeps", "1", "--out", str(tmp_path)])
    assert main() == 0
    assert "Tiny sizes" in capsys.readouterr().out
    assert [row["sleep"] for row in json.loads((tmp_path / "lend.json").read_text())] == ["first"]
