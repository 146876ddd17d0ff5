"""Benchmark rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rich.console import Group
from rich.table import Table

from benchmarks.rows import Measured, Row

R = TypeVar("R")

MAX_WIDTH = 80
"""Columns of a terminal."""


def describe(rows: Sequence[Measured]) -> str:
    """Where and when rows were measured, one line a device and set of versions: one date, where all are of one day.

    >>> from benchmarks.rows import Setting
    >>> setting = Setting("CPU", "2.13.0", None, "2026-01-01 00:00", tiny=True)
    >>> print(describe([Row("s", "v", 1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None, setting)]))
    CPU, torch 2.13.0, no triton, 2026-01-01 00:00 UTC
    Tiny sizes: the figures mean nothing.
    """
    dates: dict[str, list[str]] = {}
    for setting in (row.setting for row in rows):
        triton = f"triton {setting.triton}" if setting.triton else "no triton"
        dates.setdefault(f"{setting.device}, torch {setting.torch}, {triton}", []).append(setting.date)
    lines = []
    for place, measured in dates.items():
        first, last = min(measured), max(measured)
        lines.append(f"{place}, {last if first[:10] == last[:10] else f'{first} to {last}'} UTC")
    if any(row.setting.tiny for row in rows):
        lines.append("Tiny sizes: the figures mean nothing.")
    return "\n".join(lines)


def figure(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits and never an exponent; a dash for none.

    >>> figure(0.0123456), figure(12345.6), figure(None)
    ('0.01235', '12346', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "set": lambda row: row.set,
    "variant": lambda row: row.variant,
    "tensors": lambda row: str(row.tensors),
    "first s": lambda row: figure(row.first_s, 3),
    "second s": lambda row: figure(row.second_s, 3),
    "step ms": lambda row: figure(row.step_ms),
    "wall ms": lambda row: figure(row.wall_ms),
    "cpu ms": lambda row: figure(row.cpu_ms),
    "GB/s": lambda row: figure(row.gbps),
    "% of copy": lambda row: figure(row.copy_percent, 3),
    "extra MiB": lambda row: figure(row.extra_peak_mb),
    "kernels": lambda row: figure(row.kernels_per_step),
    "copied B": lambda row: figure(row.copied_bytes),
}


def table(rows: Sequence[Row]) -> Group:
    """One line a row, sets apart from each other."""
    return in_sections(rows, COLUMNS, describe(rows))


def in_sections(rows: Sequence[R], columns: Mapping[str, Callable[[R], str]], title: str) -> Group:
    """One line a row; the first two columns hold names, and rows that differ in the first stand apart.

    Args:
        rows: in the order they are shown in.
        columns: what each column says of a row.
        title: above them.
    """
    return folded(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def folded(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], names: int = 2) -> Group:
    """Tables of at most 80 columns: each has the names, and as many of the figures as fit; none of dashes alone.

    Args:
        title: above the first.
        columns: what stands above each column.
        lines: of cells; those that differ in the first cell stand apart.
        names: how many columns hold names.
    """
    # A cell has a space on each side and a line to its left.
    widths = [3 + max(len(line[i]) for line in (columns, *lines)) for i in range(len(columns))]
    room = MAX_WIDTH - 1 - sum(widths[:names])
    parts: list[list[int]] = [[]]
    for i in range(names, len(columns)):
        if all(line[i] == figure(None) for line in lines):
            continue
        if sum(widths[j] for j in parts[-1]) + widths[i] > room:
            parts.append([])
        parts[-1].append(i)
    shown: list[Table] = []
    for part in parts:
        result = Table(title=None if shown else title)
        for i in (*range(names), *part):
            result.add_column(columns[i], justify="left" if i < names else "right", no_wrap=True)
        for line, following in zip(lines, [*lines[1:], None], strict=True):
            is_last = following is None or following[0] != line[0]
            result.add_row(*(line[i] for i in (*range(names), *part)), end_section=is_last)
        shown.append(result)
    return Group(*shown)
