"""Imports run one way: between the three packages, and between the rooms of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = ("subtensors.kernels", "subtensors.dispatch", "subtensors")
"""Each may import from those before it."""

SHARED = {
    "subtensors.dispatch": "torch_internals ops sizes graphs tracing".split(),
    "subtensors.kernels": "runtime memory".split(),
}
"""Folders that the others of a package build on; each may import from those before it."""

REST = "..."
"""Stands for what isn't named."""

ROOMS = {
    "subtensors.optim": f"{REST} updates __init__".split(),
    "subtensors.bucketed": (
        "reachable_state state_guard program_state side_effects call_key call_spec dim_spec outputs "
        f"statistics bucket trained_bucket compiled compiled_gradients graph_cache autograd_nodes {REST}"
    ).split(),
}
"""Of a package its rooms and files, each of which may import from those before it."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, by its import name."""
    for package in LAYERS:
        folder = ROOT.joinpath(*package.split("."))
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)), ast.parse(path.read_text())


MODULES = dict(modules())


def imported(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it runs, by full names: what is there for annotations alone is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        else:
            yield from imported(node)


def rank(name: str, of: Sequence[str]) -> int:
    """Which of some packages a module is in: the one that is named most exactly, or what stands for the rest."""
    found = [i for i, package in enumerate(of) if name == package or name.startswith(package + ".")]
    rest = next((i for i, package in enumerate(of) if package.endswith(REST)), len(of))
    return max(found, key=lambda i: len(of[i]), default=rest)


def upward(package: str, layers: Sequence[str]) -> list[str]:
    """Imports within a package from a layer above that of the module."""
    return [
        f"{name} imports {other}"
        for name, tree in MODULES.items()
        for other in imported(tree)
        if f"{name}.".startswith(f"{package}.") and f"{other}.".startswith(f"{package}.")
        if rank(other, layers) > rank(name, layers)
    ]


def test_kernels_know_nothing_of_dispatch_nor_dispatch_of_types() -> None:
    assert upward("subtensors", LAYERS) == []


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_none_of_those_after_it(package: str) -> None:
    assert upward(package, [f"{package}.{room}" for room in ROOMS[package]]) == []


@pytest.mark.parametrize("top", ["subtensors.dispatch", "subtensors.kernels"])
def test_a_folder_imports_the_shared_folders_before_it_and_no_folder_of_another_type(top: str) -> None:
    shared = [f"{top}.{folder}" for folder in SHARED[top]]
    folders = {".".join(name.split(".")[:3]) for name in MODULES if name.startswith(top) and name.count(".") > 2}
    assert len(folders) > len(shared) + 3
    layers = [*shared, *sorted(folders - {*shared})]
    between = [
        f"{name} imports {other}"
        for name, tree in MODULES.items()
        for other in imported(tree)
        if name.startswith(f"{top}.") and rank(other, layers) < len(layers)
        if rank(other, layers) != rank(name, layers)
        if not rank(other, layers) < min(rank(name, layers), len(shared))
    ]
    assert between == []


@pytest.mark.parametrize("top", ["subtensors.dispatch", "subtensors.kernels"])
def test_every_file_is_in_a_folder(top: str) -> None:
    assert [name for name in MODULES if re.fullmatch(rf"{top}\.\w+", name) and not name.endswith("__init__")] == []


def test_no_modules_import_each_other_not_even_for_annotations_or_inside_functions() -> None:
    known = {name.removesuffix(".__init__"): tree for name, tree in MODULES.items()}
    imports: dict[str, set[str]] = {}
    for name, tree in known.items():
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        named = list(imported(ast.Module([*froms], [])))
        whole = {full if full in known else full.rpartition(".")[0] for full in named}
        # What a package's own `__init__` exports is imported by name from the module that defines it.
        imports[name] = {x for x in whole if x in known and x != name and not name.startswith(f"{x}.")}
    TopologicalSorter(imports).prepare()  # raises a CycleError that names them


def test_an_import_upwards_would_be_seen() -> None:
    assert upward("subtensors", LAYERS[::-1]) != []
