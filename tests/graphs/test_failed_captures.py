"""A failed capture leaves torch unchanged: random numbers, the allocator, the pool's other graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.dispatch.graphs.pool import GraphPool

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


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
