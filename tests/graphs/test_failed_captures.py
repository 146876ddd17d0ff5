"""A failed capture leaves torch unchanged: random numbers, the allocator, the pool's other graphs, other captures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.dispatch.graphs.capture import capturing
from subtensors.dispatch.graphs.pool import GraphPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _raises(y: Tensor) -> None:
    raise ValueError("no")


def _reads(y: Tensor) -> None:
    y.sum().item()


def _waits(y: Tensor) -> None:
    torch.cuda.synchronize()


def _holds_up_the_legacy_stream(y: Tensor) -> None:
    torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


def _depends_on_work_outside(y: Tensor) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream())
    torch.cuda.current_stream().wait_event(event)


def _leaves_a_stream_unjoined(y: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.mul(2)


def _accumulates_on_another_stream(y: Tensor) -> None:
    y.sum().backward()


@pytest.mark.parametrize(
    "fail",
    [
        _raises,
        _reads,
        _waits,
        _holds_up_the_legacy_stream,
        _depends_on_work_outside,
        _leaves_a_stream_unjoined,
        _accumulates_on_another_stream,
    ],
)
@pytest.mark.parametrize("with_another", [False, True])
@pytest.mark.gpu
def test_a_failed_capture_leaves_torch_unchanged(fail: Callable[[Tensor], None], with_another: bool) -> None:
    device = torch.device("cuda", 0)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device))
    x = torch.randn(8, 64, device=device)
    earlier = (x @ weight).sum()  # its nodes are of the legacy stream
    pool = GraphPool(device)

    def program() -> Tensor:
        return F.dropout(x @ weight, 0.5)

    def failing() -> None:
        fail(program())

    pool.run(program)
    others = [pool.capture(program)] if with_another else []
    before = torch.cuda.get_rng_state()
    for _ in range(2):
        with torch.autograd.set_multithreading_enabled(False), pytest.raises((RuntimeError, ValueError)) as error:
            pool.capture(failing)
        assert "INTERNAL ASSERT" not in str(error.value)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(torch.rand(8, device=device), torch.rand(8, device=device))
    for graph, out in [*others, pool.capture(program)]:
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(first, out)
    for graph in list(pool.graphs):
        pool.drop(graph)
    assert pool.bytes() == 0
    mine = torch.cuda.CUDAGraph()
    with torch.cuda.graph(mine):
        doubled = x * 2
    mine.replay()
    torch.testing.assert_close(doubled, x * 2)
    earlier.backward()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_capture_within_another_is_refused() -> None:
    device = torch.device("cuda", 0)
    pool = GraphPool(device)
    x = torch.ones(3, device=device)
    mine = torch.cuda.CUDAGraph()
    with torch.cuda.graph(mine):
        with pytest.raises(RuntimeError, match="part of another one"):
            pool.capture(lambda: x * 2)
        y = x * 3
    mine.replay()
    assert y.sum() == 9


class GraphOnCpu:
    """A graph whose capture begins and ends, and does nothing."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def capture_begin(self, **options: Any) -> None:
        self.steps.append("begin")

    def capture_end(self) -> None:
        self.steps.append("end")

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def reset(self) -> None:
        self.steps.append("reset")


def captured(steps: list[str], program: Callable[[], object]) -> None:
    with capturing(cast(torch.cuda.CUDAGraph, GraphOnCpu(steps)), torch.device("cpu"), (0, 1)):
        program()


def test_a_program_that_has_taken_all_memory_is_captured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def out_of_memory(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    def program() -> None:
        monkeypatch.setattr(torch, "empty", out_of_memory)
        raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        captured(steps, program)
    assert steps == ["begin", "end", "reset"]


def test_threads_capture_one_at_a_time() -> None:
    """Torch's generator counts the random numbers of one capture, from where the last one began."""
    steps: list[str] = []
    both = Barrier(2)

    def program() -> None:
        try:
            both.wait(0.2)  # until the other thread's capture has begun as well
        except BrokenBarrierError:
            steps.append("alone")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: captured(steps, program), range(2)))
    assert steps == ["begin", "alone", "end"] * 2
