"""The benchmark of padded ops compares variants that agree, and says where one cannot do an op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.padded_ops import PaddedRow, lengths_of, measure
from benchmarks.padded_variants import CASES, Problem, by_hand, by_kernels
from benchmarks.rows import load

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_what_masked_torch_gives(name: str, device: str) -> None:
    case = CASES[name]
    problem = Problem(case, case.tiny, lengths_of(case.tiny[0], case.tiny[case.ragged[0]], 0.5), False, device)
    ours, theirs = (f(problem, problem.x).nan_to_num() for f in (by_kernels, by_hand))
    torch.testing.assert_close(ours, theirs)


def test_lengths_have_the_mean_that_the_fill_says() -> None:
    for fill in (0.25, 0.5, 0.75, 1.0):
        lengths = lengths_of(33, 512, fill)
        assert abs(sum(lengths) / 33 - fill * 512) < 1
        assert 0 <= min(lengths) <= max(lengths) <= 512


def test_a_tiny_run_leaves_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["padded-ops", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--fills", "0.5"]
    variants = "subtensors,masked by hand,torch.masked,torch.nested"
    assert main([*options, "--cases", "layer norm,mean over length", "--variants", variants]) == 0
    rows = load(PaddedRow, tmp_path / "padded_ops.json")
    assert [row.variant for row in rows[:5]] == ["dense", *variants.split(",")]
    assert len(rows) == 2 * 2 * 5
    refused = {row.variant: row.refusal for row in rows if row.case == "layer norm" and row.refusal}
    assert refused == {"torch.masked": "NotImplementedError: torch.masked has no layer norm"}
    assert all((row.ms is None) == (row.refusal is not None) for row in rows)
    assert "layer norm" in capsys.readouterr().out


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="unknown case 'median'; there are softmax of scores"):
        main(["padded-ops", "--device", "cpu", "--cases", "median"])


@pytest.mark.gpu
def test_every_variant_is_measured_on_a_gpu() -> None:
    variants = ["dense", "subtensors", "masked by hand", "torch.masked", "torch.nested"]
    rows = measure("softmax over length", 0.5, "training", variants, tiny=True, device="cuda")
    refusals = {row.variant: row.refusal for row in rows if row.refusal and row.variant != "torch.nested"}
    assert not refusals
    assert all(row.ms for row in rows if not row.refusal)
