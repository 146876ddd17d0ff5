"""Running the examples of a page."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

FENCE = re.compile(r"^```.*$", re.MULTILINE)


def run_examples(page: Path) -> None:
    """Run the examples of a Markdown page as doctests."""
    # A closing fence would read as expected output; blanked, it keeps every line number.
    text = FENCE.sub("", page.read_text())
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    # Compiled functions of a page clean up in its globals when they go, after the examples.
    failed = runner.run(examples, out=report.append, clear_globs=False).failed
    assert failed == 0, "".join(report)
