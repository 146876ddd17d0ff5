"""`python -m subtensors explain script.py`: run a script, then tell what fell back in it, and where."""

from __future__ import annotations

import logging
import runpy
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from subtensors.bucketed.runner import Bucketed
from subtensors.dispatch.fused.errors import is_library
from subtensors.optim import Optimizer
from subtensors.static.arena import Arena

WIDTH = 80
"""Columns of the report, where no word is longer."""


class Notes(logging.Handler):
    """The log's records, each with the line of the program that led to it, and their counts."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counted: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.counted[record.getMessage(), _line_of_program()] += 1


def explain_script(path: str, arguments: Sequence[str] = ()) -> int:
    """Run a script as `python` does; print its fallbacks, and what `st.explain` says of its global objects.

    Args:
        path: of the script.
        arguments: of its command line.

    Returns:
        The exit status of the script, or 2 if there is no such file.
    """
    if not Path(path).is_file():
        print(f"explain runs a script, and there is no file {path}", file=sys.stderr)
        return 2
    notes, logger = Notes(), logging.getLogger("subtensors")
    before = logger.level, sys.argv, list(sys.path)
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    names: Mapping[str, object] = {}
    status, failed = 0, False
    try:
        names = runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:  # the script's own error, which python would show
        traceback.print_exc()
        status, failed = 1, True
    finally:
        logger.removeHandler(notes)
        logger.setLevel(before[0])
        sys.argv, sys.path[:] = before[1:]
        print(report(path, notes.counted, names))
        if failed:
            print("It failed before its end: this is of what ran until then.")
    return status


def report(path: str, notes: Mapping[tuple[str, str], int], names: Mapping[str, object]) -> str:
    """Return the report of a script's run.

    Args:
        path: of the script.
        notes: the count of each log message, with the line of the program.
        names: the script's globals at its end.

    Example:
        >>> print(report("train.py", {("a step runs eagerly: no GPU", "train.py:3"): 2}, {}))
        ---- subtensors on train.py: 1 fallback or note
          train.py:3 (2 times)
            a step runs eagerly: no GPU
    """
    plural = "1 fallback or note" if len(notes) == 1 else f"{len(notes) or 'no'} fallbacks or notes"
    lines = [f"---- subtensors on {path}: {plural}"]
    for (message, line), count in notes.items():
        lines.append(f"  {line}" + (f" ({count} times)" if count > 1 else ""))
        lines.append(_fill(message, "    "))
    for name, value in names.items():
        if isinstance(value, (Bucketed, Optimizer, Arena)):
            lines += [f"---- {name}", *(_fill(line, "  ") for line in value.explain().splitlines())]
    return "\n".join(lines)


def _fill(text: str, indent: str) -> str:
    """Return a text in lines of `WIDTH` columns, below its own indent and another."""
    indent += " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        text.lstrip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _line_of_program() -> str:
    """Return the file and line of the innermost frame that is neither the library's nor torch's."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        # Python calls the command line's own file `__main__`.
        is_ours = path.startswith(("<", str(Path(__file__).parents[1])))
        if not is_ours and not is_library(frame.f_globals.get("__name__")):
            return f"{Path(path).name}:{line}"
    return "in torch"
