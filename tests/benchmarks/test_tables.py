"""Tables of figures: no wider than a terminal, and with every figure in them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import bucketed_rows, chunked_rows, padded_ops
from benchmarks.bucketed_rows import VaryingRow
from benchmarks.chunked_rows import LossRow
from benchmarks.padded_ops import PaddedRow
from benchmarks.rows import Row, load
from benchmarks.table import describe, folded, table

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks"


def printed(shown: object) -> str:
    """What a console of 200 columns shows."""
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def test_a_table_of_many_columns_is_folded_with_its_names_at_each_part() -> None:
    columns = ["set", "variant", *(f"column {i}" for i in range(12))]
    lines = [[a, b, *(f"{a}{b}{i}." for i in range(12))] for a, b in (("x", "one"), ("x", "two"), ("y", "one"))]
    text = printed(folded("a title", columns, lines))
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(cell) == 1 for line in lines for cell in line[2:])
    assert text.count("variant") > 1
    assert text.count("a title") == 1


def test_a_column_without_a_figure_is_left_out() -> None:
    text = printed(folded("a title", ["set", "variant", "ms", "MiB"], [["x", "one", "1", "-"], ["x", "two", "-", "-"]]))
    assert "MiB" not in text
    assert "ms" in text


@pytest.mark.parametrize("name", ["optim", "optim_others", "pointwise", "static"])
def test_the_rows_that_are_kept_fit_a_terminal(name: str) -> None:
    rows = load(Row, ROWS / f"{name}.json")
    lines = printed(table(rows)).splitlines()
    shown = [line for line in lines if line.startswith(("│", "┃"))]
    assert max(map(len, shown)) <= 80
    assert {"set", "variant", "step ms", "GB/s"} <= {cell.strip() for line in shown for cell in line.split("┃")}
    assert describe(rows).split(",")[0] in printed(table(rows))


def test_the_other_tables_that_are_kept_fit_a_terminal() -> None:
    shown = [
        bucketed_rows.table(load(VaryingRow, ROWS / "bucketed.json"), "bucketed"),
        chunked_rows.table(load(LossRow, ROWS / "chunked.json"), "chunked"),
        padded_ops.table(load(PaddedRow, ROWS / "padded_ops.json")),
    ]
    for each in shown:
        assert max(len(line) for line in printed(each).splitlines() if line.startswith(("│", "┃"))) <= 80
