"""Models of transformers, unmodified: what the table in `docs/models.md` says of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from model_sweep.cases import CASES
from model_sweep.outcome import uniform
from model_sweep.page import row

import subtensors as st

TABLE = Path(__file__).parents[2] / "docs" / "models.md"

# One of each kind for the default run.
SAMPLE = [
    "BertForMaskedLM",
    "Gemma3ForCausalLM",
    "BartForConditionalGeneration",
    "MixtralForCausalLM",
    "Lfm2ForCausalLM",
]


def _cells(name: str) -> list[str]:
    """What the page says of a model: its family, uniform and ragged calls."""
    (line,) = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[2:5]]


def _check(name: str) -> None:
    family, _, uniform, ragged, why = row(name)
    assert "wrong" not in (uniform, ragged), why
    assert _cells(name) == [family, uniform, ragged], why


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_the_sample_does_what_the_table_says(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SAMPLE])
def test_a_model_does_what_the_table_says(name: str) -> None:
    _check(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SAMPLE[:3], SAMPLE[4], "FalconForCausalLM"])
def test_a_model_does_on_a_gpu_what_the_table_says(name: str) -> None:
    outcome = uniform(CASES[name], False, "cuda")
    assert outcome.how == _cells(name)[1], outcome.why


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "PhimoeForCausalLM"])
def test_experts_of_16_bits_are_replayed_on_a_gpu(name: str) -> None:
    case = CASES[name]
    model = case.model().to("cuda", torch.bfloat16)
    run = st.bucketed(model, case.dims, check=False)
    for index, sizes in enumerate(((7,), (5,), (12,), (9,), (3,))):
        run(**{name: x.to("cuda") for name, x in case.arguments(index, sizes).items()})
    assert run.stats().hits == 3
    assert not run.stats().fallbacks


def test_the_table_has_a_row_for_each_model_and_its_counts_are_those_of_its_rows() -> None:
    text = TABLE.read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows = [line[1:5] for line in lines if line[1] != "model"]
    assert [name for name, *_ in rows] == list(CASES)
    uniform, ragged = (Counter(r[i] for r in rows) for i in (2, 3))
    batches = len(rows) - ragged["-"]
    assert f"Of {len(rows)} models {uniform['rule']} run by rules" in text
    assert f"of {batches} ragged batches {ragged['rule']} run by rules. 0 are wrong." in text
