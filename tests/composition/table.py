"""The table as data: its columns, its rows, and what each cell is expected to do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from composition.subjects import Subject


class Column(enum.Enum):
    """What is composed with torch, by the name that users know."""

    PADDED = "PaddedTensor"
    LISTS = "TensorList"
    CHUNKED = "ChunkedTensor"
    STATIC = "StaticAddressTensor"
    BUCKETED = "st.bucketed"
    OPTIM = "st.optim"


@dataclass(frozen=True)
class Works:
    """The values and gradients are plain torch's, and nothing is logged."""


@dataclass(frozen=True)
class Slower:
    """The values and gradients are plain torch's, but by another way than the fast one.

    Args:
        logged: words of what is logged, or of a runner's `stats().fallbacks`.
    """

    logged: str


@dataclass(frozen=True)
class Refused:
    """An error says what is wrong.

    Args:
        error: its type.
        words: part of its message.
        instead: what to do.
    """

    error: type[Exception]
    words: str
    instead: str


@dataclass(frozen=True)
class Meaningless:
    """There is nothing that the two could do with each other.

    Args:
        why: so.
    """

    why: str


Expected: TypeAlias = Works | Slower | Refused | Meaningless
Run: TypeAlias = "Callable[[Subject], list[Tensor]]"

WORKS = Works()


@dataclass(frozen=True)
class Cell:
    """One thing that is tried.

    Args:
        run: returns values and gradients, of plain torch or of the column's type as the subject says.
        expected: of it.
    """

    run: Run
    expected: Expected


@dataclass
class Row:
    """What the columns are composed with.

    Args:
        group: the part of the page.
        name: of the row.
        dtype: of the values; the truth is computed in float64 or complex128.
        ranks: how many processes run the cells together.
        spawned: a fresh process runs the cells.
        on_gpu: False for what no process that has used a GPU can do.
        slow: it takes seconds.
    """

    group: str
    name: str
    dtype: torch.dtype = torch.float32
    ranks: int = 1
    spawned: bool = False
    on_gpu: bool = True
    slow: bool = False
    cells: dict[Column, Cell] = field(default_factory=dict)

    def cell(self, column: Column, expected: Expected = WORKS) -> Callable[[Run], Run]:
        """Register a cell that runs otherwise than those of its row."""

        def register(run: Run) -> Run:
            self.cells[column] = Cell(run, expected)
            return run

        return register


ROWS: dict[str, Row] = {}
"""By name, in the order of the page."""


def row(
    group: str,
    name: str,
    *,
    padded: Expected = WORKS,
    lists: Expected = WORKS,
    chunked: Expected = WORKS,
    static: Expected = WORKS,
    bucketed: Expected = WORKS,
    optim: Expected = WORKS,
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    spawned: bool = False,
    on_gpu: bool = True,
    slow: bool = False,
) -> Callable[[Run], Row]:
    """Make a row of which every column runs the same function, expected to work unless said otherwise."""

    def register(run: Run) -> Row:
        new = Row(group, name, dtype, ranks, spawned, on_gpu, slow)
        expected = (padded, lists, chunked, static, bucketed, optim)
        new.cells.update((column, Cell(run, e)) for column, e in zip(Column, expected, strict=True))
        if name in ROWS:
            raise ValueError(f"there are two rows of the name {name!r}")
        ROWS[name] = new
        return new

    return register
