"""Arenas against a model: create, write, view, compile, capture, replay, release, restore, delete, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as hs
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import subtensors as st
from subtensors.kernels.runtime.gc_pause import gc_paused

DTYPES = [torch.float32, torch.int64, torch.float64, torch.uint8]
SIZES = [1, 7, 128, 5000, 600_000]


def double_and_add(t: Tensor) -> None:
    t.mul_(2).add_(3)


@dataclass
class Known:
    """A tensor in the model: its values, None once they were discarded, and its address."""

    tensor: Tensor
    address: int
    values: Tensor | None
    views: list[Tensor] = field(default_factory=list)
    replays: list[Callable[[], object]] = field(default_factory=list)


class ArenaMachine(RuleBasedStateMachine):
    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.arena = st.Arena(self.device, chunk="2MiB")
        self.known: list[Known] = []
        self.kept: Literal["cpu"] | None = "cpu"
        self.compiled = torch.compile(double_and_add, backend="eager", dynamic=True)

    def pick(self, index: int) -> Known:
        return self.known[index % len(self.known)]

    @rule(size=hs.sampled_from(SIZES), dtype=hs.sampled_from(DTYPES), value=hs.integers(0, 9), data=hs.booleans())
    def create(self, size: int, dtype: torch.dtype, value: int, data: bool) -> None:
        values = torch.arange(size).remainder(50).to(dtype) if data else torch.full((size,), value, dtype=dtype)

        def make() -> Tensor:
            return self.arena.static(values) if data else self.arena.full((size,), value, dtype=dtype)

        if self.arena.released:
            with pytest.raises(st.AddressError):
                make()
            return
        tensor = make()
        self.known.append(Known(tensor, tensor.data_ptr(), values))

    def writes(self, known: Known, write: Callable[[Tensor], object]) -> None:
        if self.arena.released:
            with pytest.raises(st.AddressError):
                write(known.tensor)
            return
        write(known.tensor)
        if known.values is not None:
            write(known.values)

    @precondition(lambda self: self.known)
    @rule(index=hs.integers(0, 99), value=hs.integers(0, 9))
    def fill(self, index: int, value: int) -> None:
        known = self.pick(index)
        self.writes(known, lambda t: t.fill_(value))
        if not self.arena.released:
            known.values = torch.full_like(known.tensor, value, device="cpu")

    @precondition(lambda self: self.known)
    @rule(index=hs.integers(0, 99))
    def write_in_place(self, index: int) -> None:
        self.writes(self.pick(index), double_and_add)

    @precondition(lambda self: self.known)
    @rule(index=hs.integers(0, 99))
    def write_in_a_compiled_function(self, index: int) -> None:
        self.writes(
            self.pick(index), lambda t: self.compiled(t) if t.device == self.arena.device else double_and_add(t)
        )

    @precondition(lambda self: self.known)
    @rule(index=hs.integers(0, 99))
    def write_through_a_view(self, index: int) -> None:
        known = self.pick(index)
        if not known.views:
            if self.arena.released:
                return
            known.views.append(known.tensor[: 1 + known.tensor.numel() // 2])
        if self.arena.released:
            with pytest.raises(st.AddressError):
                known.views[0].add_(1)
            return
        known.views[0].add_(1)
        if known.values is not None:
            known.values[: 1 + known.values.numel() // 2].add_(1)

    @precondition(lambda self: self.known and not self.arena.released)
    @rule(index=hs.integers(0, 99))
    def capture(self, index: int) -> None:
        known = self.pick(index)
        if len(known.replays) < 3:
            known.replays.append(self.arena.guard(self.captured(known.tensor)))

    def captured(self, tensor: Tensor) -> Callable[[], Any]:
        # The address alone, as in a graph: it neither keeps the tensor alive nor knows whether it is released.
        from subtensors.kernels.memory.from_address import tensor_from_address

        address, size, dtype = tensor.data_ptr(), tensor.nbytes, tensor.dtype

        def replay() -> None:
            double_and_add(tensor_from_address(address, size, torch.device(self.device), None).view(dtype))

        return replay

    @precondition(lambda self: any(known.replays for known in self.known))
    @rule(index=hs.integers(0, 99))
    def replay(self, index: int) -> None:
        known = [known for known in self.known if known.replays][index % sum(bool(k.replays) for k in self.known)]
        if self.arena.released:
            with pytest.raises(st.AddressError):
                known.replays[-1]()
            return
        known.replays[-1]()
        if known.values is not None:
            double_and_add(known.values)

    @rule(keep=hs.sampled_from(["cpu", "cpu", None]))
    def release(self, keep: Literal["cpu"] | None) -> None:
        if self.arena.released:
            with pytest.raises(st.AddressError):
                self.arena.release(keep)
            return
        self.arena.release(keep)
        self.kept = keep
        assert self.arena.mapped == 0

    @rule()
    def restore(self) -> None:
        if not self.arena.released:
            with pytest.raises(st.AddressError):
                self.arena.restore()
            return
        self.arena.restore()
        if self.kept is None:
            for known in self.known:
                known.values = None

    @precondition(lambda self: self.known)
    @rule(index=hs.integers(0, 99))
    def delete(self, index: int) -> None:
        del self.known[index % len(self.known)]

    @invariant()
    def values_and_addresses_are_those_of_the_model(self) -> None:
        spans = sorted((k.address, k.address + k.tensor.numel() * k.tensor.element_size()) for k in self.known)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(self.arena.address <= a and b <= self.arena.address + self.arena.reserved for a, b in spans)
        assert self.arena.used >= sum(end - start for start, end in spans)
        if self.arena.released:
            return
        for known in self.known:
            assert known.tensor.data_ptr() == known.address
            assert known.address % self.arena.alignment == 0
            if known.values is not None:
                assert torch.equal(known.tensor.cpu(), known.values)


class GpuArenaMachine(ArenaMachine):
    device = "cuda"

    def captured(self, tensor: Tensor) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        values = tensor.clone()
        torch.cuda.synchronize()
        # Torch 2.11 ends this capture where it destroys a graph meanwhile, such as one of an earlier example.
        with gc_paused(), torch.cuda.graph(graph):
            double_and_add(tensor)
        tensor.copy_(values)
        return graph.replay


QUICK = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase
TestArena.settings = QUICK
TestArenaOnGpu = pytest.mark.gpu(GpuArenaMachine.TestCase)
TestArenaOnGpu.settings = QUICK
