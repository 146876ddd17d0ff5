"""Parts of the tuning tests: a clock that a test sets, small programs and lists, another process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused import tuning
from subtensors.kernels.fused.launch import Tiling
from subtensors.kernels.fused.program import Instruction, Parameter, Program, Ref, Shape

aten = torch.ops.aten

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

FASTEST = Tiling(1024, 8)


def program(op: Any = aten.mul.Tensor, dtype: torch.dtype = torch.float32, literal: float = 2.0) -> Program:
    """Writes `op(x, literal)` to `x`."""
    step = Instruction(op, (Ref(0), literal), dtype, dtype, Shape.PER_ELEMENT)
    return Program("f", (Parameter("x0", dtype, Shape.PER_ELEMENT),), (step,), stores={0: 1})


class FakeGPU:
    """The CPU in the role of a GPU whose clock a test sets."""

    def __init__(self) -> None:
        self.times: dict[Tiling, list[float]] = {}
        """The times that each tiling takes in turn, in milliseconds; 10 by default."""
        self.measured: list[Tiling] = []

    def seconds(self, launch: Any) -> float:
        tiling = launch.args[0].kernels.tiling
        self.measured.append(tiling)
        times = self.times.get(tiling, [10.0])
        return times[(self.measured.count(tiling) - 1) % len(times)] / 1e3


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the choices of this process."""
    monkeypatch.setattr(tuning, "_chosen", {})
    tuning._warn_once.cache_clear()


def tilings(fusion: FusedFunction) -> list[Tiling]:
    """The tilings of a function's kernels."""
    return [kernels.tiling for kernels in fusion._kernels.values()]


def halve(p: Any) -> None:
    p.mul_(0.5)


def pair(device: str = "cpu") -> TensorColumn:
    return TensorColumn([torch.arange(4.0, device=device), torch.ones(3, 5, device=device)])
