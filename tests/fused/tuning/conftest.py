"""Fixtures of the tuning tests: an empty cache, and a GPU whose clock a test sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tuned import FASTEST, FakeGPU, another_process

from subtensors.kernels.fused import tuning


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The empty folder of the choices; the process has none either."""
    monkeypatch.setenv("SUBTENSORS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBTENSORS_TUNE", raising=False)
    another_process(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """A GPU on which `FASTEST` is the best choice."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles where there is a GPU")
    fake = FakeGPU()
    fake.times[FASTEST] = [5.0]
    monkeypatch.setattr(tuning, "_is_gpu", lambda device: True)
    monkeypatch.setattr(tuning, "_why_not_measurable", lambda program, device: "")
    monkeypatch.setattr(tuning, "device_kind", lambda device: "a GPU (9.0)")
    monkeypatch.setattr(tuning, "_budget", lambda device: 2000)
    monkeypatch.setattr(tuning, "seconds", fake.seconds)
    return fake
