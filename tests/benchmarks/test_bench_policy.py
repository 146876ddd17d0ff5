"""The benchmark of policy losses runs end to end, and every way has the gradients of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_a_tiny_run_leaves_rows_and_a_table_and_errors_of_rounding_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["policy", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--repeats", "2"]
    assert main([*options, "--variants", "eager,chunk,chunk 1MiB"]) == 0
    rows = json.loads((tmp_path / "policy.json").read_text())
    assert len(rows) == 9
    for plain, *chunked in (rows[start : start + 3] for start in (0, 3, 6)):
        for row in chunked:
            for name in ("hidden_error", "weight_error"):
                assert row[name] <= 1.5 * plain[name] + 2**-9, "a rounding of bfloat16"
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--variants", "magic"], ["--losses", "magic"]])
def test_an_unknown_name_is_refused_with_the_known_ones(option: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"magic.*there are"):
        main(["policy", "--tiny", "--device", "cpu", *option])
