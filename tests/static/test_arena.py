"""Arena: allocation, growth in chunks, freeing, threads and wrong arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn

import subtensors as st
from subtensors.static.allocation import FreeList

MIB = 1 << 20


def test_allocations_are_aligned_and_do_not_overlap(device: str) -> None:
    arena = st.Arena(device, reserve="1GiB", alignment=4096)
    tensors = [arena.empty(n, dtype=torch.uint8) for n in (1, 4096, 4097, 100)]
    starts = [t.data_ptr() - arena.address for t in tensors]
    assert starts == [0, 4096, 8192, 16384]
    assert all(t in arena for t in tensors)
    assert torch.ones(3, device=device) not in arena


@pytest.mark.parametrize("alignment", [1, 4, 64])
def test_addresses_are_multiples_of_the_element_size_for_every_alignment(device: str, alignment: int) -> None:
    arena = st.Arena(device, alignment=alignment)
    tensors = [arena.full((3,), 7, dtype=d) for d in (torch.uint8, torch.complex128, torch.float16, torch.float64)]
    for t in tensors:
        assert t.data_ptr() % max(t.element_size(), alignment) == 0
        assert bool((t + 1 == 8).all())


def test_memory_is_mapped_in_chunks_when_needed_for_any_reserve(device: str) -> None:
    arena = st.Arena(device, reserve="4TiB", chunk="2MiB")
    assert (arena.reserved, arena.mapped, arena.used) == (4 << 40, 0, 0)
    small = arena.zeros(100)
    assert (arena.mapped, arena.used) == (2 * MIB, 512)
    large = arena.zeros(3 * MIB, dtype=torch.uint8)
    assert (arena.mapped, arena.used) == (4 * MIB, 512 + 3 * MIB)
    assert int(small.sum()) == int(large.sum()) == 0
    assert repr(arena) == f"Arena({arena.device}, 3 MiB used, 4 MiB mapped, 4 TiB reserved)"


def test_constructors_return_the_values_and_layouts_of_torchs(device: str) -> None:
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
def test_free_parts_never_overlap_and_merge_again(steps: list[tuple[int, int, int]]) -> None:
    free = FreeList(256)
    parts: list[tuple[int, int]] = []
    for size, alignment, victim in steps:
        start = free.allocate(size, alignment)
        fitting = [i for i in range(0, 257 - size, alignment) if all(i + size <= s or i >= s + n for s, n in parts)]
        assert start == (fitting[0] if fitting else None)
        if start is not None:
            parts.append((start, size))
        if victim < len(parts):
            free.free(*parts.pop(victim))
    for part in parts:
        free.free(*part)
    assert free.allocate(256, 1) == 0


def test_the_part_of_a_dropped_tensor_is_reused_once_its_views_are_dropped(device: str) -> None:
    arena = st.Arena(device)
    first = arena.zeros(1000)
    address = first.data_ptr()
    view = first[10:]
    del first
    assert arena.zeros(1000).data_ptr() != address
    del view
    assert arena.zeros(1000).data_ptr() == address


def test_adjacent_dropped_parts_merge(device: str) -> None:
    arena = st.Arena(device, reserve="2MiB", chunk="2MiB")
    parts = [arena.empty(512 << 10, dtype=torch.uint8) for _ in range(4)]
    with pytest.raises(st.AddressError, match="larger reserve"):
        arena.empty(1)
    del parts[2], parts[1]
    assert arena.empty(1 << 20, dtype=torch.uint8).data_ptr() == arena.address + (512 << 10)


def test_explain_reports_the_address_and_the_arena_of_a_tensor(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(10)
    assert st.explain(t).endswith(f"at {t.data_ptr():#x}, in {arena!r}")
    assert st.explain(st.static(t.data)).endswith("in memory of its own")
    arena.release()
    assert "released" in st.explain(t)
    assert st.explain(arena).splitlines()[0] == f"Arena on {arena.device}, released, at {arena.address:#x}"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_arena_has_no_copies(copied: Callable[[st.Arena], object]) -> None:
    """The end of a copy would free the memory under the tensors."""
    arena = st.Arena("cpu")
    t = arena.ones(3)
    with pytest.raises(TypeError, match="an Arena has no copies"):
        copied(arena)
    gc.collect()
    assert t.sum() == 3


def test_an_arena_is_freed_with_its_last_tensor(device: str) -> None:
    arena = st.Arena(device)
    t = arena.ones(3)
    memory = arena._allocator.memory
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


def test_threads_allocate_and_drop_without_sharing_memory(device: str) -> None:
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
