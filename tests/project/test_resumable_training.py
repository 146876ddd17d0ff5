"""Killed at any moment and started again, a training run ends bit by bit where it would have ended."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable_training import ACCUMULATE, Training, save, train


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Return the places at which two checkpoints differ, in any bit."""
    if type(a) is not type(b):
        return [at]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a.cpu().view(-1), b.cpu().view(-1)) else [at]
    if isinstance(a, dict):
        keys = [] if a.keys() == b.keys() else [at]
        return keys + [found for key in a.keys() & b.keys() for found in differences(a[key], b[key], f"{at}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [at]
        return [found for i, pair in enumerate(zip(a, b, strict=True)) for found in differences(*pair, f"{at}/{i}")]
    return [] if a == b else [at]


class Killed:
    """Starts a training run, kills it at a random point, and again.

    Args:
        path: of its checkpoint.
        start: starts a process.
    """

    def __init__(self, path: Path, start: Callable[[], Process]) -> None:
        self.path, self.start = path, start
        self._random = random.Random(7)

    def times(self, kills: int) -> int:
        """Kill so many processes, each after a few checkpoints or none; return how many had not ended before."""
        return sum(self._killed(self._random.randrange(4), self._random.uniform(0, 0.02)) for _ in range(kills))

    def _killed(self, checkpoints: int, later: float) -> bool:
        process = self.start()
        seen = self._written()
        while process.is_alive() and checkpoints:
            if (now := self._written()) != seen:
                seen, checkpoints = now, checkpoints - 1
        time.sleep(later)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0

    def _written(self) -> int:
        return self.path.stat().st_mtime_ns if self.path.exists() else 0


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_random_points_it_ends_as_if_it_had_not_been(tmp_path: Path, kills: int, captured: bool) -> None:
    steps, path = 10 * kills, tmp_path / "killed.pt"
    expected = train(tmp_path / "whole.pt", steps, "cpu", captured)

    # A fork of this process, which has loaded everything; CUDA does not survive a fork.
    def start() -> Process:
        context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
        process: Process = context.Process(target=train, args=(path, steps, "cpu", captured))
        process.start()
        return process

    assert Killed(path, start).times(kills) == kills
    assert len(torch.load(path)["losses"]) > 0
    assert differences(train(path, steps, "cpu", captured), expected) == []


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_killed_on_a_gpu_it_ends_as_if_it_had_not_been(tmp_path: Path, captured: bool) -> None:
    steps, spawned = 200, multiprocessing.get_context("spawn")

    def start(path: Path) -> Process:
        process: Process = spawned.Process(target=train, args=(path, steps, "cuda", captured))
        process.start()
        return process

    start(tmp_path / "whole.pt").join()
    path = tmp_path / "killed.pt"
    assert Killed(path, lambda: start(path)).times(6) == 6
    start(path).join()
    whole, killed = (torch.load(tmp_path / name, map_location="cpu") for name in ("whole.pt", "killed.pt"))
    assert len(killed["losses"]) == steps
    assert differences(killed, whole) == []


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "model"])
def test_a_part_that_was_not_saved_is_noticed(tmp_path: Path, part: str) -> None:
    expected = train(tmp_path / "whole.pt", 6)
    state = train(tmp_path / "short.pt", 3)
    fresh = Training("cpu", captured=False).state_dict()
    save({**state, part: fresh[part]}, tmp_path / "short.pt")
    assert differences(train(tmp_path / "short.pt", 6), expected) != []


def test_a_write_that_is_cut_off_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    save({"step": 1}, path)

    def cut_off(state: object, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        save({"step": 2}, path)
    assert torch.load(path) == {"step": 1}


def test_one_update_is_made_of_several_batches(tmp_path: Path) -> None:
    state = train(tmp_path / "some.pt", 3)
    assert ACCUMULATE > 1
    assert {int(entries["step"]) for entries in state["optimizer"]["state"].values()} == {3}
