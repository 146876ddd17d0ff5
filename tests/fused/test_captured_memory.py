"""Memory of a launch that others capture is its graph's own, and memory of a call is no other thread's or stream's."""

from __future__ import annotations

import threading
import weakref
from contextvars import copy_context
from typing import Any

import pytest
import torch
from fused_lists import groups
from torch import Tensor
from torch.nn import Parameter

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.triton_executor import TritonExecutor
from subtensors.kernels.fused.codegen import Kernel
from subtensors.kernels.fused.launch import Grid
from subtensors.kernels.runtime import graph_lifetime
from subtensors.optim import gradient_norm


def normalised(p: Tensor, lr: float) -> Tensor:
    p.sub_(lr * p / (p.norm() + 1))
    return p.sum()


def added(p: Tensor, n: float) -> None:
    p.add_(n)


def column(*values: float, size: int = 5, device: str = "cpu") -> TensorColumn:
    return TensorColumn([torch.full((size,), value, device=device) for value in values])


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run as if they were captured."""
    monkeypatch.setattr(TritonExecutor, "is_capturing", lambda self: True)
    monkeypatch.setattr(gradient_norm, "is_capturing", lambda device: True)
    monkeypatch.setattr(graph_lifetime, "keep_with_graph", lambda memory: None)


@pytest.mark.usefixtures("captured")
def test_the_scalars_of_a_graph_have_their_memory_until_the_launch(
    device: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address alone would let the outputs of the same call take that memory, from the graph's pool."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def remembered(self: TritonExecutor, *args: Any) -> Tensor:
        scalars = scalars_of(self, *args)
        made.append(weakref.ref(scalars))
        return scalars

    def launched(self: Grid, *args: Any) -> None:
        alive.append(made[-1]() is not None)
        launch(self, *args)

    scalars_of, launch = TritonExecutor._scalars, Grid.launch
    monkeypatch.setattr(TritonExecutor, "_scalars", remembered)
    monkeypatch.setattr(Grid, "launch", launched)
    p = column(1.0, device=device)
    FusedFunction(lambda p, n: p.add_(n))(p, 2.0)
    assert alive == [True]
    assert p[0].tolist() == [3.0] * 5


def test_no_eager_call_works_in_memory_that_a_graph_zeroes(
    device: str, kernels: None, request: pytest.FixtureRequest
) -> None:
    fusion, p = FusedFunction(normalised), column(1.0, 2.0, device=device)
    fusion.explain(p, 0.5)  # makes the plan, and runs nothing
    (executor,) = groups(fusion)
    request.getfixturevalue("captured")
    sums = fusion(p, 0.0)
    assert executor.grid._workspaces == {}
    assert [float(s) for s in sums] == [5.0, 10.0]


def test_no_later_step_reads_what_a_graph_fills_for_its_norm(
    device: str, kernels: None, request: pytest.FixtureRequest
) -> None:
    w = Parameter(torch.ones(5, device=device))
    w.grad = torch.ones_like(w)
    optimizer = st.optim.SGD([w], lr=1.0, max_norm=1.0)
    request.getfixturevalue("captured")
    optimizer.step()
    (calls,) = optimizer._updater.norm._calls.values()
    assert not any(call.launches for call in (*calls._templates, calls._last))
    torch.testing.assert_close(w.detach(), torch.full_like(w, 1 - 5**-0.5))


def test_a_launch_that_is_repeated_is_of_the_calls_own_addresses(device: str, kernels: None) -> None:
    """Another thread may have called with other tensors in between."""
    fusion, mine, others = FusedFunction(added), column(0.0, device=device), column(0.0, device=device)
    fusion(mine, 1.0)
    fusion(others, 1.0)
    (executor,) = groups(fusion)
    table = executor.repeatable_table([mine], [None])
    assert table is not None
    assert table.addresses == [[mine[0].data_ptr()]]


def test_threads_that_make_the_same_workspace_share_one(
    device: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = FusedFunction(normalised)
    fusion(column(1.0, device=device), 0.5)
    grid = groups(fusion)[0].grid
    made, empty = [], torch.empty

    def slowly(*args: Any, **kwargs: Any) -> Tensor:
        monkeypatch.setattr(torch, "empty", empty)
        other = threading.Thread(target=lambda: made.append(grid.workspace(77)))
        other.start()
        other.join()
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", slowly)
    assert grid.workspace(77) is made[0]


def test_no_thread_launches_between_the_kernels_of_another(
    device: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one stream they work in the same memory."""
    fusion, mine, others = FusedFunction(normalised), column(1.0, device=device), column(100.0, device=device)
    expected = [column(value, device=device)[0] for value in (1.0, 100.0)]
    for p in expected:
        normalised(p, 0.5)
    thread = threading.Thread(target=copy_context().run, args=(fusion, others, 0.5))
    tile_map = Grid._tile_map

    def between(self: Grid, kernel: Kernel) -> Any:
        if thread.ident is None and kernel is self.kernels.kernels[1]:
            thread.start()
            thread.join(0.2)
        return tile_map(self, kernel)

    fusion(column(1.0, device=device), 0.5)
    monkeypatch.setattr(Grid, "_tile_map", between)
    fusion(mine, 0.5)
    thread.join()
    torch.testing.assert_close([mine[0], others[0]], expected)


@pytest.mark.gpu
def test_an_eager_call_after_a_plan_met_its_first_capture_is_right() -> None:
    fusion, p = FusedFunction(normalised), column(1.0, 2.0, size=5000, device="cuda")
    fusion.explain(p, 0.5)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph in (first, second):
        with torch.cuda.graph(graph):
            fusion(p, 0.5)
    other = TensorColumn(t.clone() for t in p)
    fusion(p, 0.5)
    second.replay()
    first.replay()
    for t in other:
        for _ in range(3):
            normalised(t, 0.5)
    for t, expected in zip(p, other, strict=True):
        torch.testing.assert_close(t, expected)


@pytest.mark.gpu
def test_graphs_of_one_plan_are_replayed_side_by_side() -> None:
    fusion, columns = FusedFunction(normalised), [column(1.0, 2.0, size=1 << 20, device="cuda") for _ in range(3)]
    expected = [[t.clone() for t in p] for p in columns]
    for p in columns:
        fusion(p, 0.0)
    graphs = [torch.cuda.CUDAGraph() for _ in columns[1:]]
    for graph, p in zip(graphs, columns[1:], strict=True):
        with torch.cuda.graph(graph):
            fusion(p, 0.5)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        fusion(columns[0], 0.5)
    torch.cuda.synchronize()
    for p, values in zip(columns, expected, strict=True):
        for t, value in zip(p, values, strict=True):
            for _ in range(20):
                normalised(value, 0.5)
            torch.testing.assert_close(t, value)


@pytest.mark.gpu
def test_a_clipped_step_after_its_first_capture_is_right() -> None:
    def made() -> tuple[Parameter, torch.optim.Optimizer]:
        w = Parameter(torch.ones(5000, device="cuda"))
        w.grad = torch.full_like(w, 3.0)
        return w, st.optim.AdamW([w], lr=0.1, max_norm=1.0)

    ours, optimizer = made()
    theirs, eager = made()
    for opt in (optimizer, eager):
        source = made()[1]
        source.step()
        opt.load_state_dict(source.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.step()
    graph.replay()
    for _ in range(2):
        eager.step()
    torch.testing.assert_close(ours, theirs)
