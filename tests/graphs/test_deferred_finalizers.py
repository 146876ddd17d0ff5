"""Objects deleted while a CUDA graph is captured: their memory is freed afterwards, and the capture succeeds."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pretend_graphs import pretend
from torch.nn import Parameter

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.graphs import capture as captures
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.dispatch.graphs.fused_graph import Recording
from subtensors.kernels.memory.host_reservation import HostRange

MIB = 1 << 20


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Set by a test: whether torch reports a capture on the current stream, without a GPU."""
    gc.collect()  # garbage of other tests
    is_on = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_on[0])
    yield is_on
    is_on[0] = False
    deferred_finalizers.run_deferred()
    assert len(deferred_finalizers._deferred) == 0


def deleted_released_arena() -> weakref.ref[Any]:
    """The address range of a released arena that is garbage once this has returned, with its contents on the host."""
    arena = st.Arena("cpu", chunk="2MiB")
    cycle: list[Any] = [arena, arena.ones(MIB)]
    cycle.append(cycle)
    arena.release()
    return weakref.ref(arena._allocator.memory)


def test_an_arena_collected_during_a_capture_is_freed_after_it(capture: list[bool]) -> None:
    memory = deleted_released_arena()
    capture[0] = True
    gc.collect()
    assert memory() is not None
    deferred = len(deferred_finalizers._deferred)
    assert deferred > 0
    gc.collect()
    assert len(deferred_finalizers._deferred) == deferred
    capture[0] = False
    gc.collect()
    assert len(deferred_finalizers._deferred) == 0
    assert memory() is None
    assert deferred_finalizers._after_collection not in gc.callbacks


def test_deferred_work_runs_at_the_next_allocation_of_an_arena(capture: list[bool]) -> None:
    other = st.Arena("cpu")
    memory = deleted_released_arena()
    capture[0] = True
    gc.collect()
    capture[0] = False
    assert memory() is not None
    other.zeros(3)
    assert memory() is None


def test_many_arenas_deleted_during_a_capture_are_all_freed(capture: list[bool], monkeypatch: Any) -> None:
    open_ranges = [0]
    for name, step in (("__init__", 1), ("close", -1)):
        made = getattr(HostRange, name)

        def counted(self: HostRange, *args: Any, made: Any = made, step: int = step) -> None:
            made(self, *args)
            open_ranges[0] += step

        monkeypatch.setattr(HostRange, name, counted)
    gc.disable()  # until the capture
    for _ in range(20):
        deleted_released_arena()
    capture[0] = True
    gc.collect()
    gc.enable()
    assert open_ranges == [40]
    capture[0] = False
    deferred_finalizers.run_deferred()
    assert open_ranges == [0]


def test_work_that_raises_is_retried_later(capture: list[bool]) -> None:
    done: list[str] = []
    is_possible = []

    def work() -> None:
        if not is_possible:
            raise RuntimeError("another library captures")
        done.append("first")

    deferred_finalizers.run_or_defer(work)
    deferred_finalizers.run_or_defer(lambda: done.append("second"))
    assert done == []
    is_possible.append(True)
    gc.collect()
    assert done == ["first", "second"]


def test_no_garbage_is_collected_and_no_work_runs_during_a_capture_of_any_thread() -> None:
    done: list[int] = []
    assert gc.isenabled()
    with deferred_finalizers.no_gc_during_capture():
        assert not gc.isenabled()
        with deferred_finalizers.no_gc_during_capture():
            thread = threading.Thread(target=lambda: deferred_finalizers.run_or_defer(lambda: done.append(1)))
            thread.start()
            thread.join()
        assert not gc.isenabled()
        assert done == []
    assert gc.isenabled()
    assert done == [1]
    gc.disable()
    try:
        with deferred_finalizers.no_gc_during_capture():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_torchs_cache_is_not_emptied_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, trained=True)
    emptied: list[bool] = []

    def empty_cache() -> None:
        emptied.append(deferred_finalizers.is_capturing())
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")  # a thread has a pool of its own

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    run = st.bucketed(lambda x: x.exp(), {"x": {0: st.Dim("n", max=8)}})

    def train_and_release() -> None:
        run(torch.ones(3, requires_grad=True)).sum().backward()
        assert run.stats().captures == 1
        run.release()

    with deferred_finalizers.no_gc_during_capture():
        thread = threading.Thread(target=train_and_release)
        thread.start()
        thread.join()
    assert emptied == []
    run.release()
    assert emptied == [False]


def test_the_graph_of_a_deleted_recording_is_destroyed_after_a_capture(capture: list[bool]) -> None:
    recording = Recording(torch.device("cpu"))
    runs = recording._tape.runs  # type: ignore[union-attr]
    runs.append(lambda: None)
    capture[0] = True
    del recording
    gc.collect()
    assert len(runs) == len(deferred_finalizers._deferred) == 1
    capture[0] = False
    gc.collect()
    assert len(runs) == len(deferred_finalizers._deferred) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["thread_local", "global", "relaxed"])
@pytest.mark.parametrize("collects", ["the thread that captures", "another thread"])
def test_a_users_capture_survives_arenas_collected_during_it(mode: str, collects: str) -> None:
    def make_garbage() -> weakref.ref[Any]:
        arena = st.Arena("cuda", chunk="2MiB")
        cycle: list[Any] = [arena, arena.ones(MIB)]
        cycle.append(cycle)
        arena.release()
        arena.restore()
        return weakref.ref(arena._allocator.memory)

    x = torch.zeros(8, device="cuda")
    memory = make_garbage()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        x.add_(1)
        if collects == "another thread":
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
        else:
            gc.collect()
        assert memory() is not None
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 8
    gc.collect()
    assert memory() is None
    assert torch.rand(3, device="cuda").shape == (3,)


@pytest.mark.gpu
def test_a_captured_step_survives_arenas_deleted_during_its_capture() -> None:
    params = [Parameter(torch.ones(100, device="cuda"))]
    params[0].grad = torch.ones_like(params[0])
    optimizer = st.optim.AdamW(params)
    optimizer.capture()
    arenas = [st.Arena("cuda", chunk="2MiB")]
    arenas[0].zeros(100)
    memory = weakref.ref(arenas[0]._allocator.memory)
    update = optimizer._updater.update_all

    def clumsy(stepped: Any) -> None:
        update(stepped)
        if torch.cuda.is_current_stream_capturing():
            arenas.clear()
            gc.collect()
            assert memory() is not None

    optimizer._updater.update_all = clumsy  # type: ignore[method-assign]
    optimizer.step()
    assert optimizer._capture is not None
    assert optimizer._capture.recordings == 1
    assert memory() is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_users_capture_survives_optimizers_with_graphs_deleted_during_it(mode: str) -> None:
    def make() -> st.optim.AdamW:
        p = Parameter(torch.ones(100, device="cuda"))
        p.grad = torch.ones_like(p)
        optimizer = st.optim.AdamW([p], graph=True)
        optimizer.step()
        assert optimizer.replays == 1
        return optimizer

    x = torch.zeros(8, device="cuda")
    optimizers = [make()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        x.add_(1)
        optimizers.clear()
        gc.collect()
        assert len(deferred_finalizers._deferred) >= 1  # with those of other tests
    graph.replay()
    assert x.tolist() == [1.0] * 8
    gc.collect()
    assert len(deferred_finalizers._deferred) == 0


@pytest.mark.gpu
def test_a_failed_recording_leaves_torch_unchanged() -> None:
    p = TensorColumn([torch.ones(1000, device="cuda")])
    add = FusedFunction(lambda p, *, by: p.add_(by))
    is_broken = [True]

    def calls() -> None:
        add(p, by=1.0)
        if is_broken[0] and torch.cuda.is_current_stream_capturing():
            torch.empty(64 * MIB, device="cuda")
            torch.cuda.synchronize()

    add(p, by=1.0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError, match="captur"):
        Recording(p[0].device).record(calls, [])
    assert torch.rand(3, device="cuda").shape == (3,)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 4 * MIB
    is_broken[0] = False
    recording = Recording(p[0].device)
    recording.record(calls, [])
    value = float(p[0][0])
    recording.replay()
    assert float(p[0][0]) == value + 1
    assert torch.rand(3, device="cuda").shape == (3,)


def test_pinned_pools_of_destroyed_graphs_are_freed_together_and_not_in_a_capture(
    capture: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    graph = cast(torch.cuda.CUDAGraph, SimpleNamespace(reset=lambda: done.append("reset")))
    monkeypatch.setattr(captures, "_destroyed", 0)
    monkeypatch.setattr(captures, "_empty_pinned_cache", lambda: done.append("emptied"))
    for _ in range(captures._PINNED_POOLS - 1):
        captures.destroy(graph)
    capture[0] = True
    captures.destroy(graph)
    assert done == ["reset"] * captures._PINNED_POOLS
    capture[0] = False
    captures.destroy(graph)
    captures.destroy(graph)
    assert done[captures._PINNED_POOLS :] == ["reset", "emptied", "reset"]
