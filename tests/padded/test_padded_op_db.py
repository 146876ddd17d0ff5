"""Torch's own op_db with poisoned padding: no wrong result anywhere, and how many ops run without unpadding."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from padded_conformance import outcomes
from padded_table import OPS, WITHOUT_VALUES, best, page
from torch.testing._internal.common_methods_invocations import op_db

TABLE = Path(__file__).parents[2] / "docs" / "padded-ops.md"
FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks.md"


# A quarter of the table in two tests, so that two workers share them.
@pytest.mark.parametrize("part", range(2))
def test_no_op_gives_a_wrong_result_on_its_first_samples(part: int) -> None:
    ways, wrong = Counter[str](), []
    for op in OPS[part::8]:
        found = outcomes(op, 2, values=op.name not in WITHOUT_VALUES)
        wrong += [f"{op.formatted_name} {o.plan}: {o.why}" for o in found if "wrong" in (o.how, o.backward)]
        ways[best([o.how for o in found])] += 1
    assert not wrong, "\n".join(wrong)
    assert ways["rule"] >= 45


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_a_sweep_finds() -> None:
    text, forward, backward, wrong = page()
    assert not wrong, "\n".join(wrong)
    assert forward["rule"] >= 400
    assert backward["rule"] >= 300
    assert text == TABLE.read_text()


def test_the_counts_on_the_pages_are_those_of_the_table() -> None:
    rows = [
        re.findall(r"rule|fallback|refused|-(?= \|)", line) for line in TABLE.read_text().splitlines() if "| `" in line
    ]
    forward, backward = (Counter(row[i] for row in rows) for i in (-2, -1))
    applicable = len(rows) - forward["-"]
    assert f"Of {applicable} ops with a sample" in TABLE.read_text()
    assert f"{forward['rule']} run by rules forward and {backward['rule']} backward" in TABLE.read_text()
    said = (
        f"Of {applicable} ops in torch's own test database {forward['rule']} run by rules, {backward['rule']} of them"
    )
    assert said in FIGURES.read_text()
    assert f"and {forward['fallback']} on the unpadded data" in FIGURES.read_text()


def test_the_sweep_notices_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    from subtensors.dispatch.padded.padded_value import PaddedValue

    monkeypatch.setattr(PaddedValue, "filled", lambda self, value, only=None: self.dense)
    (op,) = [op for op in op_db if op.name == "sum"]
    assert any(o.how == "wrong" for o in outcomes(op, 8))
