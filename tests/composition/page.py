"""Write the table as a page: `PYTHONPATH=tests:tests/support python -m composition.page`."""

from __future__ import annotations

from pathlib import Path

from composition import ROWS, Column, Meaningless, Refused, Slower, Works
from composition.table import Expected, Row

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

INTRODUCTION = """# What composes with what

The types, the runner and the optimizers, with each other and with what torch has beside them. Each cell is a small
program that `tests/composition` runs on a CPU, on a GPU where there is one, and in two processes where it says so; this
page is written from the same table. Values and gradients are those of plain torch: against float64, none errs more than
1.5 times as much as plain torch does.

- **works**: so it does, and nothing is logged.
- **otherwise**: the values are right, but not by the fast way; what is logged is below the table.
- **refused**: an error says what to do instead; it is below the table, too.
- **–**: the two have nothing to do with each other.
"""

PROCESSES = """
## Forked processes

A forked child has none of its parent's threads. Where the parent has run ops on several threads, an op that needs them
waits forever in the child, in plain torch and in a program of `st.bucketed` alike. A child of a process that has used
a GPU cannot use it, and on a machine with a GPU no child of a process that has run a backward can run one. So spawn a
process that computes (`multiprocessing.get_context("spawn")`), or call `torch.set_num_threads(1)` before the fork.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for group in dict.fromkeys(row.group for row in ROWS.values()):
        parts.append(_section(group, [row for row in ROWS.values() if row.group == group]))
    return "\n".join(parts) + PROCESSES


def _section(group: str, rows: list[Row]) -> str:
    lines = [f"## {group[0].upper()}{group[1:]}", ""]
    lines += ["| | " + " | ".join(column.value for column in Column) + " |", "|---" * (len(Column) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row.name} | " + " | ".join(_word(row.cells[column].expected) for column in Column) + " |")
    notes = _notes(rows)
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def _word(expected: Expected) -> str:
    words = {Works: "works", Slower: "otherwise", Refused: "refused", Meaningless: "–"}
    return words[type(expected)]


def _notes(rows: list[Row]) -> list[str]:
    """Return a line for each thing that is refused, or works otherwise, with the cells where it is."""
    notes: dict[str, list[str]] = {}
    for column in Column:
        for row in rows:
            match row.cells[column].expected:
                case Refused(error, words, instead):
                    note = f'`{error.__name__}`, "{words}"; {instead}'
                case Slower(logged):
                    note = f'logged: "{logged}"'
                case _:
                    continue
            notes.setdefault(f"{column.value}|{note}", []).append(row.name)
    return [
        f"- **{column}**, {', '.join(names)}: {note}."
        for (column, _, note), names in ((key.partition("|"), names) for key, names in notes.items())
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
