"""The pages: their examples run, their links lead somewhere, and they become HTML."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_examples import run_examples

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture
def levels() -> Iterator[None]:
    """What an example has loggers say is for that page."""
    kept = [(x, x.level) for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    yield
    for logger, level in kept:
        logger.setLevel(level)


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path) -> None:
    run_examples(page)


def test_the_readme_fits_on_two_screens_and_its_four_examples_are_run() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert text.count("```python\n>>> ") == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:subtensors|dispatch|kernels|tests|docs)/[\w/.-]+\.\w+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_of_docs_is_listed_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([^)#:]+)\)", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert pages <= listed


def test_pages_become_html_with_tables_and_links_between_them(tmp_path: Path) -> None:
    pytest.importorskip("markdown_it")
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))["build"]
    written = build(ROOT / "docs", tmp_path)
    assert {path.stem for path in written} >= {"index", "design", "benchmarks"}
    index = (tmp_path / "index.html").read_text()
    assert "<table>" in index
    assert 'href="design.html"' in index
    assert ".md" not in re.sub(r"<code>.*?</code>", "", index)
