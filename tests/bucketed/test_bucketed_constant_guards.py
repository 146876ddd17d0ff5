"""Values that a program's Python reads are constants of its graphs: a change is recaptured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketed_rows import DIMS, rows
from counted_buckets import Counted
from torch import Tensor, nn

import subtensors as st

pytestmark = pytest.mark.usefixtures("captured")

factor = 1.0
"""Of the file."""
calls = 0


class Options:
    def __init__(self) -> None:
        self.shift = 1.0


class Net(nn.Module):
    """What it computes depends on a value in each of the places where Python finds one."""

    offset = 0.0

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.scale: Any = 1.0
        self.power = (1, 1)
        self.kinds = {"rounds": 1}
        self.scales = [1.0]
        self.activation = torch.tanh
        self.inner = nn.Sequential(nn.Softmax(0), nn.Dropout(0.0))
        self.calls = 0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(self.kinds["rounds"]):
            x = self.inner(x) * self.scale + self.options.shift + self.offset
        x = self.activation(x) * sum(self.scales) + getattr(self, "extra", 0.0)
        if self.mask is not None:
            x = x * self.mask
        return x ** self.power[0] * factor


class Program:
    """A function that closes over a net and a number."""

    def __init__(self, device: str) -> None:
        self.options = Options()
        net = self.net = Net(self.options)
        exponent = 1

        def program(x: Tensor) -> Tensor:
            return net(x) ** exponent  # type: ignore[no-any-return]

        def of_another_exponent() -> None:
            nonlocal exponent
            exponent = 3

        self.program, self.of_another_exponent, self.device = program, of_another_exponent, device
        self.hook: Any = None


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def of_another_factor(p: Program) -> None:
    globals()["factor"] = 5.0


def hooked(p: Program) -> None:
    p.net.inner[0].register_forward_hook(double)


def hooked_before(p: Program) -> None:
    p.net.inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


CHANGES: dict[str, tuple[Callable[[Program], Any], str]] = {
    "an attribute": (lambda p: setattr(p.net, "scale", 2.0), "scale"),
    "an attribute that becomes a tensor": (
        lambda p: setattr(p.net, "scale", torch.full((), 2.0, device=p.device)),
        "scale",
    ),
    "an attribute that was None": (lambda p: setattr(p.net, "mask", torch.zeros(3, device=p.device)), "mask"),
    "a tuple": (lambda p: setattr(p.net, "power", (2, 1)), "power"),
    "an object's attribute": (lambda p: setattr(p.options, "shift", 2.0), "shift"),
    "a dict": (lambda p: p.net.kinds.update(rounds=2), "rounds"),
    "a module of torch's": (lambda p: setattr(p.net.inner[1], "p", 1.0), "p"),
    "a class": (lambda p: setattr(type(p.net), "offset", 1.0), "offset"),
    "an attribute that hides the class's": (lambda p: setattr(p.net, "offset", 1.0), "offset"),
    "an attribute that is asked for": (lambda p: setattr(p.net, "extra", 1.0), "extra"),
    "a function": (lambda p: setattr(p.net, "activation", torch.exp), "activation"),
    "a method": (lambda p: setattr(p.net.inner[0], "forward", lambda x: x * 2), "forward"),
    "a list that grew": (lambda p: p.net.scales.append(2.0), "a list of the program"),
    "a dict that was replaced": (lambda p: setattr(p.net, "kinds", {"rounds": 2}), "kinds"),
    "a closure": (lambda p: p.of_another_exponent(), "a part of the program"),
    "a name of the file": (of_another_factor, "factor"),
    "a hook": (hooked, "a hook of a module"),
    "a hook before": (hooked_before, "a hook of a module"),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_changed_constant_is_recaptured_with_a_warning(
    device: str, name: str, counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(globals(), "factor", 1.0)
    monkeypatch.setattr(Net, "offset", 0.0)
    change, said = CHANGES[name]
    p = Program(device)
    run = st.bucketed(p.program, DIMS)
    x = rows(5, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), p.program(x))
    before = run(x)
    counted.take()
    change(p)
    with caplog.at_level(logging.WARNING, "subtensors.bucketed"):
        for _ in range(3):
            torch.testing.assert_close(run(x), p.program(x))
    assert not torch.equal(run(x), before)
    assert counted.recorded == 1
    assert len(caplog.records) == 1
    assert f" is recaptured: {said} " in caplog.text


def test_a_backward_hook_runs_until_it_is_removed(device: str) -> None:
    nets = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device, torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    run = st.bucketed(nets[0], {0: DIMS["x"]})

    def check() -> None:
        for n in (5, 6, 20):
            x = rows(n, device)
            for net, program in zip(nets, (run, nets[1]), strict=True):
                net.zero_grad()
                program(x).square().sum().backward()
            torch.testing.assert_close(nets[0][0].weight.grad, nets[1][0].weight.grad)

    check()
    hooks = [net[1].register_full_backward_hook(lambda module, given, out: (given[0] * 3,)) for net in nets]
    check()
    for hook in hooks:
        hook.remove()
    check()


@torch.no_grad()
def test_a_hook_that_was_removed_is_not_run(device: str, counted: Counted) -> None:
    net = nn.Sequential(nn.Softmax(0))
    hook = net[0].register_forward_hook(double)
    run = st.bucketed(net, {0: DIMS["x"]})
    x = rows(5, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), x.softmax(0) * 2)
    hook.remove()
    torch.testing.assert_close(run(x), x.softmax(0))
    assert counted.recorded == 2


@torch.no_grad()
def test_values_that_a_program_writes_or_does_not_read_may_change(
    device: str, monkeypatch: pytest.MonkeyPatch, counted: Counted
) -> None:
    p = Program(device)
    run = st.bucketed(p.program, DIMS)
    for i, n in enumerate((5, 6, 20, 7, 8)):
        # `calls` is an attribute in the program, no name of this file.
        monkeypatch.setitem(globals(), "calls", i)
        p.options.other = i  # type: ignore[attr-defined]
        x = rows(n, device)
        torch.testing.assert_close(run(x), p.program(x))
    assert (counted.recorded, run.stats().hits) == (2, 3)


@torch.no_grad()
def test_a_change_is_noticed_after_a_run_without_a_graph(device: str) -> None:
    p = Program(device)
    run = st.bucketed(p.program, DIMS)
    x, beyond = rows(5, device), rows(40, device)
    for _ in range(2):
        torch.testing.assert_close(run(x), p.program(x))
    run.state.take_snapshot()  # the program's own counter is among what is watched again
    p.net.scale = 3.0
    torch.testing.assert_close(run(beyond), p.program(beyond))
    torch.testing.assert_close(run(x), p.program(x))


@torch.no_grad()
def test_a_program_whose_constants_keep_changing_ends_without_a_graph(device: str) -> None:
    p = Program(device)
    run = st.bucketed(p.program, DIMS)
    x = rows(5, device)
    for i in range(12):
        p.net.scale = 1.0 + i
        torch.testing.assert_close(run(x), p.program(x))
    assert list(run.stats().fallbacks.values()) == [4]
    assert "captured 8 times in a row and not replayed once: scale changed" in next(iter(run.stats().fallbacks))
    run.release()
    for _ in range(3):
        torch.testing.assert_close(run(x), p.program(x))
    assert run.stats().hits == 2


@torch.no_grad()
def test_dropped_graphs_are_recaptured_whatever_on_miss_is(device: str) -> None:
    for on_miss in ("eager", "error"):
        net = nn.Linear(3, 3, dtype=torch.float64, device=device)
        run = st.bucketed(net, {"input": DIMS["x"]}, on_miss=on_miss)  # type: ignore[arg-type]
        x = rows(5, device)
        run.warmup(x, progress=False)
        for change in (lambda net=net: setattr(net, "weight", nn.Parameter(net.weight * 2)), run.release):
            change()
            for _ in range(2):
                torch.testing.assert_close(run(x), net(x))
        assert not run.stats().fallbacks


@torch.no_grad()
def test_an_object_argument_is_keyed_by_the_values_it_holds(device: str, counted: Counted) -> None:
    def program(x: Tensor, options: Options, net: nn.Module) -> Tensor:
        return net(x).softmax(0) * options.shift  # type: ignore[no-any-return]

    run = st.bucketed(program, DIMS)
    options, net = Options(), nn.Linear(3, 3, dtype=torch.float64, device=device)
    changes = [
        lambda: setattr(options, "shift", 2.0),
        lambda: setattr(net, "weight", nn.Parameter(net.weight * 2)),
        lambda: setattr(net.bias, "data", net.bias.data * 2),
    ]
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            x = rows(5, device)
            torch.testing.assert_close(run(x, options, net), program(x, options, net))
    assert counted.take() == (4, 4)
    net.weight.mul_(3)
    torch.testing.assert_close(run(x, options, net), program(x, options, net))
    assert counted.take() == (0, 1)
