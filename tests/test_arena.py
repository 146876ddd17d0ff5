"""Arena: carving, growth in chunks, freeing, and what release and restore promise."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import subtensors as st
from subtensors.static_memory import host_pages
from subtensors.static_memory.free_list import FreeList

MIB = 1 << 20


def test_carvings_are_aligned_and_apart(device: str) -> None:
    arena = st.Arena(device, reserve="1GiB", alignment=4096)
    tensors = [arena.empty(n, dtype=torch.uint8) for n in (1, 4096, 4097, 100)]
    starts = [t.data_ptr() - arena.address for t in tensors]
    assert starts == [0, 4096, 8192, 16384]
    assert all(t in arena for t in tensors)
    assert torch.ones(3, device=device) not in arena


def test_memory_is_mapped_in_chunks_as_it_is_needed_whatever_the_reserve(device: str) -> None:
    arena = st.Arena(device, reserve="4TiB", chunk="2MiB")
    assert (arena.reserved, arena.mapped, arena.used) == (4 << 40, 0, 0)
    small = arena.zeros(100)
    assert (arena.mapped, arena.used) == (2 * MIB, 512)
    large = arena.zeros(3 * MIB, dtype=torch.uint8)
    assert (arena.mapped, arena.used) == (4 * MIB, 512 + 3 * MIB)
    assert int(small.sum()) == int(large.sum()) == 0
    assert repr(arena) == f"Arena({arena.device}, 3 MiB used, 4 MiB mapped, 4 TiB reserved)"


def test_constructors_give_what_torchs_give(device: str) -> None:
    arena = st.Arena(device)
    like = torch.arange(6.0, device=device).reshape(2, 3).t()
    pairs: list[tuple[Tensor, Tensor]] = [
        (arena.zeros(2, 3), torch.zeros(2, 3, device=device)),
        (arena.zeros((2, 3), dtype=torch.bool), torch.zeros((2, 3), dtype=torch.bool, device=device)),
        (arena.ones(4, dtype=torch.int8), torch.ones(4, dtype=torch.int8, device=device)),
        (arena.full((2,), 7), torch.full((2,), 7, device=device)),
        (arena.full((2,), 0.5, dtype=torch.bfloat16), torch.full((2,), 0.5, dtype=torch.bfloat16, device=device)),
        (arena.static(like), like),
        (arena.static(torch.tensor(3)), torch.tensor(3, device=device)),
        (arena.zeros_like(like, dtype=torch.float64), torch.zeros_like(like, dtype=torch.float64)),
        (arena.zeros(0, 3), torch.zeros(0, 3, device=device)),
        (arena.zeros(()), torch.zeros((), device=device)),
    ]
    for ours, torchs in pairs:
        assert type(ours) is st.StaticAddressTensor
        assert torch.equal(ours, torchs)
        assert (ours.dtype, ours.shape, ours.stride(), ours.device) == (
            torchs.dtype, torchs.shape, torchs.stride(), torchs.device
        )  # fmt: skip
    assert arena.empty_like(like).stride() == like.stride()
    assert arena.zeros(2, requires_grad=True).requires_grad
    assert isinstance(arena.static(nn.Parameter(like)), nn.Parameter)


@given(hs.lists(hs.tuples(hs.integers(1, 40), hs.sampled_from([1, 2, 8, 16]), hs.integers(0, 9)), max_size=30))
def test_free_parts_never_overlap_and_join_again(steps: list[tuple[int, int, int]]) -> None:
    free = FreeList(256)
    held: list[tuple[int, int]] = []
    for size, alignment, victim in steps:
        start = free.take(size, alignment)
        room = [i for i in range(0, 257 - size, alignment) if all(i + size <= s or i >= s + n for s, n in held)]
        assert start == (room[0] if room else None)
        if start is not None:
            held.append((start, size))
        if victim < len(held):
            free.give(*held.pop(victim))
    for part in held:
        free.give(*part)
    assert free.take(256, 1) == 0


def test_a_dropped_tensor_gives_its_part_to_the_next_one_and_a_view_keeps_it(device: str) -> None:
    arena = st.Arena(device)
    first = arena.zeros(1000)
    at = first.data_ptr()
    view = first[10:]
    del first
    assert arena.zeros(1000).data_ptr() != at
    del view
    assert arena.zeros(1000).data_ptr() == at


def test_parts_dropped_together_join_into_one(device: str) -> None:
    arena = st.Arena(device, reserve="2MiB", chunk="2MiB")
    parts = [arena.empty(512 << 10, dtype=torch.uint8) for _ in range(4)]
    with pytest.raises(st.AddressError, match="larger reserve"):
        arena.empty(1)
    del parts[2], parts[1]
    assert arena.empty(1 << 20, dtype=torch.uint8).data_ptr() == arena.address + (512 << 10)


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


def test_explain_says_where_a_tensor_is(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(10)
    assert st.explain(t).endswith(f"at {t.data_ptr():#x}, in {arena!r}")
    assert st.explain(st.static(t.data)).endswith("in memory of its own")
    arena.release()
    assert "released" in st.explain(t)
    assert st.explain(arena).splitlines()[0] == f"Arena on {arena.device}, released, at {arena.address:#x}"


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


def test_an_arena_goes_with_the_last_of_its_tensors(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(3)
    memory = arena._carver.memory
    closed: list[bool] = []
    close = memory.close
    memory.close = lambda: (closed.append(True), close())  # type: ignore[method-assign]
    del arena
    gc.collect()
    assert closed == []
    assert t.sum() == 3
    del t
    gc.collect()
    assert closed == [True]


def test_threads_carve_and_drop_without_sharing_memory(device: str) -> None:
    arena = st.Arena(device, chunk="2MiB")
    wrong: list[int] = []

    def work(number: int) -> None:
        for size in range(1, 60):
            t = arena.full((size * 100,), number)
            if int(t.min()) != number or int(t.max()) != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.used == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "CPU or a CUDA device; got 'meta'"),
        ({"device": "cpu", "reserve": 0}, "reserve must be .* got 0"),
        ({"device": "cpu", "reserve": "2 gigs"}, r"reserve must be .* got '2 gigs'"),
        ({"device": "cpu", "chunk": -1}, "chunk must be"),
        ({"device": "cpu", "alignment": 3}, "power of two.* got 3"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        st.Arena(**arguments)


def test_keep_is_cpu_or_none(device: str) -> None:
    with pytest.raises(ValueError, match="got 'disk'"):
        st.Arena(device).release(keep="disk")  # type: ignore[arg-type]
