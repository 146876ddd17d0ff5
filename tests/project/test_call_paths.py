"""A second call passes few files, and those that the page on the design lists: on a CPU but for those named here."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import subtensors as st

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MAX_FILES = 14

FOLDERS = {"s": "subtensors", "d": "dispatch", "k": "kernels"}
"""What the initials in the page's table stand for."""


def padded_median() -> Callable[[], object]:
    x = st.pad(torch.randn(5, 3, device=DEVICE), {0: st.Dim("n", max=64)})
    return lambda: x.median(0)


def optimizer_step() -> Callable[[], object]:
    params = [nn.Parameter(torch.randn(4, 4, device=DEVICE)) for _ in range(10)]
    for p in params:
        p.grad = torch.ones_like(p)
    return st.optim.AdamW(params).step


def chunked_loss() -> Callable[[], object]:
    hidden = torch.randn(64, 16, requires_grad=True, device=DEVICE)
    weight = torch.randn(100, 16, requires_grad=True, device=DEVICE)
    target = torch.randint(100, (64,), device=DEVICE)
    return lambda: F.cross_entropy(F.linear(st.chunk(hidden), weight), target).backward()  # type: ignore[no-untyped-call]


def bucketed_call() -> Callable[[], object]:
    run = st.bucketed(nn.Linear(8, 8).to(DEVICE).requires_grad_(False), {0: {0: st.Dim("n", max=64)}})
    x = torch.randn(5, 8, device=DEVICE)
    return lambda: run(x)


STORIES = {
    "`x.median(0)`, padded": padded_median,
    "`opt.step()`": optimizer_step,
    "chunked loss and its backward": chunked_loss,
    "`run(x)`, bucketed": bucketed_call,
}

OTHERWISE_ON_A_CPU: dict[str, set[str]] = {
    "`x.median(0)`, padded": set(),
    "`opt.step()`": {
        # torch code in place of a kernel
        "dispatch/fused/executors.py",
        "dispatch/fused/torch_executor.py",
        "dispatch/torch_internals/memory.py",
        "dispatch/fused/triton_executor.py",
        "kernels/runtime/launcher.py",
        "kernels/fused/launch.py",
    },
    "chunked loss and its backward": {
        # sums of rows in torch code, no launch, and no question for exponentials
        "kernels/cross_entropy/exp_passes.py",
        "kernels/cross_entropy/row_sums.py",
        "kernels/runtime/launcher.py",
    },
    "`run(x)`, bucketed": {"dispatch/graphs/pool.py"},
}
"""The files by which a call on a CPU, of a graph that is pretended, differs from the page's."""


def files_of_second_call(call: Callable[[], object]) -> list[str]:
    """The library's files in which a further call runs Python, in order."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        # Through the links of the package, too: a file has one name.
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if event == "call" and path.suffix == ".py" and path.is_relative_to(ROOT):
            parts = path.relative_to(ROOT).parts
            if parts[0] in FOLDERS.values():
                found["/".join(parts)] = None

    for _ in range(3):
        call()
    gc.disable()  # or what it finalizes may pass files, too
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return list(found)


def listed() -> dict[str, list[str]]:
    """The files of each story, as the page lists them."""
    page = (ROOT / "docs" / "design.md").read_text()
    table = page[page.index("## What a second call passes") :].split("\n\n")[2].splitlines()
    titles, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table)
    files: dict[str, list[str]] = {title: [] for title in titles}
    for row in rows:
        for title, cell in zip(titles, row, strict=True):
            if found := re.fullmatch(r"`([sdk])/([\w/]+)`", cell):
                files[title].append(f"{FOLDERS[found[1]]}/{found[2]}.py")
    return files


def test_the_page_lists_at_most_a_dozen_files_a_call_and_all_exist() -> None:
    assert [*listed()] == [*STORIES]
    for title, files in listed().items():
        assert 6 < len(files) <= MAX_FILES, title
        assert [path for path in files if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("title", STORIES)
def test_a_second_call_passes_the_files_that_the_page_lists(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA and "bucketed" in title:
        from pretend_graphs import pretend

        pretend(monkeypatch)
    with torch.no_grad() if "bucketed" in title else torch.enable_grad():
        passed = files_of_second_call(STORIES[title]())
    assert 6 < len(passed) <= MAX_FILES
    assert {*passed} ^ {*listed()[title]} == (set() if CUDA else OTHERWISE_ON_A_CPU[title])
