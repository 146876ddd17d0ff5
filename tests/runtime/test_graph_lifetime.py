"""The memory of a captured graph is kept while the graph lives, and no longer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import subtensors as st
from subtensors.kernels.runtime import graph_lifetime


class Memory:
    """An object that a graph uses."""


def test_the_memory_of_a_dead_graph_is_dropped_when_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []
    monkeypatch.setattr(graph_lifetime, "_post_when_graph_dies", graphs.append)
    monkeypatch.setattr(graph_lifetime, "_kept", [])
    first, second, third = objects = [Memory() for _ in range(3)]
    alive = [weakref.ref(t) for t in objects]
    graph_lifetime.keep_with_graph(first)
    graph_lifetime.keep_with_graph(second)
    graph_lifetime._c_library().sem_post(graph_lifetime.ctypes.c_void_p(graphs[0]))
    del first, second, objects
    graph_lifetime.keep_with_graph(third)
    assert len(graph_lifetime._kept) == 2
    assert all(reference() is not None for reference in alive)
    graph_lifetime.drop_unused()
    assert [reference() is None for reference in alive] == [True, False, False]


def test_without_user_objects_memory_is_kept_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(semaphore: int) -> None:
        raise RuntimeError("no user objects")

    monkeypatch.setattr(graph_lifetime, "_post_when_graph_dies", refuse)
    monkeypatch.setattr(graph_lifetime, "_kept", [])
    for _ in range(3):
        graph_lifetime.keep_with_graph(Memory())
    assert len(graph_lifetime._kept) == 3
    assert "never freed: no user objects" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("warm_up", [False, True])
def test_repeated_captures_keep_only_the_memory_of_living_graphs(warm_up: bool) -> None:
    @st.fused
    def add(p: torch.Tensor, n: float) -> None:
        p.add_(n)

    p = st.TensorList([torch.zeros(n, device="cuda") for n in (10, 5000)])
    if warm_up:
        add(p, 0.0)

    def captured() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add(p, 1.0)
        return graph

    gc.collect()  # graphs of other tests: CUDA lets none be destroyed during a capture
    living = captured()
    counts = []
    for _ in range(8):
        graph = captured()
        graph.replay()
        torch.cuda.synchronize()
        del graph
        gc.collect()
        counts.append(len(graph_lifetime._kept))
        add(p, 0.0)
    assert counts[1:] == [counts[1]] * 7
    living.replay()
    torch.cuda.synchronize()
    assert all((t == 9).all() for t in p)
