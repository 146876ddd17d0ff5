"""Texts of many models of transformers, by `run.generate`: those of the model's own `generate`."""

from __future__ import annotations

import pytest
from model_sweep.generation import ASKING, CASES, UNDECLARED, WAYS, generated
from pretend_graphs import pretend

pytestmark = [pytest.mark.filterwarnings("ignore")]

# One of each kind for the default run, in one way each.
SAMPLE = {"Falcon": "samples", "M2M100": "greedy", "Marian": "beams"}


@pytest.mark.parametrize("name", SAMPLE)
def test_texts_of_the_sample_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, {SAMPLE[name]: WAYS[SAMPLE[name]]}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(name, WAYS, monkeypatch)


def _check(name: str, ways: dict[str, dict[str, object]], patch: pytest.MonkeyPatch) -> None:
    pretend(patch)
    found = generated(CASES[name], ways)
    assert not found.wrong
    assert bool(found.fallbacks) == (name in ASKING | UNDECLARED), found.fallbacks
