"""Arena: what release and restore promise, who is refused meanwhile, and what memory that is lacking leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import subtensors as st
from subtensors.static_memory import host_pages

MIB = 1 << 20


@pytest.mark.parametrize("piece", [1 * MIB, 64 * MIB])
def test_contents_and_addresses_survive_release_and_restore(
    device: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "_PIECE", piece)
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
        assert [t.data_ptr() for t in tensors] == [at for at, _ in before]
        assert all(torch.equal(t, values) for t, (_, values) in zip(tensors, before, strict=True))


def test_contents_that_are_not_kept_are_gone_and_the_addresses_are_not(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(1000)
    at = t.data_ptr()
    arena.release(keep=None)
    arena.restore()
    assert t.data_ptr() == at
    assert t.fill_(3).sum() == 3000


def _hooked(gradient: Tensor) -> Tensor:
    leaf = torch.ones(4, device=gradient.device, requires_grad=True)
    leaf.register_hook(lambda _: gradient)
    return leaf * 1


USES: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda t: t + 1,
    "reflected operator": lambda t: 1 + t,
    "function": lambda t: torch.add(t, 1),
    "method": lambda t: t.sum(),
    "in place": lambda t: t.add_(1),
    "index": lambda t: t[0],
    "setitem": lambda t: t.__setitem__(0, 1),
    "functional": lambda t: nn.functional.linear(torch.ones(1, 4, device=t.device), t[None]),
    "in a list": lambda t: torch.stack([torch.ones(4, device=t.device), t]),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "overload": lambda t: torch.ops.aten.add.Tensor(t, t),
    "out": lambda t: torch.add(torch.ones(4, device=t.device), 1, out=t),
    "copied from": lambda t: torch.ones(4, device=t.device).copy_(t),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "to": lambda t: t.to(torch.float64),
    "clone": lambda t: t.clone(),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: float(t[0]),
    "data_ptr": lambda t: t.data_ptr(),
    "unbound data_ptr": lambda t: Tensor.data_ptr(t),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "pickle": lambda t: __import__("pickle").dumps(t),
    "deepcopy": lambda t: __import__("copy").deepcopy(t),
    "parameter": lambda t: nn.Parameter(t),
    "tensor list": lambda t: st.TensorList([t]) + 1,
    "static": lambda t: st.static(t) + 1,
    "view": lambda t: t.view(2, 2),
}
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "carving": lambda t: t,
    "view": lambda t: t.view(4),
    "data": lambda t: t.data,
    "detached": lambda t: t.detach(),
    "parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "plain parameter": lambda t: nn.Parameter(t.data, requires_grad=False),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_use_while_released_is_refused_for_every_alias(device: str, alias: str) -> None:
    arena = st.Arena(device)
    t = ALIASES[alias](arena.ones(4))
    kind = type(t)
    arena.release()
    for name, use in USES.items():
        with pytest.raises(st.AddressError, match=r"restore\(\)"):
            pytest.fail(f"{name} was not refused: {use(t)}")
    assert (t.shape, t.dtype, t.device, t.size(0), t.requires_grad) == ((4,), torch.float32, arena.device, 4, False)
    assert "its Arena is released" in repr(t)
    assert isinstance(t, kind)
    arena.restore()
    assert type(t) is kind
    assert (t + 1).tolist() == [2, 2, 2, 2]


# What asks no __torch_function__.
UNASKED: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda t: torch.func.vmap(torch.neg)(t),
    "grad": lambda t: torch.func.grad(torch.sum)(t),
    "vjp": lambda t: torch.func.vjp(torch.exp, t),
    "functionalize": lambda t: torch.func.functionalize(torch.exp)(t),
    "scripted": lambda t: torch.jit.trace(torch.neg, torch.ones(4, device=t.device))(t),
    "new_tensor": lambda t: torch.ones(1, device=t.device).new_tensor(t),
    "DLPack of C++": torch.utils.dlpack.to_dlpack,
    "another class": lambda t: Tensor._make_subclass(Tensor, t) + 1,
    "a gradient for backward": lambda t: torch.ones(4, device=t.device, requires_grad=True).exp().backward(t),
    "a gradient of a hook": lambda t: _hooked(t).sum().backward(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use", UNASKED)
def test_what_asks_no_subclass_is_refused_too_while_released(device: str, use: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(4)
    view = t[1:]
    at = t.data_ptr()
    arena.release()
    # Torch's own words, where it is built without CUDA.
    with pytest.raises((RuntimeError, BufferError), match=r"restore\(\)" if torch.backends.cuda.is_built() else None):
        UNASKED[use](t)
    assert t in arena
    assert view in arena
    assert (view.device, view.storage_offset()) == (arena.device, 1)
    arena.restore()
    view.add_(1)
    assert t.tolist() == [1, 2, 2, 2]
    assert t.data_ptr() == at
    assert "_memory_of_sleeper" not in vars(t)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs": torch.view_as_real,
    "a part of pairs": lambda t: torch.view_as_real(t)[1:],
    "conjugates": torch.conj,
    "other numbers": lambda t: t.view(torch.float32),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_across_complex_numbers_and_their_parts_sleep(device: str, view: str) -> None:
    arena = st.Arena(device)
    t = arena.full((4,), 1 + 2j, dtype=torch.complex64)
    seen = VIEWS[view](t)
    values = seen.tolist()
    form = seen.shape, seen.stride(), seen.storage_offset(), seen.is_conj(), seen.is_neg()
    arena.release()
    with pytest.raises(st.AddressError):
        seen + 1
    assert (seen.shape, seen.stride(), seen.storage_offset(), seen.is_conj(), seen.is_neg()) == form
    arena.restore()
    assert seen.tolist() == values
    leaf = torch.ones(4, dtype=torch.complex64, device=device, requires_grad=True)
    product = leaf * t  # saves it
    with pytest.raises(st.AddressError, match="held by C"):
        arena.release()
    product.abs().sum().backward()


def test_sleep_leaves_versions_hooks_and_graphs_as_they_were(device: str) -> None:
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


def test_a_module_and_an_optimizer_are_refused_while_released(device: str) -> None:
    arena = st.Arena(device)
    layer = nn.Linear(3, 2, device=device)
    layer.weight = arena.static(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(1, 3, device=device)
    layer(x).sum().backward()
    arena.release()
    for use in (lambda: layer(x), optimizer.step, layer.state_dict, lambda: layer.to(torch.float64)):
        with pytest.raises(st.AddressError):
            use()
    optimizer.zero_grad()
    assert layer.weight.grad is None
    arena.restore()
    layer(x).sum().backward()
    optimizer.step()


def test_a_step_without_its_state_is_refused_before_it_writes_anything(device: str) -> None:
    class WritesFirst(st.optim.Optimizer):
        state: ClassVar = {"seen": torch.zeros_like}

        def update(self, p: Tensor, g: Tensor, seen: Tensor) -> None:
            p.sub_(g)
            seen.add_(g)

    w, arena = nn.Parameter(torch.zeros(3, device=device)), st.Arena(device)
    opt = WritesFirst([w], {}, arena=arena)
    w.grad = torch.ones_like(w)
    opt.step()
    arena.release()
    with pytest.raises(st.AddressError, match="a step on a tensor of a released Arena"):
        opt.step()
    assert w.tolist() == [-1, -1, -1]
    arena.restore()
    opt.step()
    assert opt.state[w]["seen"].tolist() == [2, 2, 2]


def test_an_arena_is_released_while_another_one_sleeps(device: str) -> None:
    first, second = st.Arena(device), st.Arena(device)
    a, b = first.ones(3), second.ones(3)
    views = a[1:], b[1:]
    first.release()
    second.release()
    second.restore()
    first.restore()
    assert [t.tolist() for t in (a, b, *views)] == [[1, 1, 1], [1, 1, 1], [1, 1], [1, 1]]


def test_parameters_that_an_optimizer_has_updated_sleep(device: str) -> None:
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


def test_a_gradient_in_an_arena_sleeps_too(device: str) -> None:
    arena = st.Arena(device)
    w = nn.Parameter(torch.ones(3, device=device))
    w.grad = arena.zeros(3)
    arena.release()
    with pytest.raises(st.AddressError):
        w.grad.add_(1)
    arena.restore()
    (w * 2).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]


def test_a_wrapper_around_tensors_of_an_arena_sleeps_too(device: str) -> None:
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


def test_a_tensor_that_cannot_be_put_to_sleep_stops_the_release_and_the_others_wake(device: str) -> None:
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


def test_a_release_is_refused_while_autograd_alone_holds_a_tensor(device: str) -> None:
    arena = st.Arena(device)
    loss = arena.ones(3, requires_grad=True).square().sum()
    gc.collect()
    with pytest.raises(st.AddressError, match="autograd graph"):
        arena.release()
    loss.backward()
    del loss
    arena.release()
    arena.restore()


def test_an_autograd_graph_that_saved_nothing_of_the_arena_does_not_matter(device: str) -> None:
    arena = st.Arena(device)
    w = arena.ones(3, requires_grad=True)
    loss = (w + 1).sum()
    arena.release()
    arena.restore()
    loss.backward()
    assert w.grad.tolist() == [1, 1, 1]


def test_releases_and_restores_come_in_turn(device: str) -> None:
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


def test_what_is_deleted_while_released_is_free_afterwards(device: str) -> None:
    arena = st.Arena(device, chunk="2MiB")
    first, second = arena.ones(MIB), arena.full((MIB,), 2.0)
    at = first.data_ptr()
    arena.release()
    del first
    assert arena.used == 4 * MIB
    arena.restore()
    assert arena.mapped == 4 * MIB
    assert second.sum() == 2 * MIB
    assert arena.zeros(MIB).data_ptr() == at


class _FullDevice:
    """A range that has no memory after some chunks."""

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
def test_out_of_memory_on_restore_leaves_the_arena_released_and_loses_nothing(device: str, chunks: int) -> None:
    arena = st.Arena(device, chunk="2MiB")
    t = arena.static(torch.randn(3 * MIB // 2, device=device))
    values = t.clone()
    arena.release()
    memory = arena._carver.memory
    arena._carver.memory = _FullDevice(memory, chunks)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            arena.restore()
        assert arena.released
        assert arena.mapped == 0
        with pytest.raises(st.AddressError):
            t.sum()
    arena._carver.memory = memory
    arena.restore()
    assert torch.equal(t, values)


def test_out_of_memory_on_growth_changes_nothing(device: str) -> None:
    arena = st.Arena(device, chunk="2MiB")
    t = arena.ones(10)
    memory = arena._carver.memory
    arena._carver.memory = _FullDevice(memory, 1)
    with pytest.raises(torch.OutOfMemoryError):
        arena.zeros(2 * MIB)
    assert (arena.mapped, arena.used) == (2 * MIB, 512)
    arena._carver.memory = memory
    assert arena.zeros(2 * MIB).sum() == 0
    assert t.sum() == 10


def test_no_memory_on_the_host_frees_nothing_and_wakes_the_tensors(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = st.Arena(device)
    t = arena.ones(10)

    def full(device: torch.device) -> Tensor:
        raise MemoryError("the host is full")

    with monkeypatch.context() as patch:
        patch.setattr(host_pages, "_new_piece", full)
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


def test_a_guarded_call_is_refused_while_released(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(1)
    add = arena.guard(lambda n: t.add_(n))
    add(1)
    arena.release()
    with pytest.raises(st.AddressError, match="uses memory of a released Arena"):
        add(1)
    arena.restore()
    add(1)
    assert t.item() == 3


def test_keep_is_cpu_or_none(device: str) -> None:
    with pytest.raises(ValueError, match="got 'disk'"):
        st.Arena(device).release(keep="disk")  # type: ignore[arg-type]
