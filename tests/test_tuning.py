"""Tile sizes by measurement: what is chosen, what a choice depends on, and how it is kept."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import subtensors as st
from subtensors.dispatch import fusion as fusion_module
from subtensors.dispatch.calls import Call, kernels_on_cpu
from subtensors.dispatch.columns import Elements
from subtensors.dispatch.fusion import Fusion
from subtensors.kernels import tuning
from subtensors.kernels.launch import Kernels, Tiling
from subtensors.kernels.program import Extent, Instruction, Parameter, Program, Ref, Scalar
from subtensors.kernels.tuning import CANDIDATES, tune, tuned_tiling

aten = torch.ops.aten

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

FASTEST = Tiling(1024, 8)


def program(op: Any = aten.mul.Tensor, dtype: torch.dtype = torch.float32, literal: float = 2.0) -> Program:
    """Writes `op(x, literal)` to `x`."""
    step = Instruction(op, (Ref(0), literal), dtype, dtype, Extent.ELEMENT)
    return Program("f", (Parameter("x0", dtype, Extent.ELEMENT),), (step,), stores={0: 1})


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, on disk and in the process."""
    monkeypatch.setenv("SUBTENSORS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBTENSORS_TUNE", raising=False)
    monkeypatch.setattr(tuning, "_chosen", {})
    tuning._warn_once.cache_clear()
    return tmp_path / "cache"


class FakeGPU:
    """The CPU, taken for a GPU whose clock says what the test wants."""

    def __init__(self) -> None:
        self.times: dict[Tiling, list[float]] = {}
        """The times that each tiling takes in turn, milliseconds; 10 where there is none."""
        self.measured: list[Tiling] = []

    def seconds(self, launch: Any) -> float:
        tiling = launch.args[0].kernels.tiling
        self.measured.append(tiling)
        times = self.times.get(tiling, [10.0])
        return times[(self.measured.count(tiling) - 1) % len(times)] / 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    if torch.cuda.is_available():
        pytest.skip("Triton compiles where there is a GPU")
    fake = FakeGPU()
    fake.times[FASTEST] = [5.0]
    monkeypatch.setattr(tuning, "_is_gpu", lambda device: True)
    monkeypatch.setattr(tuning, "_obstacle", lambda program, device: "")
    monkeypatch.setattr(tuning, "_kind", lambda device: "a GPU (9.0)")
    monkeypatch.setattr(tuning, "_budget", lambda device: 2000)
    monkeypatch.setattr(tuning, "seconds", fake.seconds)
    return fake


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process knows."""
    monkeypatch.setattr(tuning, "_chosen", {})
    tuning._warn_once.cache_clear()


def tilings(fusion: Fusion) -> list[Tiling]:
    """Those of the kernels that this fusion has made."""
    return [kernels.tiling for kernels in fusion._kernels.values()]


def halve(p: Any) -> None:
    p.mul_(0.5)


def pair(device: str = "cpu") -> Elements:
    return Elements([torch.arange(4.0, device=device), torch.ones(3, 5, device=device)])


# --- the choice -----------------------------------------------------------------------------------------------------


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
    def maths(p: Any, step: Any, flag: Any, count: Any, rate: Any, power: Any, lr: float, n: int) -> Any:
        step.add_(n)
        p.sub_(torch.where(flag, p * lr, p * rate) / (count + power + step))
        return p.norm(), p * 2

    ones = torch.ones(3, 5)
    columns = [pair(), Elements([torch.zeros(()), torch.zeros(())]), Elements([torch.ones(4).bool(), ones.bool()])]
    columns += [Elements([torch.ones(4, dtype=torch.int32), ones.int()])]
    with kernels_on_cpu():
        (chosen,) = Fusion(maths).tune(*columns, torch.tensor(0.5), torch.tensor(2), 0.1, 1).values()
    assert chosen == FASTEST


def test_scratch_memory_stands_in_for_numbers_on_the_host(gpu: FakeGPU) -> None:
    steps = (
        Instruction(aten.mul.Tensor, (Ref(0), Ref(1)), torch.float32, torch.float32, Extent.ELEMENT),
        Instruction(aten.mul.Tensor, (Ref(2), Scalar(0, int)), torch.float32, torch.float32, Extent.ELEMENT),
    )
    parameters = (
        Parameter("x0", torch.float32, Extent.ELEMENT),
        Parameter("x1", torch.float32, Extent.TENSOR, on_host=True),
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


# --- what it depends on ---------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(tuning, "_kind", lambda device: "another GPU (9.0)")
    assert tuned_tiling(program(), CPU) == Tiling()


def test_a_choice_is_for_one_compiler(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(program(), CPU)
    monkeypatch.setattr(tuning.triton, "__version__", "0.0")
    assert tuned_tiling(program(), CPU) == Tiling()


# --- the cache on disk ----------------------------------------------------------------------------------------------


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
    assert (row["torch"], row["triton"]) == (torch.__version__, tuning.triton.__version__)
    assert row["date"].startswith("20")
    assert "aten.mul.Tensor" in row["program"]


NO_CHOICES = ["", "{", "[]", "7", "{}", "\udcff", '{"block": 512}', '{"block": 300, "warps": 2}']
NO_CHOICES += ['{"block": "512", "warps": 2}', '{"block": 512, "warps": 0}', '{"block": 512, "warps": true}']
NO_CHOICES += ['{"block": 1048576, "warps": 2}']


@pytest.mark.parametrize("text", NO_CHOICES, ids=range(len(NO_CHOICES)))
def test_a_file_that_is_no_choice_is_ignored_and_reported_once(
    gpu: FakeGPU, folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = folder / f"tiling-{tuning._signature(program(), CPU)}.json"
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
    # A file where the folder should be stops root too.
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


WRITER = """
import sys
from pathlib import Path
from subtensors.kernels import tuning
block = int(sys.argv[2])
for _ in range(100):
    # Rows of different lengths: a torn one would not parse.
    tuning._write(Path(sys.argv[1]) / "tiling-shared.json", {"block": block, "warps": 2, "program": "x" * block})
tuning._write(Path(sys.argv[1]) / f"tiling-{block}.json", {"block": block, "warps": 2})
"""


def test_processes_that_write_at_once_neither_mix_nor_lose_choices(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(block)]) for block in (256, 16384)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(tuning._read(folder / "tiling-shared.json"))
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {None, Tiling(256, 2), Tiling(16384, 2)}
    assert not caplog.records
    assert sorted(path.name for path in folder.iterdir()) == [f"tiling-{n}.json" for n in ("16384", "256", "shared")]
    assert [tuning._read(folder / f"tiling-{block}.json") for block in (256, 16384)] == [
        Tiling(256, 2),
        Tiling(16384, 2),
    ]


# --- fused calls ----------------------------------------------------------------------------------------------------


def test_calls_after_a_tune_use_the_choice(gpu: FakeGPU) -> None:
    decay, tensors = Fusion(halve), pair()
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
    decay, tensors = Fusion(halve), pair()
    gpu.times[Tiling()] = [1.0]
    with kernels_on_cpu():
        decay(tensors)
        before = list(decay._kernels.values())
        decay.tune(tensors)
    assert [a is b for a, b in zip(before, decay._kernels.values(), strict=True)] == [True]


def test_plans_of_other_programs_are_kept(gpu: FakeGPU) -> None:
    decay = Fusion(halve)
    whole, half = pair(), Elements([torch.ones(3).half()])
    with kernels_on_cpu():
        decay(whole)
        decay(half)
        decay.tune(half)
        decay(whole)
        decay(half)
    assert tilings(decay) == [Tiling(), FASTEST]


def test_a_list_of_several_dtypes_has_a_choice_for_each(gpu: FakeGPU) -> None:
    decay = Fusion(halve)
    with kernels_on_cpu():
        chosen = decay.tune(Elements([torch.ones(3), torch.ones(3).half(), torch.ones(5)]))
    assert len(chosen) == 2
    assert set(chosen.values()) == {FASTEST}


def test_tuning_leaves_the_tensors_as_they_are(gpu: FakeGPU) -> None:
    tensors = pair()
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    with kernels_on_cpu():
        Fusion(halve).tune(tensors)
    assert all(map(torch.equal, tensors, before))
    assert [t._version for t in tensors] == versions


def test_nothing_is_measured_unless_asked_for(gpu: FakeGPU) -> None:
    decay = Fusion(halve)
    with kernels_on_cpu():
        decay(pair())
    assert tilings(decay) == [Tiling()]
    assert gpu.measured == []


def test_the_environment_can_ask_for_it_at_the_first_call(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBTENSORS_TUNE", "1")
    tensors = pair()
    with kernels_on_cpu():
        first = Fusion(halve)
        first(tensors)
        count = len(gpu.measured)
        first(tensors)
        another_process(monkeypatch)
        second = Fusion(halve)
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
    decay = Fusion(halve, tiling=given)
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
    monkeypatch.setattr(fusion_module, "KernelGroup", lambda trace, kernels, *rest: kernels)
    decay, columns = Fusion(halve), [pair()]
    call = Call((columns[0],), {})
    route = replace(fusion_module._route([columns[0][0]], columns), triton=True)
    kernels: list[Kernels] = [
        decay._make_group(call, replace(route, device=device), columns)  # type: ignore[misc]
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


# --- on a GPU -------------------------------------------------------------------------------------------------------


def adam(p: Any, g: Any, m: Any, v: Any, *, lr: float, step: int) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(lr * m / (1 - 0.9**step) / (v.sqrt() + 1e-8))


@pytest.mark.gpu
def test_a_measured_choice_is_a_candidate_and_later_processes_use_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    columns = [Elements(torch.rand(n, device="cuda") for n in (5, 4096)) for _ in range(4)]
    before = [[t.clone() for t in column] for column in columns]
    random = torch.cuda.get_rng_state()
    fusion = Fusion(adam)
    (chosen,) = fusion.tune(*columns, lr=0.1, step=1).values()
    assert chosen in CANDIDATES
    assert all(torch.equal(t, b) for c, k in zip(columns, before, strict=True) for t, b in zip(c, k, strict=True))
    assert torch.equal(random, torch.cuda.get_rng_state())
    (path,) = folder.iterdir()
    row = json.loads(path.read_text())
    assert all(candidate["seconds"] > 0 for candidate in row["candidates"])
    # Another choice than the default, to be sure that it is read.
    path.write_text(json.dumps({**row, "block": 2048, "warps": 8}))
    another_process(monkeypatch)
    later = Fusion(adam)
    later(*columns, lr=0.1, step=1)
    assert tilings(later) == [Tiling(2048, 8)]


@pytest.mark.gpu
def test_every_kind_of_argument_can_be_measured_on_a_gpu() -> None:
    def maths(p: Any, step: Any, flag: Any, count: Any, rate: Any, lr: float, n: int) -> Any:
        step.add_(n)
        p.sub_(torch.where(flag, p * lr, p * rate) / (count + step))
        return p.norm(), p * 2

    make: list[Callable[[], torch.Tensor]] = [
        lambda: torch.ones(7, device="cuda", dtype=torch.bfloat16),
        lambda: torch.zeros((), device="cuda"),
        lambda: torch.ones(7, device="cuda", dtype=torch.bool),
        lambda: torch.ones(7, device="cuda", dtype=torch.int64),
    ]
    columns = [Elements([new(), new()]) for new in make]
    (chosen,) = Fusion(maths).tune(*columns, torch.tensor(0.5), 0.1, 1).values()
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
