"""What tests on a GPU that is not the current one share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from subtensors.kernels.runtime.triton_compat import triton

NEEDS_TWO = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most"),
]

HERE, THERE = "cuda:0", "cuda:1"


def assert_alike(actual: Any, expected: Any) -> None:
    """Are these tensors near those, and where those are?"""
    assert [t.device for t in actual] == [t.device for t in expected]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), e.detach())


def assert_near(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """The same but for the roundings of float32 in sums that are added in another order."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@contextmanager
def launches() -> Iterator[list[int]]:
    """Which device is the current one at each launch of Triton's, which launches there.

    Where devices have been let read each other's memory, as by a copy from one to the other, a kernel on the wrong one
    may well give the right values.
    """
    devices: list[int] = []

    def note(_: object) -> None:
        devices.append(torch.cuda.current_device())

    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        yield devices
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)


def only_there(launched: list[int]) -> bool:
    """Were kernels launched there, and nowhere else, and is the current device what it was?"""
    return set(launched) == {torch.device(THERE).index} and torch.cuda.current_device() == 0
