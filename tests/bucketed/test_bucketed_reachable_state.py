"""The state that a bucketed program reaches besides its arguments, and how it is guarded."""

from __future__ import annotations

import functools
import types
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, SEQ, assert_same, rows
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed.reachable_state import ReachableState
from subtensors.bucketed.state_guard import StateGuard

pytestmark = pytest.mark.usefixtures("captured")


factor = torch.tensor(2.0, dtype=torch.float64)


class Holder:
    """No module, but it has one."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3, device=device, dtype=torch.float64)
        self.opt = st.optim.SGD(self.net.parameters(), lr=0.1)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.last = self.net(x).softmax(0)
        self.seen.append(self.last)
        return self.last

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().sum()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]


def test_a_callable_object_gets_the_gradients_of_its_attributes(device: str) -> None:
    own, other = Holder(device), Holder(device)
    run = st.bucketed(own, DIMS)
    for n in (5, 6, 20, 7):
        x, cotangent = rows(n, device), rows(n, device)
        run(x).backward(cotangent)
        other(x).backward(cotangent)
        assert_same(own.net.weight.grad, other.net.weight.grad)
    # What it keeps of its results is nothing that was replaced.
    assert run.stats().hits == 2
    assert run.stats().recaptures == 0


def test_a_method_takes_training_steps_with_its_objects_optimizer(device: str) -> None:
    own, other = Holder(device), Holder(device)
    run = st.bucketed(own.step, DIMS)
    for n in (5, 6, 20, 7, 21):
        x = rows(n, device)
        torch.testing.assert_close(run(x), other.step(x))
        assert_same(own.net.weight, other.net.weight)
    assert run.stats().hits == 3
    assert not run.stats().fallbacks


def test_an_unregistered_tensor_of_a_module_gets_its_gradient(device: str) -> None:
    class Unregistered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 3, device=device, dtype=torch.float64)
            self.free = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
            self.layers = [nn.Linear(3, 3, device=device, dtype=torch.float64)]

        def forward(self, x: Tensor) -> Tensor:
            return (self.layers[0](self.inner(x)) * self.free).softmax(0)

    own, other = Unregistered(), Unregistered()
    run = st.bucketed(own, DIMS)
    for n in (5, 6, 20, 7):
        x, cotangent = rows(n, device), rows(n, device)
        run(x).backward(cotangent)
        other(x).backward(cotangent)
        for p, q in ((own.free, other.free), (own.layers[0].weight, other.layers[0].weight)):
            assert_same(p.grad, q.grad)
    assert run.stats().hits == 2


def test_reachable_state_is_found_through_every_kind_of_reference(device: str) -> None:
    made = [torch.ones(3) for _ in range(6)]
    net = nn.Linear(3, 3)

    def program(x: Tensor, default: Tensor = made[0], *, named: Any = (made[1],)) -> Any:
        return made[2:4], {"a": net}, default, named

    holder = Holder(device)
    partial = functools.partial(program, extra={"b": made[4]})
    found = {id(part) for part in ReachableState(partial).parts}
    assert {id(x) for x in [*made[:5], net]} <= found
    assert {id(holder.net), id(holder.opt)} <= {id(part) for part in ReachableState(holder.step).parts}

    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * made[5]

    assert {id(made[5])} <= {id(part) for part in ReachableState(Local()).parts}
    many = [torch.ones(1)] * 2 + [torch.ones(1) for _ in range(1000)]
    assert ReachableState(lambda: many).parts == []


def test_a_lazy_module_runs_once_without_a_graph_and_is_then_captured(device: str) -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Softmax(0)).to(device)
    run = st.bucketed(net, {"input": {0: SEQ}})
    for n in (5, 6, 7):
        x = torch.randn(n, 3, device=device)
        torch.testing.assert_close(run(x), net(x))
    stats = run.stats()
    assert stats.fallbacks == {"parameters have no size before the first call": 1}
    assert (stats.hits, stats.calls) == (1, 3)


@torch.no_grad()
def test_a_module_with_a_sparse_buffer_gives_the_same_results(device: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("links", torch.eye(3, dtype=torch.float64, device=device).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.links, x.T).T.softmax(0)

    net = Sparse()
    run = st.bucketed(net, DIMS)
    for n in (5, 6, 20):
        x = rows(n, device)
        torch.testing.assert_close(run(x), net(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_unreachable_parameter_gets_its_gradient_without_a_graph(device: str, compiled: bool) -> None:
    net = nn.Linear(3, 3, device=device, dtype=torch.float64)
    hidden = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
    get_hidden = {"hidden": hidden}.__getitem__

    def program(x: Tensor) -> Tensor:
        made = torch.ones(3, dtype=torch.float64, device=device, requires_grad=True)
        return (net(x) * get_hidden("hidden") * made).softmax(0)

    run = st.bucketed(program, DIMS, compile=compiled and {"backend": "aot_eager"})
    for n in (5, 6, 20):
        x, cotangent = rows(n, device), rows(n, device)
        hidden.grad = None
        run(x).backward(cotangent)
        (expected,) = torch.autograd.grad(program(x), hidden, cotangent)
        torch.testing.assert_close(hidden.grad, expected)
    assert ["not found: pass it on" in reason for reason in run.stats().fallbacks] == [True]


def test_data_of_an_object_is_not_copied_and_written_once_per_call(device: str) -> None:
    class Job(Holder):
        def __init__(self) -> None:
            super().__init__(device)
            self.data, self.calls = torch.zeros(1000, 3, device=device), torch.zeros((), device=device)

        def __call__(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.net(x).softmax(0)  # type: ignore[no-any-return]

    job = Job()
    run = st.bucketed(job, DIMS)
    for i, n in enumerate((5, 6, 20, 7, 12)):
        run(rows(n, device)).square().sum().backward()
        assert job.calls == i + 1
    put_back = [id(t) for t in run.state.tensors_to_restore()]
    assert id(job.calls) in put_back
    assert id(job.data) not in put_back


def test_names_in_inner_functions_count_as_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "factor", factor.to(device))

    def program(x: Tensor) -> Tensor:
        return (lambda y: y * factor)(x.softmax(0))

    run = st.bucketed(program, DIMS)
    x = rows(5, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), program(x))
    monkeypatch.setitem(globals(), "factor", factor * 3)
    torch.testing.assert_close(run(x), program(x))
    assert [id(t) for t in run.state.guard.closed_over] == [id(factor)]


SETTINGS: dict[str, Any] = {
    "dataclass": make_dataclass("Settings", [("scale", float)]),
    "namespace": lambda scale: types.SimpleNamespace(scale=scale),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SETTINGS)
def test_plain_values_of_objects_without_a_hash_are_watched(device: str, name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = SETTINGS[name](2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x.sum(0) * self.settings.scale

    program = Scaled()
    run = st.bucketed(program, DIMS, check=False)
    x = rows(5, device)
    for scale in (2.0, 3.0):
        program.settings.scale = scale
        for _ in range(2):
            assert_same(run(x), x.sum(0) * scale)
    program.settings = SETTINGS[name](4.0)
    assert_same(run(x), x.sum(0) * 4)


@torch.no_grad()
def test_a_program_that_changes_a_constant_may_call_its_own_runner(device: str) -> None:
    held = {"depth": 0, "scale": 1.0}

    def program(x: Tensor) -> Tensor:
        if held["depth"] > 2:
            return x.sum(0) * held["scale"]
        held["depth"] += 1
        held["scale"] += 1.0
        return run(x[:-1]) + held["scale"]  # type: ignore[no-any-return]

    run = st.bucketed(program, {"x": {0: st.Dim("seq", max=3, buckets=[3])}}, check=False)
    x = rows(6, device)
    found = run(x)
    held.update(depth=0, scale=1.0)
    assert_same(found, x[:-3].sum(0) * 4 + 4 * 3)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_replaced_parameter_of_a_scripted_module_is_a_change() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    guard = StateGuard(ReachableState(nn.Sequential(scripted)))
    assert guard.first_change() == ""
    scripted.weight = nn.Parameter(torch.ones(2, 2))
    assert guard.first_change() == "0.weight was replaced: its address changed"
