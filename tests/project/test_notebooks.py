"""The notebooks: each runs from top to bottom, here on a CPU at small size, and is kept without outputs."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest
import torch

from subtensors.bucketed.statistics import Statistics

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# Training and timing on a CPU would show nothing more on a GPU, which the notebooks choose where there is one.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes would be those of a GPU")


def cells(path: Path, kind: str) -> list[str]:
    """The sources of a notebook's cells of one kind."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, object]) -> object:
    """Run a cell; returns the value of its last line, as a notebook would show it."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, type_ignores=[]), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["bucketed_serving", "chunked_loss", "own_optimizer"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    with caplog.at_level(logging.WARNING, "subtensors"):
        shown = [run_cell(source, names) for source in cells(path, "code")]
    assert [record.getMessage() for record in caplog.records] == []
    if path.stem == "bucketed_serving":
        statistics = shown[-1]
        assert isinstance(statistics, Statistics)
        assert statistics.hits > 0
        assert statistics.fallbacks == {}
        assert statistics._repr_html_().count("<tr>") > 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_its_links_lead_somewhere(path: Path) -> None:
    book = json.loads(path.read_text())
    assert book["nbformat"] == 4
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
    assert all(cell["execution_count"] is None for cell in book["cells"] if cell["cell_type"] == "code")
    for target in re.findall(r"\]\(([^)#]+)", "".join(cells(path, "markdown"))):
        assert (path.parent / target).is_file(), target
