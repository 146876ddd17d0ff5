"""What can be counted of the house: files in rooms, one meaning a class name, docstrings that state rather than ask."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("subtensors", "dispatch", "kernels")
FILES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not (package == "subtensors" and path.relative_to(ROOT).parts[1] in PACKAGES)
]
TREES = {path: ast.parse((ROOT / path).read_text()) for path in FILES}

ASKS = re.compile(
    r"(What|Which|Where|Whether|How|Who|Why|When|Is|Are|Has|Have|Had|Does|Do|Did|Can|Could|May|Must|Let|Of|Was"
    r"|Were|Will|Would)\b"
)
"""How a docstring begins that asks, or that fronts a genitive."""

IDIOMS = re.compile(
    r"autograd follows|at a glance|as it stands|what becomes of|that of which|\basleep\b|\bsleepers?\b"
    r"|wants? a gradient|so many, and"
)
"""Words that the field does not use."""

MOST_USES_OF_ANY = 200
"""To be lowered when there are fewer."""


def first_lines() -> dict[str, str]:
    """The first line of each docstring, by where it stands."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        f"{path}:{getattr(node, 'lineno', 1)}": doc.strip().splitlines()[0]
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (doc := ast.get_docstring(node))
    }


def test_the_first_line_of_a_docstring_states_and_does_not_ask() -> None:
    lines = first_lines()
    assert len(lines) > 2000
    assert {at: line for at, line in lines.items() if ASKS.match(line) or line.endswith("?")} == {}


def test_no_file_speaks_in_private_idioms() -> None:
    assert [f"{path}: {found}" for path in FILES for found in IDIOMS.findall((ROOT / path).read_text())] == []


def test_every_file_of_a_lower_layer_is_in_a_folder() -> None:
    assert [
        path for path in FILES if path.parts[0] != "subtensors" and len(path.parts) == 2 and path.stem != "__init__"
    ] == []


def test_every_test_is_in_a_folder() -> None:
    assert list((ROOT / "tests").glob("test_*.py")) == []


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_any_is_used_no_more_than_it_was() -> None:
    assert sum(len(re.findall(r"\bAny\b", (ROOT / path).read_text())) for path in FILES) <= MOST_USES_OF_ANY
