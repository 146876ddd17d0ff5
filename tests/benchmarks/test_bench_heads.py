"""The benchmark of models' heads runs end to end, and every way has the gradients of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.chunked_variants import PEERS, Peer, _eager
from benchmarks.heads import HEADS, VARIANTS


def test_a_tiny_run_leaves_rows_and_a_table_and_errors_of_rounding_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> None:
        raise ValueError("a vocabulary that is a multiple of 256")

    monkeypatch.setitem(PEERS, "quack", Peer(refuses))  # type: ignore[arg-type]  # it gives no loss
    monkeypatch.setitem(PEERS, "compile", Peer(lambda: _eager))
    variants = [name for name in VARIANTS if not name.startswith("liger")]
    options = ["heads", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--repeats", "2"]
    assert main([*options, "--variants", ",".join(variants)]) == 0
    rows = json.loads((tmp_path / "heads.json").read_text())
    assert sorted({(row["part"], row["variant"]) for row in rows}) == sorted((h, v) for h in HEADS for v in variants)
    plain, refused, *ours = rows[: len(variants)]
    assert refused["reason"] == "ValueError: a vocabulary that is a multiple of 256"
    assert refused["step_ms"] is None
    for row in ours:
        for error in ("error", "weight_error"):
            assert row[error] <= 1.5 * plain[error] + 2**-9, "a rounding of bfloat16"
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


def test_an_unknown_head_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"magic.*there are"):
        main(["heads", "--tiny", "--device", "cpu", "--heads", "magic"])
