"""The pages: their examples run, their links lead somewhere, and they become a site."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from textwrap import dedent
from urllib.parse import unquote

import pytest
import torch
from page_examples import run_examples

import subtensors as st

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture
def levels() -> Iterator[None]:
    """What an example has loggers say is for that page."""
    kept = [(x, x.level) for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    yield
    for logger, level in kept:
        logger.setLevel(level)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back the variables of the process and accelerate's state that the trainers of a page have set.

    A trainer sees one GPU at most: for each further one it would make a copy of its model.
    """
    gpus = torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: min(1, gpus))
    kept = {**os.environ}
    yield
    os.environ.clear()
    os.environ.update(kept)
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("levels", "trainers")
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


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_to_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]*\.md|)#([^)]*)\)", page.read_text())
    missing = [(at, name) for at, name in targets if name not in anchors(page.parent / at if at else page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_of_a_page_is_an_example_that_runs(page: Path) -> None:
    assert [x for x in python_blocks(page) if not x.startswith(">>> ") and not x.startswith("# docs/examples/")] == []


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```(?:python|py|pycon)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_excerpt_of_a_page_is_in_its_file_which_the_tests_run(page: Path) -> None:
    for block in python_blocks(page):
        if not block.startswith("# docs/examples/"):
            continue
        name, _, text = block.removeprefix("# ").partition("\n")
        lines = (ROOT / name).read_text().splitlines()
        for part in re.split(r"^ *# \.\.\.\n", text, flags=re.MULTILINE):
            shown = dedent(part).strip("\n")
            size = len(shown.splitlines())
            found = [dedent("\n".join(lines[i : i + size])) for i in range(len(lines) - size + 1)]
            assert shown in found, part


def test_no_page_shows_code_as_text() -> None:
    blocks = {
        page.name: re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES
    }
    assert {
        name: x for name, found in blocks.items() for x in found if re.search(r"^\w+ = |^import ", x, re.MULTILINE)
    } == {}


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- .*: ([\w/-]+\.md)$", (SITE / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("api.md", "api-optim.md"))
    documented = {name.rsplit(".", 1)[1] for name in re.findall(r"^::: (subtensors\.\S+)$", text, re.MULTILINE)}
    returned = {"AcceptedSizes", "Applied", "Bucketed", "Capture", "Statistics"}
    integrations = {"apply", "apply_to_trainer", "callback"}
    names = {*st.__all__, *st.optim.__all__} - {"optim", "integrations", "__version__"}
    assert names | returned | integrations == documented


class Links(HTMLParser):
    """The links and the anchors of a page of HTML."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_no_link_of_it_is_dead(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python")
    pytest.importorskip("material")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [*build, "--config-file", str(SITE / "mkdocs.yml")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    pages = {path: Links(path) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    assert len(pages) == len(list((ROOT / "docs").rglob("*.md")))
    dead = []
    for page, found in pages.items():
        for link in found.links:
            at, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", at):
                continue
            target = (page.parent / at).resolve() if at else page
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append((page.name, link))
    assert dead == []
    assert sum(len(found.links) for found in pages.values()) > 1000
    api = (tmp_path / "api.html").read_text()
    assert "A tensor padded to bucket sizes" in api
    assert "doc-section-item" in api or "doc-md-description" in api


def test_the_first_page_shows_the_jobs_of_the_readme() -> None:
    begin, end = "On an NVIDIA H200, each way", "weights random."
    readme, index = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    assert index.partition(begin)[2].partition(end)[0] == readme.partition(begin)[2].partition(end)[0].replace(
        "docs/", ""
    )
