"""The benchmark of varying sizes runs end to end, and every way answers right."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from reordered_sums import orders
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.bucketed import error_over_plain, measure
from benchmarks.bucketed_cases import CASES
from benchmarks.bucketed_rows import VaryingRow
from benchmarks.bucketed_variants import VARIANTS
from benchmarks.rows import load

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_a_tiny_run_leaves_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bucketed", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--cases", "bert-1"]
    assert main([*options, "--variants", "eager"]) == 0
    (row,) = load(VaryingRow, tmp_path / "bucketed.json")
    assert (row.case, row.variant, row.requests) == ("bert-1", "eager", 10)
    assert 0 < row.p50_ms <= row.p99_ms
    assert row.error == 1
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES)
def test_ours_answers_as_the_model_does(case: str) -> None:
    row = measure(case, "bucketed", tiny=True, device="cpu")
    assert row.error <= 1.5 * max(error_in(order, case) for order in orders())
    assert row.recompiles == 0


@torch.no_grad()
def error_in(order: AbstractContextManager[object], case: str) -> float:
    """Return the plain model's error in this order of addition, over that in torch's own."""
    asked, make = CASES[case], VARIANTS["eager"].make
    model = asked.prepared(tiny=True, device="cpu")
    way = make(model, asked)

    def answer(request: Tensor) -> Tensor:
        with order:
            return (way.first or way.answer)(request)

    return error_over_plain(answer, make, model, asked, asked.requested(tiny=True, device="cpu")[:3])


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_peers(case: str) -> None:
    answering = [name for name, variant in VARIANTS.items() if variant.answers(CASES[case])]
    assert {"eager", "bucketed", "bucketed-compiled"} < set(answering)
