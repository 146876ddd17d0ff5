"""Choices of tile sizes on disk, and files that are not choices."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tuned import (
    CPU,
    FASTEST,
    FakeGPU,
    another_process,
    aten,
    program,
)

from subtensors.kernels.fused import tuning
from subtensors.kernels.fused.launch import Tiling
from subtensors.kernels.fused.tuning import CANDIDATES, tune, tuned_tiling


def test_another_process_reads_the_choice(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(program(), CPU)
    another_process(monkeypatch)
    assert tuned_tiling(program(), CPU) == FASTEST


def test_a_row_says_what_was_measured_where_and_when(gpu: FakeGPU, folder: Path) -> None:
    tune(program(), CPU)
    (path,) = folder.iterdir()
    row = json.loads(path.read_text())
    assert (row["block"], row["warps"]) == (FASTEST.block, FASTEST.warps)
    assert {(c["block"], c["warps"]) for c in row["candidates"]} == {(t.block, t.warps) for t in CANDIDATES}
    assert {"block": 1024, "warps": 8, "seconds": 0.005} in row["candidates"]
    assert row["device"] == "a GPU (9.0)"
    assert (row["torch"], row["triton"]) == (torch.__version__, triton.__version__)
    assert row["date"].startswith("20")
    assert "aten.mul.Tensor" in row["program"]


NO_CHOICES = ["", "{", "[]", "7", "{}", "\udcff", '{"block": 512}', '{"block": 300, "warps": 2}']
NO_CHOICES += ['{"block": "512", "warps": 2}', '{"block": 512, "warps": 0}', '{"block": 512, "warps": true}']
NO_CHOICES += ['{"block": 1048576, "warps": 2}']


@pytest.mark.parametrize("text", NO_CHOICES, ids=range(len(NO_CHOICES)))
def test_a_file_that_is_no_choice_is_ignored_and_reported_once(
    gpu: FakeGPU, folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = folder / f"tiling-{tuning.tuning_key(program(), CPU)}.json"
    folder.mkdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert [tuned_tiling(program(), CPU) for _ in range(2)] == [Tiling()] * 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_a_measurement_mends_a_file_that_is_no_choice(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    tune(program(), CPU)
    (path,) = folder.iterdir()
    path.write_text("{")
    tune(program(), CPU)
    another_process(monkeypatch)
    assert tuned_tiling(program(), CPU) == FASTEST


def test_where_nothing_can_be_written_the_choice_lasts_as_long_as_the_process(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A file in the place of the folder stops even root.
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUBTENSORS_CACHE_DIR", str(tmp_path / "file"))
    assert tune(program(), CPU) == FASTEST
    assert tune(program(aten.add.Tensor), CPU) == FASTEST
    assert tuned_tiling(program(), CPU) == FASTEST
    (record,) = caplog.records
    assert "not kept" in record.getMessage()
    another_process(monkeypatch)
    assert tuned_tiling(program(), CPU) == Tiling()


def test_a_write_that_fails_leaves_nothing_behind(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning.os, "replace", fail)
    assert tune(program(), CPU) == FASTEST
    assert list(folder.iterdir()) == []


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuning.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SUBTENSORS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning.cache_folder() == tmp_path / "xdg" / "subtensors"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert tuning.cache_folder() == tmp_path / ".cache" / "subtensors"


def test_a_user_without_a_home_has_no_cache(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SUBTENSORS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tuning.Path, "home", fail)
    assert tuned_tiling(program(), CPU) == Tiling()
    assert tune(program(), CPU) == FASTEST


def write_often(folder: Path, block: int) -> None:
    gc.disable()  # the parent's garbage may hold CUDA tensors, and a forked process that frees one aborts
    for _ in range(100):
        # Rows of different lengths, so that a torn one does not parse.
        tuning.write_choice(folder / "tiling-shared.json", {"block": block, "warps": 2, "program": "x" * block})
    tuning.write_choice(folder / f"tiling-{block}.json", {"block": block, "warps": 2})


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork, since Python 3.12
def test_processes_that_write_at_once_neither_mix_nor_lose_choices(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forked = multiprocessing.get_context("fork")
    writers = [forked.Process(target=write_often, args=(folder, block)) for block in (256, 16384)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(tuning.read_choice(folder / "tiling-shared.json"))
        time.sleep(0.001)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {None, Tiling(256, 2), Tiling(16384, 2)}
    assert not caplog.records
    assert sorted(path.name for path in folder.iterdir()) == [f"tiling-{n}.json" for n in ("16384", "256", "shared")]
    assert [tuning.read_choice(folder / f"tiling-{block}.json") for block in (256, 16384)] == [
        Tiling(256, 2),
        Tiling(16384, 2),
    ]
