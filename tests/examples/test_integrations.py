"""The programs that train with other libraries run, where the library is installed."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "integrations"
PROGRAMS: dict[str, tuple[str, tuple[str, ...], list[str], str]] = {
    "TRL: SFT": ("with_trl", ("trl", "datasets"), ["--trainer", "sft"], r"sft: losses \[.*by subtensors.optim"),
    "TRL: DPO": ("with_trl", ("trl", "datasets"), ["--trainer", "dpo"], r"dpo: losses \[.*by subtensors.optim"),
    "TRL: GRPO": ("with_trl", ("trl", "datasets"), ["--trainer", "grpo"], r"grpo: losses \[.*by subtensors.optim"),
    "Lightning": ("with_lightning", ("lightning",), [], r"losses \[5.*, max_norm 1.0"),
    "accelerate": ("with_accelerate", ("accelerate",), [], r"bit by bit the same: yes"),
    "PEFT": ("with_peft", ("peft",), [], r"logits ChunkedTensor, loss 5.* -> [34]\.[\s\S]*: as they were"),
    "torchtitan": ("with_torchtitan", ("torchtitan",), [], r"loss 5.* by subtensors.optim[\s\S]*entries of state"),
}
"""For each program its file, the packages that it needs, its arguments, and what it prints."""


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a library says by variables of the process is for that test; there is no network."""
    kept = {**os.environ}
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    yield
    os.environ.clear()
    os.environ.update(kept)
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_with_another_library(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, packages, arguments, expected = PROGRAMS[name]
    for package in ("transformers", *packages):
        pytest.importorskip(package, reason=f"needs the package {package}", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    devices = min(torch.cuda.device_count(), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)  # TRL refuses several
    runpy.run_path(str(FOLDER / f"{file}.py"), run_name="__main__")
    assert re.search(expected, capfd.readouterr().out)


def test_every_program_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("with_*.py")} == {file for file, *_ in PROGRAMS.values()}
