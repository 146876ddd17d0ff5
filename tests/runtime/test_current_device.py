"""Kernels are launched on the device of their arguments, whichever device is current."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import subtensors.kernels
from subtensors.kernels.runtime import launcher
from subtensors.kernels.runtime.launcher import launching_on, on_stream

BY_THEIR_CALLER = {"launch.py", "prepare_launch"}
"""A file and a function whose callers set the device of their launches: `TritonExecutor` and launchers."""


def test_a_launch_makes_the_device_of_its_memory_current(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def device(which: torch.device) -> Any:
        taken.append(which)
        return nullcontext()

    monkeypatch.setattr(launcher, "_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for place in ("cpu", "cuda:0", "cuda:1"):
        with launching_on(torch.device(place)):
            pass
    assert taken == [torch.device("cuda:1")]


def test_on_stream_sets_the_device_before_the_stream_and_restores_it_after(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        order.append(f"takes {name}")
        yield
        order.append(f"leaves {name}")

    monkeypatch.setattr(torch.cuda, "device", lambda device: noted("the device"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("the stream"))
    stream: Any = SimpleNamespace(device=torch.device("cuda", 1))
    with on_stream(stream):
        order.append("works")
    assert order == ["takes the device", "takes the stream", "works", "leaves the stream", "leaves the device"]


def launches(node: ast.AST, on_a_device: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Find the launches in a source: `kernel[grid](...)`, or a compiled kernel that is called with a stream."""
    if isinstance(node, ast.FunctionDef) and node.name in BY_THEIR_CALLER:
        return
    if isinstance(node, ast.With):
        on_a_device |= any("launching_on" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.Call):
        grid = node.func.slice if isinstance(node.func, ast.Subscript) else None
        is_given_a_grid = isinstance(grid, ast.Tuple) or (isinstance(grid, ast.Name) and grid.id == "grid")
        if is_given_a_grid or any(keyword.arg == "stream" for keyword in node.keywords):
            yield node, on_a_device
    for child in ast.iter_child_nodes(node):
        yield from launches(child, on_a_device)


def test_every_launch_names_its_device() -> None:
    found = [
        (path.name, node.lineno, is_said)
        for path in sorted(Path(*subtensors.kernels.__path__).rglob("*.py"))
        for node, is_said in launches(ast.parse(path.read_text()))
        if path.name not in BY_THEIR_CALLER
    ]
    assert len(found) > 10
    assert [(name, line) for name, line, is_said in found if not is_said] == []
