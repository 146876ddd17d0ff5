"""The page on versions, written by the runs of the whole suite that ask for it with `COMPATIBILITY=1`.

The page's first table is also where the rows are kept: a run replaces the row of the same torch, Python and device.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ON_A_GPU = "not cpu and not interpreter"
"""Where there is a GPU, a run without what the CPU's runs do is whole, too: `make test-gpu`."""
BEGIN, END = "<!-- written by the runs -->\n", "<!-- end of what the runs write -->\n"


@dataclass(frozen=True)
class Row:
    """One run of the whole suite.

    Args:
        torch, triton, numpy, python: versions; "none" of what is not installed.
        device: "CPU", or the name of the GPU.
        passed, failed, skipped: how many tests did; those that ended in an error count as failed.
        date: the day, as YYYY-MM-DD.
    """

    torch: str
    triton: str
    numpy: str
    python: str
    device: str
    passed: int
    failed: int
    skipped: int
    date: str

    def key(self) -> tuple[list[int], list[int], str]:
        """Return what identifies a row; rows are sorted by it."""
        minor = self.python.split(".")[:2]
        return [int(n) for n in self.torch.split(".")], [int(n) for n in minor], self.device


def is_whole(config: pytest.Config, status: int) -> bool:
    """Return whether a run came to its end and left out none but slow tests."""
    options = config.option
    keyword = "" if torch.cuda.is_available() and options.keyword == ON_A_GPU else options.keyword
    narrowed = (
        keyword,
        options.deselect,
        options.ignore,
        options.ignore_glob,
        options.collectonly,
        getattr(options, "lf", False),
    )
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and options.markexpr in ("not slow", "")
        and not any(narrowed)
        and status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        and not (options.maxfail and status)
    )


def row_of(outcomes: dict[str, list[object]]) -> Row:
    """Return the row of a run that ends now.

    Args:
        outcomes: reports by outcome, as pytest's terminal reporter has them.
    """
    passed, failed, skipped = (
        sum(len(outcomes.get(name, ())) for name in names)
        for names in (["passed"], ["failed", "error"], ["skipped", "xfailed"])
    )
    plain_torch = torch.__version__.partition("+")[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = plain_torch, _version("triton"), _version("numpy"), platform.python_version()
    return Row(*versions, device, passed, failed, skipped, datetime.date.today().isoformat())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def rows_in(text: str) -> list[Row]:
    """Return the rows that a page's first table holds."""
    written = text.partition(BEGIN)[2].partition("\n\n")[0]
    rows = []
    for line in written.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append(Row(*cells[:5], *map(int, cells[5:8]), cells[8]))  # type: ignore[arg-type]
    return rows


def with_rows(text: str, rows: Iterable[Row]) -> str:
    """Return a page with these rows in its tables; of rows with the same key the last one counts."""
    kept = {str(row.key()): row for row in rows}
    ordered = sorted(kept.values(), key=Row.key)
    runs = _table([field.name for field in fields(Row)], [list(map(str, astuple(row))) for row in ordered])
    cells = [[name, *(_cell(ordered, name, python) for python in PYTHONS)] for name in TORCHES]
    matrix = _table(["torch", *(f"Python {python}" for python in PYTHONS)], cells)
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{runs}\n{matrix}{END}", text, flags=re.DOTALL)


def _cell(rows: list[Row], torch_version: str, python: str) -> str:
    for row in rows:
        if row.torch == torch_version and row.device == "CPU" and row.python.startswith(f"{python}."):
            return f"{row.failed} failed" if row.failed else "passed"
    return "not run"


def _table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def write_row(config: pytest.Config, status: int, outcomes: dict[str, list[object]]) -> None:
    """Write the row of a run of the whole suite that was asked for one."""
    if os.environ.get("COMPATIBILITY") == "1" and is_whole(config, status):
        text = PAGE.read_text()
        PAGE.write_text(with_rows(text, [*rows_in(text), row_of(outcomes)]))
