"""Tile sizes by measurement: the choice, and the conditions that it depends on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from kernels_on_cpu import kernels_on_cpu
from tuned import (
    CPU,
    FASTEST,
    FakeGPU,
    aten,
    pair,
    program,
)

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused import tuning
from subtensors.kernels.fused.launch import Tiling
from subtensors.kernels.fused.program import Instruction, Parameter, Program, Ref, Scalar, Shape
from subtensors.kernels.fused.tuning import CANDIDATES, tune, tuned_tiling


def test_every_candidate_is_measured_and_the_fastest_is_chosen(gpu: FakeGPU) -> None:
    assert tune(program(), CPU) == FASTEST
    assert set(gpu.measured) == set(CANDIDATES)


def test_one_slow_timing_does_not_decide(gpu: FakeGPU) -> None:
    gpu.times[FASTEST] = [5.0, 5.0, 900.0]
    assert tune(program(), CPU) == FASTEST


def test_one_fast_timing_does_not_decide(gpu: FakeGPU) -> None:
    gpu.times[Tiling(256, 2)] = [10.0, 0.1, 10.0]
    assert tune(program(), CPU) == FASTEST


def test_only_the_given_candidates_are_measured(gpu: FakeGPU) -> None:
    few = [Tiling(64, 1), Tiling(128, 1)]
    assert tune(program(), CPU, few) == few[0]
    assert set(gpu.measured) == set(few)


def test_the_candidates_take_turns(gpu: FakeGPU) -> None:
    tune(program(), CPU)
    assert gpu.measured == [*CANDIDATES] * tuning.ROUNDS


def test_scratch_memory_holds_every_kind_of_argument(gpu: FakeGPU) -> None:
    def function(p: Any, step: Any, flag: Any, count: Any, rate: Any, power: Any, lr: float, n: int) -> Any:
        step.add_(n)
        p.sub_(torch.where(flag, p * lr, p * rate) / (count + power + step))
        return p.norm(), p * 2

    ones = torch.ones(3, 5)
    columns = [
        pair(),
        TensorColumn([torch.zeros(()), torch.zeros(())]),
        TensorColumn([torch.ones(4).bool(), ones.bool()]),
    ]
    columns += [TensorColumn([torch.ones(4, dtype=torch.int32), ones.int()])]
    with kernels_on_cpu():
        (chosen,) = FusedFunction(function).tune(*columns, torch.tensor(0.5), torch.tensor(2), 0.1, 1).values()
    assert chosen == FASTEST


def test_scratch_memory_stands_in_for_numbers_on_the_host(gpu: FakeGPU) -> None:
    steps = (
        Instruction(aten.mul.Tensor, (Ref(0), Ref(1)), torch.float32, torch.float32, Shape.PER_ELEMENT),
        Instruction(aten.mul.Tensor, (Ref(2), Scalar(0, int)), torch.float32, torch.float32, Shape.PER_ELEMENT),
    )
    parameters = (
        Parameter("x0", torch.float32, Shape.PER_ELEMENT),
        Parameter("x1", torch.float32, Shape.PER_TENSOR, on_host=True),
    )
    assert tune(Program("f", parameters, steps, scalars=(int,), stores={0: 3}), CPU) == FASTEST


def test_tuning_draws_none_of_the_users_random_numbers(gpu: FakeGPU) -> None:
    before = torch.get_rng_state()
    tune(program(), CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_gpu_the_default_stays_and_the_log_says_so(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    with caplog.at_level(logging.INFO, "subtensors.tuning"):
        assert tune(program(), CPU) == Tiling()
    assert "cpu is no CUDA device" in caplog.text
    assert not folder.exists()


def test_without_enough_memory_the_earlier_choice_stays(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(program(), CPU)

    def fail(*args: Any) -> dict[Tiling, float]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tuning, "measure", fail)
    assert tune(program(), CPU) == FASTEST
    assert tune(program(aten.add.Tensor), CPU) == Tiling()


def test_the_outcome_is_one_line_in_the_log(gpu: FakeGPU, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "subtensors.tuning"):
        tune(program(), CPU)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "1024/8 5.000 ms" in record.getMessage()


@pytest.mark.parametrize(
    "other",
    [program(dtype=torch.bfloat16), program(aten.add.Tensor), program(literal=3.0)],
    ids=["dtype", "op", "literal"],
)
def test_a_choice_is_for_one_program(gpu: FakeGPU, other: Program) -> None:
    tune(program(), CPU)
    assert tuned_tiling(program(), CPU) == FASTEST
    assert tuned_tiling(other, CPU) == Tiling()


def test_a_choice_does_not_depend_on_the_name_of_the_function(gpu: FakeGPU) -> None:
    tune(program(), CPU)
    assert tuned_tiling(replace(program(), name="g"), CPU) == FASTEST


def test_a_choice_is_for_one_kind_of_device(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(program(), CPU)
    monkeypatch.setattr(tuning, "device_kind", lambda device: "another GPU (9.0)")
    assert tuned_tiling(program(), CPU) == Tiling()


def test_a_choice_is_for_one_compiler(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(program(), CPU)
    monkeypatch.setattr(triton, "__version__", "0.0")
    assert tuned_tiling(program(), CPU) == Tiling()
