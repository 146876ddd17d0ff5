"""The benchmark of whole jobs over varying lengths runs end to end, and a way that answers wrongly is not measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import varying_variants
from benchmarks.__main__ import main
from benchmarks.rows import load
from benchmarks.varying_cases import CASES, IGNORED, LENGTHS
from benchmarks.varying_packed import Packing
from benchmarks.varying_rows import JobRow, interval
from benchmarks.varying_session import LIMITS

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]


def measured(case: str, folder: Path, variants: str, status: int = 0) -> dict[str, JobRow]:
    """Run a tiny case; returns its rows by variant."""
    options = ["varying", "--tiny", "--device", "cpu", "--case", case, "--out", str(folder), "--rounds", "2"]
    assert main([*options, "--variants", variants]) == status
    return {row.variant: row for row in load(JobRow, folder / "varying.json")}


@pytest.mark.parametrize("case", ["encode-text", "train-text"])
def test_a_tiny_run_leaves_rows_of_peers_and_ours_whose_results_are_eager_ones(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(case, tmp_path, "eager;packed;packed full;bucketed")
    for row in rows.values():
        assert row.reason == ""
        assert row.difference is not None
        assert row.difference <= (1e-5 if CASES[case].trains else 2)
        assert (row.visits, row.fallbacks, row.allocated_mb) == (2, 0, None)
        assert row.step_ms is not None
        assert row.step_ms > 0
    packed, full = rows["packed"].steps, rows["packed full"].steps
    assert packed is not None
    assert full is not None
    assert full < packed
    assert "Tiny sizes: the figures mean nothing." in capsys.readouterr().out


def test_speech_is_not_packed_and_the_row_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured("encode-speech", tmp_path, "eager;packed;bucketed")
    assert "convolutions" in rows["packed"].reason
    assert rows["bucketed"].difference is not None
    assert rows["bucketed"].difference <= 2
    assert rows["bucketed"].fallbacks == 0
    assert "encode-speech, packed: its convolutions" in capsys.readouterr().out
    assert main(["varying", "--device", "cpu", "--page", str(tmp_path / "varying.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("`encode-speech`, lengths `librispeech-test`, 3 a batch, 4 distinct longest lengths")
    assert "| packed | its convolutions over time" in shown
    assert "| bucketed | " in shown


@pytest.mark.slow
def test_ways_in_processes_of_their_own_answer_in_turn(tmp_path: Path) -> None:
    options = ["varying", "--tiny", "--processes", "--device", "cpu", "--case", "train-text", "--out", str(tmp_path)]
    assert main([*options, "--rounds", "3", "--variants", "eager;packed"]) == 0
    rows = load(JobRow, tmp_path / "varying.json")
    assert [(row.variant, row.reason, row.visits, row.beside) for row in rows] == [
        ("eager", "", 3, 0),
        ("packed", "", 3, 0),
    ]


def without_step(step: Callable[..., Tensor], opt: object) -> Callable[..., Tensor]:
    """A schedule that loses the steps after the first one."""
    first: list[Tensor] = []

    def one(**inputs: Tensor) -> Tensor:
        first.append(step(**inputs) if not first else first[0])
        return first[-1]

    return one


def test_a_way_that_does_not_train_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: varying_variants.Job) -> varying_variants.Way:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varying_variants, "scheduled", without_step)
            return plain(job)

    plain = varying_variants.VARIANTS["packed"].make
    variant = replace(varying_variants.VARIANTS["packed"], make=broken)
    monkeypatch.setitem(varying_variants.VARIANTS, "packed", variant)
    row = measured("train-text", tmp_path, "packed", status=1)["packed"]
    assert "its results differ from eager's by" in row.reason
    assert f"and {LIMITS[True]:.3g} is allowed" in row.reason
    assert row.step_ms is None


def test_a_pack_has_every_sequence_once_and_fills_its_row() -> None:
    batches = [[torch.full((n,), n) for n in lengths] for lengths in ([3, 5, 1], [70, 2], [130, 7, 7])]
    packing = Packing.of(batches, longest=130, labels=True)
    assert packing.tokens == 256
    for batch in [*batches, *packing.fill(batches)]:
        made = packing.collate(batch)
        assert {name: tuple(each.shape) for name, each in made.items()} == {
            "input_ids": (1, 256),
            "position_ids": (1, 256),
            "labels": (1, 256),
            "cu_seq_lens_q": (packing.slots + 1,),
        }
        ends = made["cu_seq_lens_q"].tolist()
        assert ends[0] == 0
        assert ends[-1] == 256
        assert all(0 <= b - a <= 130 for a, b in pairwise(ends))
        for each, start in zip(batch, ends, strict=False):
            part = slice(start, start + len(each))
            assert made["input_ids"][0, part].equal(each)
            assert made["position_ids"][0, part].equal(torch.arange(len(each)))
            assert made["labels"][0, part].tolist() == [IGNORED, *[len(each)] * (len(each) - 1)]
        assert int((made["labels"] != IGNORED).sum()) == sum(len(each) - 1 for each in batch)
    found = [each for batch in packing.fill(batches) for each in batch]
    assert [len(each) for each in found] == [3, 5, 1, 70, 2, 130, 7, 7]


@pytest.mark.parametrize("name", LENGTHS)
def test_drawn_lengths_have_the_quantiles_that_were_published(name: str) -> None:
    source = random.Random(1)
    drawn = sorted(LENGTHS[name].at(source.random()) for _ in range(4000))
    for share, value in LENGTHS[name].quantiles[1:-1]:
        if 0.05 <= share <= 0.95:
            below = sum(each <= value for each in drawn) / len(drawn)
            assert abs(below - share) < 0.03  # four deviations at the median


def test_an_interval_is_that_of_students_distribution() -> None:
    assert interval([1.0, 3.0]) == pytest.approx(12.71)
    assert interval([1.0]) is None
    assert interval([0.0, 1.0, 2.0]) == pytest.approx(4.303 / 3**0.5)


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"unknown variants \['magic'\]; there are eager;compile;"):
        main(["varying", "--tiny", "--device", "cpu", "--variants", "magic"])
