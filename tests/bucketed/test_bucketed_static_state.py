"""Static state of a bucketed program is read and written in place, in compiled code too."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, assert_same, rows
from torch import Tensor, nn

import subtensors as st
from subtensors.dispatch.ops import plain_types
from subtensors.dispatch.ops.plain_types import PlainViews

pytestmark = pytest.mark.usefixtures("captured")

each_way = pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}], ids=["as it is", "compiled"])


class Scaled(nn.Module):
    """Its weight and its scale may be static."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.scale.add_(1)
        return self.layer(x).softmax(0) * self.scale


def static_buffer(model: Any) -> None:
    model.scale = st.static(model.scale)


def static_parameter(model: Any) -> None:
    model.layer.weight = st.static(model.layer.weight)


@each_way
@torch.no_grad()
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("change", [static_buffer, static_parameter])
def test_a_graph_reads_and_writes_static_state(
    compile: Any, change: Callable[[Any], None], writes: bool, device: str
) -> None:
    torch.manual_seed(0)
    ours = Scaled(writes).to(device)
    theirs = copy.deepcopy(ours)
    change(ours)
    addresses = [t.data_ptr() for t in (*ours.parameters(), *ours.buffers())]
    run = st.bucketed(ours, {"x": {0: DIMS["x"][0]}}, compile=compile)
    for n in (5, 6, 20, 5, 18):
        x = rows(n, device)
        assert_same(run(x), theirs(x))
        assert_same(ours.scale.as_subclass(Tensor), theirs.scale)
        for model in (ours, theirs):
            model.layer.weight.mul_(1.5)
    assert addresses == [t.data_ptr() for t in (*ours.parameters(), *ours.buffers())]
    assert not run.stats().fallbacks
    assert run.stats().hits == 3


@each_way
@torch.no_grad()
@pytest.mark.parametrize("writes", [False, True])
def test_a_static_tensor_is_an_argument_that_is_not_copied(compile: Any, writes: bool, device: str) -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        return x.softmax(0) * (scale.add_(1) if writes else scale)

    theirs = torch.ones(3, dtype=torch.float64, device=device)
    ours = st.static(theirs.clone())
    run = st.bucketed(program, DIMS, compile=compile)
    for n in (5, 6, 20, 5):
        x = rows(n, device)
        assert_same(run(x, ours), program(x, theirs))
        assert_same(ours.as_subclass(Tensor), theirs)
    assert not run.stats().fallbacks
    assert run.stats().hits == 2


@each_way
@pytest.mark.parametrize("change", [static_buffer, static_parameter])
def test_gradients_of_static_parameters_are_graphs_too(
    compile: Any, change: Callable[[Any], None], device: str
) -> None:
    torch.manual_seed(0)
    ours = Scaled(False).to(device)
    theirs = copy.deepcopy(ours)
    change(ours)
    run = st.bucketed(ours, {"x": {0: DIMS["x"][0]}}, compile=compile)
    for n in (5, 6, 20, 5, 18):
        x = rows(n, device)
        for program in (run, theirs):
            program(x).square().sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert type(p.grad) is Tensor
            assert_same(p.grad, q.grad)
    assert not run.stats().fallbacks
    assert run.stats().hits == 3


def test_each_tensor_has_one_plain_view_that_does_not_keep_it_alive() -> None:
    x = st.static(torch.ones(3))
    with PlainViews():
        views = [x.view(3) for _ in range(2)]
        x.add_(1)
        assert x.requires_grad is False
    assert {type(t) for t in views} == {Tensor}
    assert {t.data_ptr() for t in views} == {x.data_ptr()}
    assert views[0].tolist() == [2, 2, 2]
    p = st.static(nn.Parameter(torch.ones(3)))
    with PlainViews():
        assert (p * 2).requires_grad
        assert p.requires_grad
    count, gone = len(plain_types._views), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert len(plain_types._views) < count


def test_hooks_and_gradients_are_those_of_the_tensor_and_not_of_its_plain_view() -> None:
    p = st.static(nn.Parameter(torch.ones(3)))
    found: list[Tensor] = []
    with PlainViews():
        p.register_hook(found.append)
        (p * 2).sum().backward()
        p.requires_grad_(False)
        p.grad = None
    assert [g.tolist() for g in found] == [[2, 2, 2]]
    assert not p.requires_grad
    assert p.grad is None


@pytest.mark.parametrize("check", ["first", False])
def test_compiled_gradients_reach_static_tensors_that_a_program_closes_over(check: Any, device: str) -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, device=device)
    ours, theirs = st.static(nn.Parameter(weight)), nn.Parameter(weight)

    def loss_of(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).softmax(0) * w.sum(0)).square().mean()

    run = st.bucketed(lambda x: loss_of(x, ours), DIMS, compile={"backend": "aot_eager"}, check=check)
    for n in (5, 6, 20, 5):
        x = rows(n, device)
        run(x).backward()
        loss_of(x, theirs).backward()
        assert_same(ours.grad, theirs.grad)
    assert not run.stats().fallbacks
