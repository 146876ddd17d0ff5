"""Properties of tensors that a graph depends on are guarded: a change is recaptured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, assert_same, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st
from subtensors.bucketed.state.guards import TENSOR_PROPERTIES, TensorSnapshot
from subtensors.bucketed.state.program_state import State
from subtensors.bucketed.state.side_effects import SideEffects


def complex_matrix() -> Tensor:
    return torch.randn(2, 2, dtype=torch.complex64)


OTHERS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "address": (lambda: torch.ones(2, 2), Tensor.clone),
    "device": (lambda: torch.ones(2, 2), lambda t: t.to("meta")),
    "dtype": (lambda: torch.ones(2, 2, dtype=torch.float16), lambda t: t.view(torch.bfloat16)),
    "shape": (lambda: torch.ones(4), lambda t: t[:3]),
    "strides": (lambda: torch.ones(2, 2), Tensor.t),
    "conjugation": (complex_matrix, Tensor.conj),
    "negation": (lambda: complex_matrix().imag, lambda t: t._base.conj().imag),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", TENSOR_PROPERTIES)
def test_each_guarded_property_detects_a_replaced_tensor(what: str) -> None:
    make, change = OTHERS[what]
    tensors = [torch.ones(3), make(), torch.ones(())]
    held = TensorSnapshot(tensors)
    assert held.matches(tensors)
    tensors[1] = change(tensors[1])
    assert not held.matches(tensors)
    index, first = held.first_change(tensors) or (-1, "")
    assert (index, first) == (1, "address" if what == "device" else what)
    changed = [name for name, read in TENSOR_PROPERTIES.items() if read(tensors[1]) != read(make())]
    assert what in changed


def test_added_and_removed_tensors_are_a_change() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert TensorSnapshot([a, b]).first_change([a]) == (1, "count")
    assert TensorSnapshot([a]).first_change([a, b]) == (1, "count")
    assert not TensorSnapshot([a]).matches([])
    assert TensorSnapshot([]).matches([])


@pytest.mark.parametrize("other", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_tensors_match_their_snapshot_in_every_mode(
    other: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: list[Tensor] = [nn.Parameter(torch.ones(2, 2)), torch.ones(3)]
    held = TensorSnapshot(tensors)
    looked: list[int] = []
    first_change = TensorSnapshot.first_change
    monkeypatch.setattr(TensorSnapshot, "first_change", lambda *args: (looked.append(1), first_change(*args))[1])
    for mode in (nullcontext, other, nullcontext, other):
        with mode():
            assert held.matches(tensors)
    # The table itself is read once a mode at most.
    assert len(looked) <= 1


def test_tensors_without_memory_can_be_guarded() -> None:
    sparse, lazy = torch.eye(2).to_sparse(), nn.LazyLinear(2)
    held = TensorSnapshot([sparse, lazy.weight])
    assert held.matches([sparse, lazy.weight])
    lazy(torch.ones(1, 3))
    assert held.first_change([sparse, lazy.weight]) == (1, "memory")


class Scale(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
        self.inner = nn.Linear(3, 3, device=device, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(2, 2, 3, device=device, dtype=torch.float64).mT)
        self.table = torch.ones(3, dtype=torch.float64, device=device)
        self.tables = [self.table * 2]
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.weight + self.shift[0, :, 1]) * self.table * self.tables[0]
        return self.drop(y.softmax(0))  # type: ignore[no-any-return]


def new_data(net: Scale) -> None:
    net.weight.data = net.weight.data * 2


def transposed_in_place(net: Scale) -> None:
    net.inner.weight.data = net.inner.weight.data.t()


def new_parameter(net: Scale) -> None:
    net.weight = nn.Parameter(net.weight.detach() * 3)


def new_buffer(net: Scale) -> None:
    net.shift = net.shift + 1


def flipped_buffer(net: Scale) -> None:
    net.shift.data = net.shift.data.transpose(0, 2)[:, :, :2]


def new_module(net: Scale) -> None:
    net.inner = nn.Linear(3, 3, device=net.weight.device, dtype=torch.float64)


def new_attribute(net: Scale) -> None:
    net.table = net.table * 5


def new_in_a_list(net: Scale) -> None:
    net.tables[0] = net.tables[0] + torch.arange(3, device=net.weight.device)


def of_another_type(net: Scale) -> None:
    net.double()
    net.weight.data = net.weight.data.float().double()


def all_dropped(net: Scale) -> None:
    net.drop.p = 1.0


WAYS: list[tuple[Callable[[Scale], None], str]] = [
    (new_data, "weight was replaced: its address changed"),
    (transposed_in_place, "inner.weight was replaced: its strides changed"),
    (new_parameter, "weight was replaced: its address changed"),
    (new_buffer, "shift was replaced: its address changed"),
    (flipped_buffer, "shift was replaced: its strides changed"),
    (new_module, "a module was replaced"),
    (new_attribute, "table was replaced"),
    (new_in_a_list, "a part of the program was replaced"),
    (of_another_type, "weight was replaced: its address changed"),
    (all_dropped, "p changed, which a graph holds as a constant"),
    (lambda net: net.eval() and None, "a module changed between training and evaluation"),
]


@pytest.mark.parametrize(("replace", "said"), WAYS)
@torch.no_grad()
def test_a_replaced_tensor_is_recaptured_with_a_warning(
    device: str,
    replace: Callable[[Scale], None],
    said: str,
    counted: Counted,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Scale(device)
    whole = nn.Sequential(net)
    run = st.bucketed(lambda x: whole(x), DIMS)
    x = rows(5, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), net(x))
    replace(net)
    counted.take()
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        torch.testing.assert_close(run(x), net(x))
    assert counted.recorded == 1
    assert [said in r.message for r in caplog.records] == [True], caplog.messages
    torch.testing.assert_close(run(x), net(x))
    assert counted.recorded == 1


@torch.no_grad()
def test_the_first_call_of_a_new_size_reads_the_replaced_tensor(device: str, counted: Counted) -> None:
    net = Scale(device)
    run = st.bucketed(net, DIMS)
    for n in (5, 20):
        run(rows(n, device))
    new_attribute(net)
    for n in (12, 5, 20, 12):
        x = rows(n, device)
        torch.testing.assert_close(run(x), net(x))
    assert counted.recorded == 2 + 3


@torch.no_grad()
def test_values_that_change_in_place_are_read_without_a_recapture(device: str, counted: Counted) -> None:
    net = Scale(device)
    run = st.bucketed(net, DIMS)
    x = rows(5, device)
    run(x)
    for t in (*net.parameters(), net.table, net.shift):
        t.mul_(1.5)
    torch.testing.assert_close(run(x), net(x))
    assert counted.take() == (1, 1)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "subtensors": lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9),
}


def transposed_state(opt: Any, p: Tensor) -> None:
    held = opt.state[p]["momentum_buffer"]
    held.data = held.data.t()


def new_state(opt: Any, p: Tensor) -> None:
    opt.state[p]["momentum_buffer"] = opt.state[p]["momentum_buffer"] * 2


def no_state(opt: Any, p: Tensor) -> None:
    del opt.state[p]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("replace", [transposed_state, new_state, no_state])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replaced_optimizer_state_is_recaptured(
    device: str, name: str, replace: Callable[[Any, Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    start = rows(3, device)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    opts = [OPTIMIZERS[way]([w]) for way, w in zip((name, "torch"), weights, strict=True)]

    def step_of(weight: Tensor, opt: Any) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = (x @ weight).softmax(0).square().sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return step

    plain = step_of(weights[1], opts[1])
    run = st.bucketed(step_of(weights[0], opts[0]), DIMS)
    for i in range(5):
        x = rows(5, device)
        with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
            torch.testing.assert_close(run(x), plain(x))
        assert_same(*weights)
        if i == 2:
            for weight, opt in zip(weights, opts, strict=True):
                replace(opt, weight)
    assert [m for m in caplog.messages if "state of an optimizer was replaced" in m] == [
        "step is recaptured: the state of an optimizer was replaced"
    ]


@pytest.mark.parametrize("replace", [Tensor.t, Tensor.clone])
def test_the_address_of_an_accumulated_gradient_is_guarded(replace: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.ones(3, 3))

    def program(x: Tensor) -> None:
        (x @ weight).sum().backward()

    program(torch.ones(2, 3))
    effects = SideEffects(State(program))
    with effects.noted(caller_runs_backward=False):
        program(torch.ones(2, 3))
    assert effects.no_replay_reason() == ""
    assert weight.grad is not None
    weight.grad.data = replace(weight.grad.data)
    assert "a gradient that the program adds to was replaced" in effects.no_replay_reason()
