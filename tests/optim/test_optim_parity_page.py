"""The page on parity says what the sweep covers."""

from __future__ import annotations

import re

import pytest
import torch
from optim_oracle import DTYPES
from optim_parity_page import NAMES, PAGE, largest_share, samples

TABLES = [
    [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
]


def test_every_class_has_a_figure_for_every_dtype_and_none_is_out_of_bounds() -> None:
    header, _, *rows = TABLES[0]
    assert header[1:] == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    assert [row[0] for row in rows] == [f"`{name}`" for name in NAMES]
    assert all(0 <= int(figure.removesuffix("%")) <= 100 for row in rows for figure in row[1:])


def test_every_sample_of_optim_db_is_listed() -> None:
    if (version := torch.__version__.partition("+")[0]) not in PAGE.read_text():
        pytest.skip(f"the page is of another torch than {version}")
    rows = {row[0]: row[1] for row in TABLES[1][2:]}
    assert rows == {f"`{name}`": ", ".join(samples(name)) for name in NAMES}


def test_a_figure_is_what_is_measured() -> None:
    row = next(row for row in TABLES[0] if row[0] == "`Adagrad`")
    # Torch's kernels differ between processors in their last bits.
    assert largest_share("Adagrad", torch.float32) == pytest.approx(int(row[1].removesuffix("%")) / 100, abs=0.25)
