"""What every test shares: the devices, the Triton interpreter where there is no GPU, and the hypothesis profiles."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from counted_buckets import Counted

CUDA = torch.cuda.is_available()

# Triton reads this where a kernel is decorated, so it is set before anything that a test imports.
if not CUDA:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before tests/conftest.py could choose its interpreter")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from triton_interpreter import mend_interpreter

        mend_interpreter()

# Inductor keeps code on disk, and does not tell apart for which of a CPU's instruction sets it was made.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{capability}")))

# One thread a worker: the suite runs two workers on two cores.
torch.set_num_threads(1)

if not CUDA:
    # For devices that may be initialised later, torch.manual_seed keeps the seed with the text of the whole call stack:
    # a third of the time of a sweep that seeds for every call.
    for later in (torch.cuda, torch.xpu, torch.mtia):
        later.manual_seed_all = lambda seed: None


def pytest_collection() -> None:
    """Collect no garbage while tests are collected: nothing of theirs is garbage, and it takes a fifth of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what lives for the whole session out of garbage collection, which takes a second otherwise.

    Have torch's op_db not look for a `unittest.TestCase` on the call stack, too: another third of a sweep over it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    # After pytest's own last collections of garbage, which take three seconds otherwise, modules are deleted in order.
    atexit.register(gc.unfreeze)
    for name in ("common_utils", "opinfo.core"):
        if module := sys.modules.get(f"torch.testing._internal.{name}"):
            module.extract_test_fn = lambda: None


settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


# Session scope: hypothesis refuses function-scoped fixtures, and a test may take `device` beside its `@given` values.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that values may live on; "cuda" is skipped where there is none."""
    name: str = request.param
    return name


@pytest.fixture
def kernels(device: str) -> Iterator[None]:
    """On a CPU fused calls run as kernels in Triton's interpreter."""
    if device == "cpu" and CUDA:
        pytest.skip("Triton compiles where there is a GPU")
    from kernels_on_cpu import kernels_on_cpu

    with kernels_on_cpu() if device == "cpu" else nullcontext():
        yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How often bucketed programs record and replay from now on."""
    from counted_buckets import Counted

    return Counted(monkeypatch)


@pytest.fixture(params=["run again", "captured"])
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucketed programs on a CPU are run again in each call; and, as in a graph, replayed below Python."""
    if request.param == "captured":
        if "device" not in request.fixturenames or request.getfixturevalue("device") != "cpu":
            pytest.skip("for programs on a CPU: a GPU captures")
        from pretend_graphs import pretend

        pretend(monkeypatch, trained=True)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, which outlives what a test makes of it.

    The reducer of DistributedDataParallel holds the group. Where it is the last to do so, torch waits for the group's
    threads while it holds the interpreter's lock, for which one of them may wait.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.fixture
def compiler() -> Iterator[None]:
    """A compiler that has compiled nothing yet."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def have_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], None]]:
    """Give the cost model blocks of columns: a head of twenty classes has none of the usual ones."""
    from subtensors.dispatch.chunked import cost_model

    plans = cost_model.plan_row_statistics, cost_model.plan_linear_cross_entropy

    def have(widths: list[int]) -> None:
        monkeypatch.setattr(cost_model, "block_columns", lambda rates: widths)
        for plan in plans:  # which may be known from a test without these
            plan.cache_clear()

    yield have
    monkeypatch.undo()
    for plan in plans:
        plan.cache_clear()


@pytest.fixture(params=["by rows", "by columns"])
def blocks(request: pytest.FixtureRequest, have_blocks: Callable[[list[int]], None]) -> None:
    """The shape of the blocks that the cost model chooses from."""
    if request.param == "by columns":
        have_blocks([8, 12])


@pytest.fixture
def launched() -> Iterator[list[int]]:
    """Which device was the current one at each launch of Triton's."""
    from second_gpu import launches

    with launches() as devices:
        yield devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Write what the page on versions says of this run; a worker of xdist has no terminal, so it writes nothing."""
    from compatibility import write_row

    write_row(config, exitstatus, terminalreporter.stats)


def pytest_runtest_setup() -> None:
    """Seed torch before each test, so that what a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after the fixtures, which an error here would leave as they are
def pytest_runtest_teardown() -> None:
    """Forget compiled code after each test, so that no test counts another's recompilations.

    An illegal access, a capture that is left open or a stream that is left current is an error of that test, not of
    all that come after it: `torch.cuda.graph` leaves its own stream current where the capture can't be ended. So is a
    mode of torch that is left on.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_initialized():
        left = torch.cuda.current_stream()
        torch.cuda.set_stream(torch.cuda.default_stream())
        with torch.cuda.stream(left):
            assert not torch.cuda.is_current_stream_capturing(), "the test leaves a capture open"
        torch.cuda.synchronize()
        assert left == torch.cuda.default_stream(), f"the test leaves {left} the current stream"
    records, torch_functions = torch.is_grad_enabled(), torch._C._is_torch_function_enabled()
    torch.set_grad_enabled(True)
    assert records, "the test leaves gradients off"
    assert torch_functions, "the test leaves torch functions off"


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Variables of the process that a Trainer sets for accelerate are for that test."""
    kept = {**os.environ}
    yield
    os.environ.clear()
    os.environ.update(kept)
