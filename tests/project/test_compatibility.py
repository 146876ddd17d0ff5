"""The page on versions is what runs of the whole suite wrote, and says what is tested elsewhere, too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import compatibility
import pytest
from compatibility import PAGE, PYTHONS, TORCHES, Row, is_whole, rows_in, with_rows

CI = Path(__file__).parents[2] / ".github" / "workflows" / "ci.yml"
ROW = Row("2.13.0", "3.9.0", "2.4.6", "3.11.7", "CPU", 10, 0, 3, "2026-01-01")
EMPTY = f"# Page\n\n{compatibility.BEGIN}{compatibility.END}"


def test_the_page_is_what_its_rows_make() -> None:
    text = PAGE.read_text()
    assert with_rows(text, rows_in(text)) == text


def test_a_run_replaces_the_row_of_its_versions_and_device() -> None:
    text = with_rows(EMPTY, [ROW, replace(ROW, device="a GPU"), replace(ROW, torch="2.11.0")])
    later = replace(ROW, python="3.11.9", numpy="2.5.0", failed=2, date="2026-02-01")
    rows = rows_in(with_rows(text, [*rows_in(text), later]))
    assert rows == [replace(ROW, torch="2.11.0"), later, replace(ROW, device="a GPU")]


def test_what_was_not_run_is_said_to_be_so() -> None:
    text = with_rows(EMPTY, [ROW, replace(ROW, torch="2.15.0", python="3.14.1", failed=2)])
    lines = text.splitlines()
    assert "| 2.13.0 | passed | not run | not run | not run |" in lines
    assert "| 2.15.0 | not run | not run | not run | 2 failed |" in lines


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small suite; returns the page that its runs write to."""
    page = pytester.path / "page.md"
    page.write_text(EMPTY)
    pytester.makeini("[pytest]\ntestpaths = tests\naddopts = -m 'not slow'\nmarkers =\n  slow\n  gpu")
    tests = pytester.mkdir("tests")
    (tests / "test_one.py").write_text("def test_rows(): pass\ndef test_other(): assert 0\n")
    (tests / "test_two.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_gpu(): pytest.skip()\n")
    monkeypatch.setenv("COMPATIBILITY", "1")
    return page


def test_a_run_over_several_processes_writes_one_row(suite: Path, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"""
        import sys
        from pathlib import Path

        sys.path.insert(0, {str(Path(compatibility.__file__).parent)!r})
        import compatibility

        compatibility.PAGE = Path({str(suite)!r})

        def pytest_terminal_summary(terminalreporter, exitstatus, config):
            compatibility.write_row(config, exitstatus, terminalreporter.stats)
        """
    )
    pytester.runpytest_subprocess("-n", "2")
    assert [(row.passed, row.failed, row.skipped) for row in rows_in(suite.read_text())] == [(1, 1, 1)]


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ([], True),
        (["-m", ""], True),
        (["tests"], False),
        (["-k", "rows"], False),
        (["-m", "gpu"], False),
        (["--ignore", "tests/test_one.py"], False),
        (["-x"], False),
        (["--lf"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_of_a_part_writes_no_row(arguments: list[str], whole: bool, pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig(*arguments)
    assert is_whole(config, pytest.ExitCode.TESTS_FAILED) is whole
    assert not is_whole(config, pytest.ExitCode.INTERRUPTED)


def test_the_same_versions_are_tested_on_every_push() -> None:
    lists = re.findall(r"^ +(?:torch|python): (\[.*\])", CI.read_text(), re.MULTILINE)
    assert [re.findall(r'"([\d.]+)"', line) for line in lists] == [
        list(TORCHES),
        [PYTHONS[0], PYTHONS[-1]],
        list(PYTHONS),
    ]
