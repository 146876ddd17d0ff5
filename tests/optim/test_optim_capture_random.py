"""Random events between steps: a captured optimizer equals an eager one after all of them."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as hs
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kernels_on_cpu import kernels_on_cpu
from torch import Tensor, nn

import subtensors as st

SIZES = hs.sampled_from([1, 3, 40, 700])
WAYS = ["in place", "assigned", "exchanged", "moved"]
"""How a gradient comes: into the memory of the last one, as another tensor, or as other memory of the same tensor."""


class CapturedOptimizer(RuleBasedStateMachine):
    """Two optimizers over equal parameters, one of them captured; every rule does the same to both."""

    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        if self.device == "cpu":
            self.stack.enter_context(kernels_on_cpu())
        self.generator = torch.Generator().manual_seed(0)
        self.kept: list[Any] = []
        self.held: list[Tensor] = []

    def teardown(self) -> None:
        if hasattr(self, "arena") and self.arena.released:
            self.arena.restore()
        self.stack.close()

    def random(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    @initialize(
        sizes=hs.lists(SIZES, min_size=1, max_size=4),
        count=hs.sampled_from([1, 2, 4, 18]),
        packed=hs.sampled_from([True, True, False]),
        check=hs.sampled_from([False, False, True]),
        amsgrad=hs.booleans(),
    )
    def make(self, sizes: list[int], count: int, packed: bool, check: bool, amsgrad: bool) -> None:
        start = [self.random(n) for n in (sizes * count)[:count]]
        self.params = [[nn.Parameter(t.clone()) for t in start] for _ in range(2)]
        self.arena = st.Arena(self.device, reserve="1GiB", chunk="2MiB")
        self.packed, self.check = packed, check
        self.opts = [
            st.optim.AdamW(params, lr=0.1, amsgrad=amsgrad, **options)
            for params, options in zip(self.params, ({}, {"arena": self.arena}), strict=True)
        ]
        self.opts[1].capture(packed=packed, check=check)
        self.saved = [copy.deepcopy(opt.state_dict()) for opt in self.opts]

    def pairs(self) -> Any:
        return zip(*self.params, strict=True)

    @rule(data=hs.data(), way=hs.sampled_from(WAYS), other=hs.sampled_from(WAYS), count=hs.integers(1, 4))
    @precondition(lambda self: not self.arena.released)
    def step(self, data: hs.DataObject, way: str, other: str, count: int) -> None:
        some = hs.sets(hs.integers(0, len(self.params[0]) - 1), max_size=1)
        without, apart = data.draw(some, label="without a gradient"), data.draw(some, label="given it another way")
        for _ in range(count):
            self.take_step(without, way, apart, other)

    @rule(data=hs.data(), other=hs.sampled_from(["exchanged", "moved"]))
    @precondition(lambda self: not self.arena.released)
    def one_gradient_goes_elsewhere_after_steps_in_place(self, data: hs.DataObject, other: str) -> None:
        for _ in range(4):
            self.take_step(way="in place")
        self.take_step((), "in place", {data.draw(hs.integers(0, len(self.params[0]) - 1), label="which")}, other)

    def take_step(
        self, without: Collection[int] = (), way: str = "assigned", apart: Collection[int] = (), other: str = ""
    ) -> None:
        """One step of both with new gradients, of which some are None, in the memory of the last ones or elsewhere."""
        for i, (p, q) in enumerate(self.pairs()):
            grad = None if i in without else self.random(p.shape)
            for t in (p, q):
                self.give(t, grad, other if i in apart else way)
        for opt in self.opts:
            opt.step()

    def give(self, p: nn.Parameter, grad: Tensor | None, way: str) -> None:
        """Give a parameter this gradient."""
        if grad is None or p.grad is None or way == "assigned":
            p.grad = None if grad is None else grad.clone()
        elif way == "in place":
            p.grad.copy_(grad)
        else:
            self.held.append(p.grad.data)  # so that as many tensors as before share its memory
            if way == "exchanged":
                p.grad = grad.clone()
            else:
                p.grad.data = grad.clone()

    @rule()
    @precondition(lambda self: self.arena.released)
    def step_without_state(self) -> None:
        if any(self.opts[1].state.values()) and any(p.grad is not None for p in self.params[1]):
            with pytest.raises(st.AddressError):
                self.opts[1].step()

    @rule()
    def release_or_restore(self) -> None:
        if self.arena.released:
            self.arena.restore()
        else:
            self.arena.release()

    @rule(lr=hs.sampled_from([0.1, 0.01, 0.0, -0.0, 1.0]), beta=hs.sampled_from([0.9, 0.5]))
    def set_numbers(self, lr: float, beta: float) -> None:
        for opt in self.opts:
            for group in opt.param_groups:
                group["lr"], group["betas"] = lr, (beta, 0.999)
        if not self.arena.released:
            self.take_step()

    @rule(decay=hs.sampled_from([0.0, 0.1]), maximize=hs.booleans())
    def set_options(self, decay: float, maximize: bool) -> None:
        for opt in self.opts:
            opt.param_groups[-1].update(weight_decay=decay, maximize=maximize)
        if not self.arena.released:
            self.take_step()

    @rule(size=SIZES)
    @precondition(lambda self: len(self.opts[0].param_groups) < 3)
    def add_group(self, size: int) -> None:
        new = self.random(size)
        for params, opt in zip(self.params, self.opts, strict=True):
            params.append(nn.Parameter(new.clone()))
            opt.add_param_group({"params": [params[-1]], "lr": 0.05})

    @rule(data=hs.data())
    def move_a_parameter(self, data: hs.DataObject) -> None:
        i = data.draw(hs.integers(0, len(self.params[0]) - 1), label="which")
        p = self.params[1][i]
        self.kept.append((p.data, p.detach().clone()))
        p.data = p.data.clone()
        if self.packed:  # what its error says to do
            self.opts[1].capture(packed=True, check=self.check)
        if not self.arena.released:
            self.take_step()

    @rule(set_to_none=hs.booleans())
    def zero_gradients(self, set_to_none: bool) -> None:
        for params, opt in zip(self.params, self.opts, strict=True):
            opt.zero_grad(set_to_none)
            for p in params:
                p.grad = None

    @rule()
    @precondition(lambda self: not self.arena.released)
    def save(self) -> None:
        self.saved = [copy.deepcopy(opt.state_dict()) for opt in self.opts]

    @rule()
    @precondition(
        lambda self: not self.arena.released and len(self.saved[0]["param_groups"]) == len(self.opts[0].param_groups)
    )
    def load(self) -> None:
        for saved, opt in zip(self.saved, self.opts, strict=True):
            opt.load_state_dict(copy.deepcopy(saved))

    @rule()
    @precondition(lambda self: not self.arena.released)
    def replace_a_state_entry(self) -> None:
        for params, opt in zip(self.params, self.opts, strict=True):
            if "exp_avg" in opt.state.get(params[0], ()):
                opt.state[params[0]]["exp_avg"] = torch.full_like(params[0], 0.25).detach()

    @invariant()
    def parameters_are_equal(self) -> None:
        if hasattr(self, "params"):
            for p, q in self.pairs():
                assert torch.equal(p, q)

    @invariant()
    def memory_that_was_left_is_left_alone(self) -> None:
        assert all(torch.equal(data, copied) for data, copied in self.kept)


class CapturedOnCuda(CapturedOptimizer):
    """The same with graphs."""

    device = "cuda"


def _settings(examples: int) -> settings:
    return settings(max_examples=examples, stateful_step_count=15, deadline=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")
class TestOnCpu(CapturedOptimizer.TestCase):  # type: ignore[name-defined, misc]
    settings = _settings(8)


@pytest.mark.slow
class TestLongOnCpu(TestOnCpu):
    settings = _settings(100)


@pytest.mark.gpu
class TestOnCuda(CapturedOnCuda.TestCase):  # type: ignore[name-defined, misc]
    settings = _settings(60)
