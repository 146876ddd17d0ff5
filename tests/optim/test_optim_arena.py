"""An optimizer's state in an arena: released and restored, and the captured step still replays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from torch import Tensor, nn

import subtensors as st


@pytest.fixture(autouse=True)
def kernels(device: str) -> Iterator[None]:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles where there is a GPU")
    with kernels_on_cpu() if device == "cpu" else nullcontext():
        yield


class Job:
    """One optimizer twice over equal parameters: eager in memory of its own, and captured over an arena."""

    def __init__(self, device: str, sizes: tuple[int, ...] = (50, 7, 300), **options: Any) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.params = [[nn.Parameter(torch.ones(n, device=device)) for n in sizes] for _ in range(2)]
        self.arena = st.Arena(device, reserve="4GiB")
        self.eager = st.optim.AdamW(self.params[0], lr=0.1, **options)
        self.captured = st.optim.AdamW(self.params[1], lr=0.1, graph=True, arena=self.arena, **options)

    def step(self) -> None:
        for p, q in zip(*self.params, strict=True):
            p.grad = torch.randn(p.shape, generator=self.generator).to(self.device)
            q.grad = p.grad.clone()
        self.eager.step()
        self.captured.step()

    def assert_equal(self) -> None:
        assert all(torch.equal(p, q) for p, q in zip(*self.params, strict=True))

    def state(self) -> list[Tensor]:
        return [t for p in self.params[1] for t in self.captured.state[p].values()]


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_state_is_made_in_the_arena_and_steps_are_the_same(device: str, state_dtype: str | None) -> None:
    job = Job(device, sizes=(50, 5000), state_dtype=state_dtype)
    for _ in range(3):
        job.step()
    job.assert_equal()
    assert all(t in job.arena for t in job.state())
    assert len(job.state()) == (6 if state_dtype is None else 8)


def test_a_captured_step_replays_after_its_state_was_released_and_restored(device: str) -> None:
    job = Job(device)
    job.step()
    addresses = [t.data_ptr() for t in job.state()]
    for _ in range(3):
        job.arena.release()
        job.arena.restore()
        job.step()
    job.assert_equal()
    assert [t.data_ptr() for t in job.state()] == addresses
    assert "1 recording, 4 replays, 0 eager steps" in st.explain(job.captured)


@pytest.mark.parametrize("graph", [True, False])
def test_a_step_is_refused_while_its_state_is_released_and_goes_on_after_restore(device: str, graph: bool) -> None:
    job = Job(device)
    if not graph:
        job.captured._capture = None
    job.step()
    before = [p.detach().clone() for p in job.params[1]]
    job.arena.release()
    for call in (job.captured.step, job.captured.state_dict):
        with pytest.raises(st.AddressError, match=r"call restore\(\) on the Arena first"):
            call()
    assert all(torch.equal(p, b) for p, b in zip(job.params[1], before, strict=True))
    job.arena.restore()
    job.step()
    job.assert_equal()


def test_packed_steps_are_refused_while_their_state_is_released(device: str) -> None:
    job = Job(device)
    job.captured.capture(packed=True)
    for _ in range(5):
        job.captured.step()
    job.arena.release()
    with pytest.raises(st.AddressError, match=r"call restore\(\) on the Arena first"):
        job.captured.step()
    job.arena.restore()
    job.captured.step()


def test_saved_state_is_plain_and_loaded_state_lands_in_the_arena(device: str) -> None:
    job = Job(device)
    job.step()
    saved = copy.deepcopy(job.captured.state_dict())
    assert {type(t) for state in saved["state"].values() for t in state.values()} == {Tensor}
    job.step()
    job.captured.load_state_dict(saved)
    job.eager.load_state_dict(saved)
    job.step()
    job.assert_equal()
    assert all(t in job.arena for t in job.state())


def test_a_copy_has_state_of_its_own_outside_the_arena(device: str) -> None:
    job = Job(device)
    job.step()
    other = copy.deepcopy(job.captured)
    job.arena.release()
    for p in other.param_groups[0]["params"]:
        assert all(t not in job.arena for t in other.state[p].values())
        p.grad = torch.ones_like(p)
    other.step()
    job.arena.restore()
    job.step()
    job.assert_equal()


def test_an_arena_on_another_device_is_refused_with_both() -> None:
    arena = st.Arena("cpu")
    w = nn.Parameter(torch.ones(3, device="meta"))
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match="the arena is on cpu, and the parameter whose state it is for on meta"):
        st.optim.AdamW([w], lr=0.1, arena=arena).step()
