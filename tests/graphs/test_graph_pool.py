"""The memory that graphs of one pool share, in any order of captures and drops."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.dispatch.graphs.capture import allocator_settings, growing_segments, with_expandable_segments
from subtensors.dispatch.graphs.pool import GraphPool

on_gpu = pytest.mark.gpu
WIDTH = 1 << 20
SEQ = st.Dim("seq", max=32, buckets=4)


def program(x: Tensor) -> Tensor:
    """Compute with several intermediate values of the argument's size at once."""
    y = x * 2
    z = y.relu() + 1
    return (z.sin() + y + z).sum(1)


@on_gpu
def test_a_pool_of_a_process_with_hundreds_of_them_is_looked_at_as_often_as_one_likes() -> None:
    """Torch would release the numbers of the handle each time, and numbers from 257 on are objects that go away."""
    pool = GraphPool(torch.device("cuda", 0))
    while pool._handle is None or pool._handle[1] <= 256:
        pool._handle = torch.cuda.graph_pool_handle()
    x = torch.zeros(8, device="cuda")
    _, kept = pool.capture(lambda: x + 1)
    before = [sys.getrefcount(number) for number in pool._handle]
    assert pool.bytes() >= pool.active_bytes() >= kept.nbytes
    assert [sys.getrefcount(number) for number in pool._handle] == before


@pytest.mark.parametrize(
    ("settings", "growing"),
    [
        ("", "expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:True"),
        ("expandable_segments:False,backend:native", "backend:native,expandable_segments:True"),
        ("roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"),
    ],
)
def test_expandable_segments_leave_other_allocator_settings_unchanged(settings: str, growing: str) -> None:
    assert with_expandable_segments(settings, True) == growing
    assert with_expandable_segments(growing, False) == growing.replace("True", "False")


@on_gpu
@pytest.mark.parametrize("sizes", [(8, 16, 24, 32), (4, 32, 12, 28, 20), (32, 16)])
@torch.no_grad()
def test_graphs_take_no_more_memory_than_the_largest_alone(sizes: tuple[int, ...]) -> None:
    runs: dict[bool, Any] = {}
    for is_alone, chosen in ((True, (max(sizes),)), (False, sizes)):
        runs[is_alone] = run = st.bucketed(program, {"x": {0: SEQ}})
        for n in chosen:
            x = torch.randn(n - 1, WIDTH, device="cuda")
            torch.testing.assert_close(run(x), program(x))
    alone, together = (runs[key].stats().pool_bytes for key in (True, False))
    assert 0 < together <= 1.1 * alone
    for n in sizes:
        x = torch.randn(n, WIDTH, device="cuda")
        torch.testing.assert_close(runs[False](x), program(x))


@on_gpu
def test_a_pools_memory_is_reused_when_graphs_are_dropped_and_captured() -> None:
    pool = GraphPool(torch.device("cuda", 0))
    inputs = {n: torch.randn(n, WIDTH, device="cuda") for n in (2, 6, 4, 12)}

    def captured(n: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        pool.run(lambda: program(inputs[n]))
        graph, out = pool.capture(lambda: program(inputs[n]))
        return graph, pool.non_owning_aliases([out])[out]

    graphs = {n: captured(n) for n in inputs}
    held = pool.bytes()
    for n in (6, 12):
        pool.drop(graphs.pop(n)[0])
        graphs[n] = captured(n)
    assert pool.bytes() == held
    for n, (graph, out) in graphs.items():
        inputs[n].normal_()
        graph.replay()
        torch.testing.assert_close(out, program(inputs[n]))
    before = torch.cuda.memory_reserved()
    for graph, _ in graphs.values():
        pool.drop(graph)
    torch.cuda.empty_cache()
    assert pool.bytes() == 0
    assert torch.cuda.memory_reserved() <= before - held


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    """Allocator settings of a user."""
    before = allocator_settings()
    torch._C._accelerator_setAllocatorSettings(request.param)
    yield request.param
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


@on_gpu
@pytest.mark.parametrize("chosen", ["max_split_size_mb:512", "expandable_segments:True"], indirect=True)
def test_a_capture_restores_the_users_allocator_settings(chosen: str) -> None:
    pool = GraphPool(torch.device("cuda", 0))
    x = torch.ones(4, device="cuda")

    def fails() -> None:
        x.sum().item()

    pool.run(lambda: x * 2)
    with pytest.raises(RuntimeError):
        pool.capture(fails)
    pool.capture(lambda: x * 2)
    assert chosen in allocator_settings()
    assert ("expandable_segments:True" in allocator_settings()) == ("expandable_segments:True" in chosen)


@on_gpu
def test_the_outer_of_two_captures_sets_and_restores_the_allocator() -> None:
    with growing_segments():
        inner = allocator_settings()
        with growing_segments():
            assert allocator_settings() == inner
        assert "expandable_segments:True" in allocator_settings()
    assert "expandable_segments:True" not in allocator_settings()
