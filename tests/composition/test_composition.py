"""Each cell of the table does what the table says, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from pretend_graphs import pretend

from composition import ROWS, Column, Meaningless, Refused, Slower, Works
from composition.attempts import Comparison, compared
from composition.page import PAGE, page
from composition.processes import ran_elsewhere
from composition.table import Expected, Row

CELLS = [
    pytest.param(row, column, id=f"{row.name}-{column.value}", marks=[pytest.mark.slow] * row.slow)
    for row in ROWS.values()
    for column, cell in row.cells.items()
    if not isinstance(cell.expected, Meaningless)
]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, trained=True)


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_a_cell_does_what_the_table_says(row: Row, column: Column, device: str) -> None:
    if not row.on_gpu and torch.cuda.is_available():
        pytest.skip("no process that may have used a GPU can do that")
    if device == "cuda" and torch.cuda.device_count() < row.ranks:
        pytest.skip("there are fewer GPUs than ranks")
    is_elsewhere = row.ranks > 1 or row.spawned
    found = ran_elsewhere(row.name, device)[column] if is_elsewhere else [compared(row, column, device)]
    for each in found:
        check(each, row.cells[column].expected, row.dtype)


def check(found: Comparison, expected: Expected, dtype: torch.dtype) -> None:
    match expected:
        case Refused(error, words):
            assert found.ours.error is not None, f"expected {error.__name__}, and it works"
            kind, message = found.ours.error
            assert issubclass(kind, error), (kind, message)
            assert words in message, message
        case Slower(words):
            assert found.ours.error is None, found.ours.error
            assert not found.difference(dtype)
            assert any(words in line for line in found.ours.logged), found.ours.logged
        case Works():
            assert found.ours.error is None, found.ours.error
            assert not found.difference(dtype)
            assert found.ours.logged == []


def test_no_cell_is_empty() -> None:
    assert {row.name: set(Column) - set(row.cells) for row in ROWS.values() if set(row.cells) != set(Column)} == {}


def test_the_page_is_what_the_table_makes() -> None:
    assert PAGE.read_text() == page()
