"""Arena: the effects of release and restore, the reasons to refuse a release, and running out of memory."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import subtensors as st
from subtensors.dispatch.graphs import deferred_finalizers
from subtensors.static import offload

MIB = 1 << 20


@pytest.mark.parametrize("piece", [1 * MIB, 64 * MIB])
def test_contents_and_addresses_survive_release_and_restore(
    device: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_PIECE_BYTES", piece)
    arena = st.Arena(device, chunk="2MiB")
    torch.manual_seed(0)
    tensors = [arena.static(torch.randn(n, device=device)) for n in (3, 700_000, 1_300_000, 5)]
    before = [(t.data_ptr(), t.clone()) for t in tensors]
    del tensors[1], before[1]
    for _ in range(3):
        arena.release()
        assert arena.released
        assert arena.mapped == 0
        arena.restore()
        assert [t.data_ptr() for t in tensors] == [address for address, _ in before]
        assert all(torch.equal(t, values) for t, (_, values) in zip(tensors, before, strict=True))


def test_addresses_survive_a_release_that_discards_the_contents(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(1000)
    address = t.data_ptr()
    arena.release(keep=None)
    arena.restore()
    assert t.data_ptr() == address
    assert t.fill_(3).sum() == 3000


def test_release_and_restore_leave_versions_hooks_and_autograd_graphs_unchanged(device: str) -> None:
    arena = st.Arena(device)
    w = arena.static(nn.Parameter(torch.ones(4)))
    seen: list[float] = []
    w.register_hook(lambda g: seen.append(float(g.sum())))
    node = torch.autograd.graph.get_gradient_edge(w).node
    loss = (w + torch.ones(4, device=device)).sum()  # saves nothing
    other = (w + torch.ones(4, device=device)).sum()
    version = w._version
    arena.release()
    other.backward()
    arena.restore()
    loss.backward()
    (w * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [4, 4, 4, 4]
    assert seen == [4, 4, 8]
    assert w._version == version
    assert torch.autograd.graph.get_gradient_edge(w).node is node


def test_an_arena_is_released_while_another_one_is(device: str) -> None:
    first, second = st.Arena(device), st.Arena(device)
    a, b = first.ones(3), second.ones(3)
    views = a[1:], b[1:]
    first.release()
    second.release()
    second.restore()
    first.restore()
    assert [t.tolist() for t in (a, b, *views)] == [[1, 1, 1], [1, 1, 1], [1, 1], [1, 1]]


def test_parameters_that_an_optimizer_has_updated_are_released(device: str) -> None:
    arena = st.Arena(device)
    p = nn.Parameter(arena.ones(3).as_subclass(Tensor))
    assert type(p) is nn.Parameter
    optimizer = st.optim.SGD([p], lr=0.5)
    for turn in range(3):
        p.grad = torch.ones(3, device=device)
        optimizer.step()
        arena.release()
        arena.restore()
        assert p.tolist() == [0.5 - 0.5 * turn] * 3


@pytest.mark.parametrize("restored_in_mode", [False, True])
def test_parameters_are_released_in_the_mode_of_inference(device: str, restored_in_mode: bool) -> None:
    arena = st.Arena(device)
    p, scale = arena.static(nn.Parameter(torch.arange(3.0))), arena.ones(3)
    with torch.inference_mode():
        arena.release()
        if restored_in_mode:
            arena.restore()
    if not restored_in_mode:
        arena.restore()
    scale.add_(1)
    (p * scale).sum().backward()
    assert p.tolist() == [0, 1, 2]
    assert p.grad is not None
    assert p.grad.tolist() == [2, 2, 2]


def test_an_arena_is_not_released_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where that thread's stream alone is captured, CUDA ends the capture when this one waits for the device."""
    arena = st.Arena("cpu")
    t = arena.ones(3)
    for change in (arena.release, arena.restore):
        with deferred_finalizers.no_gc_during_capture(), monkeypatch.context() as patched:
            patched.setattr(arena, "device", torch.device("cuda", 0))
            with pytest.raises(st.AddressError, match="graph is captured"):
                change()
        change()
    assert t.sum() == 3


@pytest.mark.parametrize("count", [0, 1])
def test_a_release_names_gc_freeze_where_it_may_hide_tensors(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = st.Arena("cpu")
    t = arena.ones(3)
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_objects", lambda generation: [])
        patched.setattr(gc, "get_freeze_count", lambda: count)
        with pytest.raises(st.AddressError) as error:
            arena.release()
    assert ("call gc.unfreeze() before" in str(error.value)) == bool(count)
    assert t.sum() == 3


def test_a_release_leaves_alone_the_tuples_that_other_threads_fill(device: str) -> None:
    arena, failed, done = st.Arena(device, chunk="2MiB"), list[str](), threading.Event()
    t = arena.ones(3)

    def fill() -> None:
        try:
            while not done.is_set():
                tuple(i for i in range(200))
        except SystemError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=fill) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3):
            arena.release()
            arena.restore()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert t.tolist() == [1.0] * 3


def test_a_gradient_in_an_arena_is_released_too(device: str) -> None:
    arena = st.Arena(device)
    w = nn.Parameter(torch.ones(3, device=device))
    w.grad = arena.zeros(3)
    arena.release()
    with pytest.raises(st.AddressError):
        w.grad.add_(1)
    arena.restore()
    (w * 2).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]


def test_a_wrapper_subclass_around_tensors_of_an_arena_is_released_too(device: str) -> None:
    arena = st.Arena(device)
    wrapper = TwoTensor(arena.ones(3).data, arena.ones(3).data)
    elements = st.TensorList([arena.ones(3)])
    arena.release()
    for use in (lambda: wrapper + 1, lambda: torch.ones(3, device=device) * wrapper, lambda: elements + 1):
        with pytest.raises(st.AddressError):
            use()
    arena.restore()
    assert (wrapper + 1).a.tolist() == (elements + 1)[0].tolist() == [2, 2, 2]


class _Unchangeable(Tensor):
    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("no class under this one")


def test_a_tensor_that_cannot_change_its_class_fails_the_release_and_the_rest_is_restored(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(3)
    odd = t.data.as_subclass(_Unchangeable)
    with pytest.raises(TypeError, match="no class under"):
        arena.release()
    assert not arena.released
    assert (t + 1).tolist() == [2, 2, 2]
    del odd
    arena.release()
    arena.restore()


def test_a_release_is_refused_while_an_autograd_graph_may_read_the_memory(device: str) -> None:
    arena = st.Arena(device)
    w = arena.ones(3, requires_grad=True)
    x = torch.ones(2, 3, device=device, requires_grad=True)
    for forward in (lambda: w * w, lambda: x @ w, lambda: nn.functional.linear(x, w[None]), lambda: (w + 1).exp() * w):
        loss = forward().sum()
        with pytest.raises(st.AddressError, match=r"shape \(3,\).*autograd graph.*backward"):
            arena.release()
        assert not arena.released
        loss.backward()
        arena.release()
        arena.restore()
        assert torch.equal(w, torch.ones(3, device=device))


def test_a_release_is_refused_while_autograd_alone_refers_to_a_tensor(device: str) -> None:
    arena = st.Arena(device)
    loss = arena.ones(3, requires_grad=True).square().sum()
    gc.collect()
    with pytest.raises(st.AddressError, match="autograd graph"):
        arena.release()
    loss.backward()
    del loss
    arena.release()
    arena.restore()


def test_an_autograd_graph_that_saved_no_tensor_of_the_arena_allows_a_release(device: str) -> None:
    arena = st.Arena(device)
    w = arena.ones(3, requires_grad=True)
    loss = (w + 1).sum()
    arena.release()
    arena.restore()
    loss.backward()
    assert w.grad.tolist() == [1, 1, 1]


def test_releases_and_restores_must_alternate(device: str) -> None:
    arena = st.Arena(device)
    with pytest.raises(st.AddressError, match="not released"):
        arena.restore()
    arena.release()
    with pytest.raises(st.AddressError, match="released already"):
        arena.release()
    with pytest.raises(st.AddressError, match="released"):
        arena.zeros(3)
    arena.restore()
    arena.zeros(3)


def test_the_part_of_a_tensor_deleted_while_released_is_free_afterwards(device: str) -> None:
    arena = st.Arena(device, chunk="2MiB")
    first, second = arena.ones(MIB), arena.full((MIB,), 2.0)
    address = first.data_ptr()
    arena.release()
    del first
    assert arena.used == 4 * MIB
    arena.restore()
    assert arena.mapped == 4 * MIB
    assert second.sum() == 2 * MIB
    assert arena.zeros(MIB).data_ptr() == address


class _FullDevice:
    """A range whose device runs out of memory after some chunks."""

    def __init__(self, memory: Any, chunks: int) -> None:
        self.memory, self.chunks, self.error = memory, chunks, torch.OutOfMemoryError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def map(self, start: int, size: int) -> None:
        if self.chunks == 0:
            raise self.error("the device is full")
        self.chunks -= 1
        self.memory.map(start, size)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_out_of_memory_on_restore_leaves_the_arena_released_with_its_contents(device: str, chunks: int) -> None:
    arena = st.Arena(device, chunk="2MiB")
    t = arena.static(torch.randn(3 * MIB // 2, device=device))
    values = t.clone()
    arena.release()
    memory = arena._allocator.memory
    arena._allocator.memory = _FullDevice(memory, chunks)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            arena.restore()
        assert arena.released
        assert arena.mapped == 0
        with pytest.raises(st.AddressError):
            t.sum()
    arena._allocator.memory = memory
    arena.restore()
    assert torch.equal(t, values)


def test_out_of_memory_on_growth_changes_nothing(device: str) -> None:
    arena = st.Arena(device, chunk="2MiB")
    t = arena.ones(10)
    memory = arena._allocator.memory
    arena._allocator.memory = _FullDevice(memory, 1)
    with pytest.raises(torch.OutOfMemoryError):
        arena.zeros(2 * MIB)
    assert (arena.mapped, arena.used) == (2 * MIB, 512)
    arena._allocator.memory = memory
    assert arena.zeros(2 * MIB).sum() == 0
    assert t.sum() == 10


def test_out_of_host_memory_on_release_frees_nothing_and_restores_the_tensors(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = st.Arena(device)
    t = arena.ones(10)

    def full(device: torch.device) -> Tensor:
        raise MemoryError("the host is full")

    with monkeypatch.context() as patch:
        patch.setattr(offload, "_allocate_piece", full)
        with pytest.raises(MemoryError):
            arena.release()
    assert not arena.released
    assert t.sum() == 10
    arena.release()
    arena.restore()
    assert t.sum() == 10


def test_host_memory_is_kept_for_the_next_release_until_it_is_trimmed(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(10)
    arena.release()
    arena.trim()
    assert "on the host 64 MiB" in st.explain(arena)
    arena.restore()
    assert "on the host 64 MiB" in st.explain(arena)
    arena.trim()
    assert "on the host 0 B" in st.explain(arena)
    assert t.sum() == 10


def test_keep_is_cpu_or_none(device: str) -> None:
    with pytest.raises(ValueError, match="got 'disk'"):
        st.Arena(device).release(keep="disk")  # type: ignore[arg-type]
