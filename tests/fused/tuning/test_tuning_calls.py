"""Fused calls with tile sizes chosen by measurement, with fake times and on a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from tuned import (
    CPU,
    FASTEST,
    GPU,
    FakeGPU,
    another_process,
    aten,
    halve,
    pair,
    program,
    tilings,
)

import subtensors as st
from subtensors.dispatch.fused import fused_function as fusion_module
from subtensors.dispatch.fused.backend_selection import execution_key
from subtensors.dispatch.fused.bound_call import FusedCall
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.kernels.fused.launch import KernelSet, Tiling
from subtensors.kernels.fused.program import Program
from subtensors.kernels.fused.tuning import CANDIDATES, tune, tuned_tiling


def test_calls_after_a_tune_use_the_choice(gpu: FakeGPU) -> None:
    decay, tensors = FusedFunction(halve), pair()
    with kernels_on_cpu():
        decay(tensors)
        assert tilings(decay) == [Tiling()]
        ((label, chosen),) = decay.tune(tensors).items()
        decay(tensors)
    assert chosen == FASTEST
    assert label.startswith("cpu: halve(v0: float32)")
    assert tilings(decay) == [FASTEST]
    assert decay.traces == 1
    assert torch.equal(tensors[1], torch.full((3, 5), 0.25))


def test_plans_are_kept_when_the_choice_is_what_they_use(gpu: FakeGPU) -> None:
    decay, tensors = FusedFunction(halve), pair()
    gpu.times[Tiling()] = [1.0]
    with kernels_on_cpu():
        decay(tensors)
        before = list(decay._kernels.values())
        decay.tune(tensors)
    assert [a is b for a, b in zip(before, decay._kernels.values(), strict=True)] == [True]


def test_plans_of_other_programs_are_kept(gpu: FakeGPU) -> None:
    decay = FusedFunction(halve)
    whole, half = pair(), TensorColumn([torch.ones(3).half()])
    with kernels_on_cpu():
        decay(whole)
        decay(half)
        decay.tune(half)
        decay(whole)
        decay(half)
    assert tilings(decay) == [Tiling(), FASTEST]


def test_a_list_of_several_dtypes_has_a_choice_for_each(gpu: FakeGPU) -> None:
    decay = FusedFunction(halve)
    with kernels_on_cpu():
        chosen = decay.tune(TensorColumn([torch.ones(3), torch.ones(3).half(), torch.ones(5)]))
    assert len(chosen) == 2
    assert set(chosen.values()) == {FASTEST}


def test_tuning_leaves_the_tensors_as_they_are(gpu: FakeGPU) -> None:
    tensors = pair()
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    with kernels_on_cpu():
        FusedFunction(halve).tune(tensors)
    assert all(map(torch.equal, tensors, before))
    assert [t._version for t in tensors] == versions


def test_nothing_is_measured_unless_asked_for(gpu: FakeGPU) -> None:
    decay = FusedFunction(halve)
    with kernels_on_cpu():
        decay(pair())
    assert tilings(decay) == [Tiling()]
    assert gpu.measured == []


def test_the_environment_can_ask_for_it_at_the_first_call(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBTENSORS_TUNE", "1")
    tensors = pair()
    with kernels_on_cpu():
        first = FusedFunction(halve)
        first(tensors)
        count = len(gpu.measured)
        first(tensors)
        another_process(monkeypatch)
        second = FusedFunction(halve)
        second(tensors)
    assert tilings(first) == tilings(second) == [FASTEST]
    assert len(gpu.measured) == count > 0
    assert torch.equal(tensors[1], torch.full((3, 5), 0.125))


@pytest.mark.parametrize("value", ["0", ""])
def test_the_environment_can_ask_for_nothing(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SUBTENSORS_TUNE", value)
    tune(program(), CPU)
    gpu.measured.clear()
    assert tuned_tiling(program(aten.add.Tensor), CPU) == Tiling()
    assert gpu.measured == []


def test_a_tiling_that_was_given_wins(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBTENSORS_TUNE", "1")
    given = Tiling(64, 2)
    decay = FusedFunction(halve, tiling=given)
    with kernels_on_cpu():
        decay(pair())
        chosen = decay.tune(pair())
    assert set(chosen.values()) == {given}
    assert tilings(decay) == [given]
    assert gpu.measured == []


def test_devices_of_two_kinds_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def record(program: Program, device: torch.device) -> Tiling:
        made.append(device)
        return Tiling()

    monkeypatch.setattr(fusion_module, "tuned_tiling", record)
    monkeypatch.setattr(fusion_module, "TritonExecutor", lambda trace, kernels, *rest: kernels)
    decay, columns = FusedFunction(halve), [pair()]
    call = FusedCall((columns[0],), {})
    key = replace(execution_key([columns[0][0]], columns), triton=True)
    kernels: list[KernelSet] = [
        decay._make_executor(call, replace(key, device=device), columns)  # type: ignore[misc]
        for device in ("meta", "cpu", "meta")
    ]
    assert kernels[0] is kernels[2] is not kernels[1]
    assert made == [torch.device("meta"), torch.device("cpu")]


def test_a_fused_function_takes_the_arguments_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    @st.fused
    def sgd(p: Any, g: Any, *, lr: float) -> None:
        p.sub_(lr * g)

    p = st.TensorList({"w": torch.ones(2, 2), "b": torch.ones(3)})
    with caplog.at_level(logging.INFO):
        chosen = sgd.tune(p, p.like([t.clone() for t in p]), lr=0.5)
    assert list(chosen.values()) == [Tiling()]
    assert "sgd: no tile sizes to choose" in caplog.text
    assert torch.equal(p["b"], torch.ones(3))


def adam(p: Any, g: Any, m: Any, v: Any, *, lr: float, step: int) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(lr * m / (1 - 0.9**step) / (v.sqrt() + 1e-8))


@pytest.mark.gpu
def test_a_measured_choice_is_a_candidate_and_later_processes_use_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    columns = [TensorColumn(torch.rand(n, device="cuda") for n in (5, 4096)) for _ in range(4)]
    before = [[t.clone() for t in column] for column in columns]
    random = torch.cuda.get_rng_state()
    fusion = FusedFunction(adam)
    (chosen,) = fusion.tune(*columns, lr=0.1, step=1).values()
    assert chosen in CANDIDATES
    assert all(torch.equal(t, b) for c, k in zip(columns, before, strict=True) for t, b in zip(c, k, strict=True))
    assert torch.equal(random, torch.cuda.get_rng_state())
    (path,) = folder.iterdir()
    row = json.loads(path.read_text())
    assert all(candidate["seconds"] > 0 for candidate in row["candidates"])
    # A choice other than the default, to test that it is read.
    path.write_text(json.dumps({**row, "block": 2048, "warps": 8}))
    another_process(monkeypatch)
    later = FusedFunction(adam)
    later(*columns, lr=0.1, step=1)
    assert tilings(later) == [Tiling(2048, 8)]


@pytest.mark.gpu
def test_every_kind_of_argument_can_be_measured_on_a_gpu() -> None:
    def function(p: Any, step: Any, flag: Any, count: Any, rate: Any, lr: float, n: int) -> Any:
        step.add_(n)
        p.sub_(torch.where(flag, p * lr, p * rate) / (count + step))
        return p.norm(), p * 2

    make: list[Callable[[], torch.Tensor]] = [
        lambda: torch.ones(7, device="cuda", dtype=torch.bfloat16),
        lambda: torch.zeros((), device="cuda"),
        lambda: torch.ones(7, device="cuda", dtype=torch.bool),
        lambda: torch.ones(7, device="cuda", dtype=torch.int64),
    ]
    columns = [TensorColumn([new(), new()]) for new in make]
    (chosen,) = FusedFunction(function).tune(*columns, torch.tensor(0.5), 0.1, 1).values()
    assert chosen in CANDIDATES


@pytest.mark.gpu
def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    tensors = pair("cuda")
    tune(program(), GPU)
    assert len(list(folder.iterdir())) == 1
    graph = torch.cuda.CUDAGraph()
    monkeypatch.setenv("SUBTENSORS_TUNE", "1")
    with torch.cuda.graph(graph):
        assert tune(program(aten.add.Tensor), GPU) == Tiling()
        tensors[0].add_(1)
    graph.replay()
    assert len(list(folder.iterdir())) == 1
