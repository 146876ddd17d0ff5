"""The benchmark of padded calls runs end to end, and its calls give what plain torch gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import subtensors as st
from benchmarks.__main__ import main
from benchmarks.padded_calls import CALLS, SEQ, VALID, WIDTH


def test_a_tiny_run_leaves_a_row_a_call_with_and_without_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["padded-calls", "--calls", "relu; sum(1), over padding", "--tiny", "--device", "cpu"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "padded_calls.json").read_text())
    assert [(row["call"], row["tracked"]) for row in rows] == [
        ("relu", False), ("sum(1), over padding", False), ("relu", True), ("sum(1), over padding", True),
    ]  # fmt: skip
    assert "geometric mean" in capsys.readouterr().out


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_plain_torch_gives(name: str) -> None:
    x, y = torch.randn(2, 4, VALID, WIDTH)
    seq = st.Dim("seq", max=SEQ, buckets=[SEQ])
    for _ in range(3):
        found = CALLS[name](st.pad(x, {1: seq}), st.pad(y, {1: seq}))
        for own, plain in zip(_listed(found), _listed(CALLS[name](x, y)), strict=True):
            torch.testing.assert_close(own.unpad() if isinstance(own, st.PaddedTensor) else own, plain)


def _listed(out: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [*out]
