"""What may change between two calls of a bucketed program: the cases, and the programs that they change."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from bucketed_changes import (
    Case,
    Change,
    Program,
    Then,
    assign,
    cast_and_back,
    double,
    double_gradient,
    double_in,
    double_item,
    double_out,
    double_parameter,
    flip,
    linear,
    put,
    replace,
    vector,
)
from torch import Tensor, nn

import subtensors as st

# A module that reads a value in each of the places where Python finds one.

factor = 1.0
table = torch.ones(3)
shared = {"table": torch.ones(3)}
calls = 0
settings: Any = types.ModuleType("settings")


class Config:
    scale = 1.0
    table = torch.ones(3)


def scaled(x: Tensor) -> Tensor:
    return x * scaled.factor  # type: ignore[attr-defined]


class Slotted:
    """Has no dict of its attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1.0


class Everywhere(nn.Module):
    offset = 0.0

    def __init__(self, device: str) -> None:
        super().__init__()
        self.options = SimpleNamespace(shift=1.0)
        self.scale: Any = 1.0
        self.slotted = Slotted()
        self.power = (1, 1)
        self.kinds = {"rounds": 1}
        self.scales = [1.0]
        self.activation = torch.tanh
        self.inner = nn.Sequential(nn.Softmax(0), nn.Dropout(0.0))
        self.calls = 0
        self.mask: Tensor | None = None
        self.weight = nn.Parameter(vector(device))
        self.linear = linear(device)
        corner = torch.arange(12.0, dtype=torch.float64, device=device).view(2, 2, 3).mT
        self.register_buffer("shift", corner)
        self.table = vector(device)
        self.tables = [self.table * 2]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x * self.weight + self.shift[0, :, 1]) * self.table * self.tables[0]
        for _ in range(self.kinds["rounds"]):
            x = self.inner(x) * self.scale + self.options.shift + self.offset
        x = self.activation(x) * sum(self.scales) + getattr(self, "extra", 0.0) + self.inner.training
        if self.mask is not None:
            x = x * self.mask
        x = settings.scaled(x) * table * Config.scale * Config.table * settings.scale * settings.table
        x = x * shared["table"]
        return x ** self.power[0] * self.slotted.count * factor


def everywhere(device: str, kind: str = "a function") -> Program:
    """Make the module, and every namespace that it reads as it was at first."""
    Everywhere.offset = 0.0
    here = sys.modules[__name__]
    for namespace in (Config, settings, here):
        namespace.table = vector(device)  # type: ignore[attr-defined]
    shared["table"] = vector(device)
    Config.scale = settings.scale = scaled.factor = here.factor = 1.0  # type: ignore[attr-defined]
    settings.scaled = scaled
    net = Everywhere(device)
    exponent, gain, gains = 1, vector(device, 2), {"a": vector(device, 3)}

    def program(x: Tensor) -> Tensor:
        return net(x) ** exponent * gain * gains["a"]

    def set_exponent() -> None:
        nonlocal exponent
        exponent = 3

    def set_gain() -> None:
        nonlocal gain
        gain = gain * 4

    kinds = {"a module": net, "a method": net.forward, "a function": program}
    return Program(
        call=kinds[kind], net=net, device=device, file=here, config=Config, settings=settings, scaled=scaled,
        set_exponent=set_exponent, set_gain=set_gain, gains=gains,
    )  # fmt: skip


def hooked(device: str) -> Program:
    p = everywhere(device)
    p.hook = p.net.inner[0].register_forward_hook(double_out)
    return p


def write_in_place(p: Program) -> None:
    for t in (*p.net.parameters(), p.net.table, p.net.shift):
        t.data.mul_(1.5)


def write_what_is_not_read(p: Program) -> None:
    for namespace in (settings, Config, scaled, p.net.options):
        namespace.other = getattr(namespace, "other", 0) + 1
    # `calls` is an attribute in the program, no name of this file.
    p.file.calls += 1


STALE: list[tuple[str, Change, str]] = [
    ("a number of a module", put("net.scale", 2.0), "scale changed"),
    ("a number of a module, to a tensor", assign("net.scale", lambda device: vector(device, 2)), "scale"),
    ("an attribute that was None, to a tensor", assign("net.mask", lambda device: vector(device, 0)), "mask"),
    ("a tuple", put("net.power", (2, 1)), "power"),
    ("an attribute of an object", put("net.options.shift", 2.0), "shift"),
    ("an option of torch's module", put("net.inner.1.p", 1.0), "p changed, which a graph holds as a constant"),
    ("a function", put("net.activation", torch.exp), "activation"),
    ("a dict, which is replaced", put("net.kinds", {"rounds": 2}), "kinds was replaced"),
    ("a hook", lambda p: p.net.inner[0].register_forward_hook(double_out), "a hook of a module"),
    ("a hook before the forward", lambda p: p.net.inner.register_forward_pre_hook(double_in), "a hook of a module"),
    ("a submodule's mode", lambda p: p.net.inner.eval(), "a module changed between training and evaluation"),
    ("a parameter's data", replace("net.weight.data", double), "weight was replaced: its address changed"),
    ("a parameter's strides", replace("net.linear.weight.data", Tensor.t), "linear.weight was replaced: its strides"),
    ("a parameter", replace("net.weight", double_parameter), "weight was replaced: its address changed"),
    ("a parameter's data, cast and cast back", replace("net.weight.data", cast_and_back), "weight was replaced"),
    ("a buffer", replace("net.shift", double), "shift was replaced: its address changed"),
    ("a buffer's strides", replace("net.shift.data", flip), "shift was replaced: its strides changed"),
    ("a module", assign("net.linear", lambda device: linear(device, seed=1)), "a module was replaced"),
    ("a tensor of a module", replace("net.table", double), "table was replaced"),
    ("a tensor in a list", double_item("net.tables", 0), "a part of the program was replaced"),
    ("a tensor that the program closes over", lambda p: p.set_gain(), "a part of the program was replaced"),
    ("a tensor in a dict of the file", double_item("file.shared", "table"), "table was replaced"),
    ("a tensor in a dict that the program closes over", double_item("gains", "a"), "a was replaced"),
]
"""Changes of the module above, and why its graph is captured again."""

NAMESPACES = ["file.table", "config.table", "settings.table"]

UNWATCHED: dict[str, Change] = {
    "an entry of a dict": double_item("net.kinds", "rounds"),
    "a list, which grows": lambda p: p.net.scales.append(2.0),
    "an attribute of the class": put("net.__class__.offset", 1.0),
    "an attribute that hides the class's": put("net.offset", 1.0),
    "an attribute that is new": put("net.extra", 1.0),
    "a module's forward": put("net.inner.0.forward", double),
    "a number that the program closes over": lambda p: p.set_exponent(),
    "a number of the file": put("file.factor", 5.0),
    "a number of another class": replace("config.scale", double),
    "a number of another file": replace("settings.scale", double),
    "a number of a function": replace("scaled.factor", double),
    "a slot of an object": replace("net.slotted.count", double),
}
"""Changes of the module above that nothing watches."""


# An object whose method is the program.


class Job:
    def __init__(self, device: str) -> None:
        self.net = linear(device)
        self.mean, self.table, self.tables = vector(device), vector(device), [vector(device)]

    @property
    def scale(self) -> Tensor:
        return self.table * self.tables[0]

    def step(self, x: Tensor) -> Tensor:
        return self._scaled(x).softmax(0)

    def _scaled(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def job(device: str) -> Program:
    made = Job(device)
    return Program(call=made.step, job=made, net=made.net)


# Gradients and optimizers.


def layers(device: str) -> Program:
    net = nn.Sequential(linear(device), nn.Tanh(), linear(device, 1))
    return Program(call=lambda x: net(x), net=net)


def with_backward_hook(device: str) -> Program:
    p = layers(device)
    p.hook = p.net[1].register_full_backward_hook(double_gradient)
    return p


def training_step(package: Any) -> Callable[[str], Program]:
    def make(device: str) -> Program:
        net = linear(device)
        opt = package.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            loss = net(x).softmax(0).square().sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return Program(call=step, net=net, opt=opt)

    return make


def momentum(new: Callable[[Tensor], Tensor], is_data: bool = False) -> Change:
    def change(p: Program) -> None:
        entry = p.opt.state[p.net.weight]
        if is_data:
            entry["momentum_buffer"].data = new(entry["momentum_buffer"].data)
        else:
            entry["momentum_buffer"] = new(entry["momentum_buffer"])

    return change


def load_state(p: Program) -> None:
    saved = p.opt.state_dict()
    for entry in saved["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].neg()
    p.opt.load_state_dict(saved)


OPTIMIZER_STATE = {
    "is transposed": momentum(Tensor.t, is_data=True),
    "is replaced": momentum(double),
    "is deleted": lambda p: p.opt.state.pop(p.net.weight),
    "is loaded": load_state,
}


# Arguments besides x.


class Inner:
    power: int


class Held:
    """Holds values of all kinds, and has a method."""

    def __init__(self) -> None:
        self.scales = [1.0, 2.0]
        self.named = {"shift": 1.0}
        self.inner = Inner()
        self.inner.power = 1
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.factor = 1.0

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclass
class Options:
    scale: float


def with_objects(device: str) -> Program:
    held, slotted, options, net = Held(), Slotted(), Options(1.0), linear(device)

    def program(x: Tensor, held: Held, slotted: Slotted, options: Options, net: nn.Module) -> Tensor:
        y = held.activation(net(x)).softmax(0) * held.scales[0] + held.named["shift"]
        return y**held.inner.power * slotted.count * options.scale

    return Program(call=program, arguments=(held, slotted, options, net), held=held, slotted=slotted, options=options,
                   net=net)  # fmt: skip


def with_function(kind: str) -> Callable[[str], Program]:
    def make(device: str) -> Program:
        factor, held = 1.0, Held()

        def times(x: Tensor) -> Tensor:
            return x * factor

        partial = functools.partial(torch.mul, other=1.0)

        def change() -> None:
            nonlocal factor
            factor = held.factor = partial.keywords["other"] = factor + 1

        function = {"a closure": times, "a method": held.times, "a partial": partial}[kind]
        return Program(call=lambda x, f: f(x.softmax(0)), arguments=(function,), change=change)

    return make


ARGUMENTS: list[tuple[str, Change]] = [
    ("an item of a list in an argument", double_item("held.scales", 0)),
    ("an entry of a dict in an argument", double_item("held.named", "shift")),
    ("an attribute of an object in an argument", put("held.inner.power", 2)),
    ("a function in an argument", put("held.activation", torch.exp)),
    ("a slot of an argument", put("slotted.count", 2.0)),
    ("a parameter of a module in an argument", replace("net.weight", double_parameter)),
    ("a parameter's data in an argument", replace("net.bias.data", double)),
]

CASES = [
    *[Case(name, everywhere, change, warning) for name, change, warning in STALE],
    *[
        Case(f"{path} that {kind} reads", functools.partial(everywhere, kind=kind), replace(path, double), times=2)
        for path in NAMESPACES
        for kind in ("a module", "a method", "a function")
    ],
    Case("a hook, which is removed", hooked, lambda p: p.hook.remove(), "a hook of a module"),
    Case("a tensor, before a call of a new size", everywhere, replace("net.table", double), "table was replaced",
         before=(5, 20), after=(12, 5, 20, 12), captures=3),
    Case("a parameter, before calls of new sizes", everywhere, replace("net.weight", double_parameter),
         "weight was replaced", before=(5,), after=(30, 5, 12, 30, 5), captures=3),
    Case("a mode", everywhere, lambda p: p.net.eval(), then=Then.CAPTURES_ANOTHER, back=lambda p: p.net.train()),
    Case("tensors, which are written in place", everywhere, write_in_place, then=Then.REPLAYS),
    Case("values that the program doesn't read", everywhere, write_what_is_not_read, then=Then.REPLAYS, is_seen=False,
         times=3, before=(5, 20), after=(6, 21)),
    Case("a tensor that a method doesn't read", job, replace("job.mean", double), then=Then.REPLAYS, is_seen=False),
    Case("a tensor in a property", job, replace("job.table", double), "table was replaced", gradients=True),
    Case("a tensor in a list in a property", job, double_item("job.tables", 0), "a part of the program was replaced",
         gradients=True),
    Case("a backward hook", layers, lambda p: p.net[1].register_full_backward_hook(double_gradient),
         "a hook of a module", gradients=True, is_seen=False),
    Case("a backward hook, which is removed", with_backward_hook, lambda p: p.hook.remove(), "a hook of a module",
         gradients=True, is_seen=False),
    *[
        Case(f"the state of {package.__name__}.SGD, which {what}", training_step(package), change,
             "the state of an optimizer was replaced", before=(5, 5, 5), gradients=True)
        for package in (torch.optim, st.optim)
        for what, change in OPTIMIZER_STATE.items()
    ],
    *[Case(name, with_objects, change, then=Then.CAPTURES_ANOTHER) for name, change in ARGUMENTS],
    *[
        Case(f"a number in {kind}", with_function(kind), lambda p: p.change(), then=Then.CAPTURES_ANOTHER, times=2)
        for kind in ("a closure", "a method", "a partial")
    ],
    Case("an option in a dataclass", with_objects, put("options.scale", 2.0), then=Then.CAPTURES_ANOTHER,
         back=put("options.scale", 1.0)),
    Case("tensors in an argument, in place", with_objects, lambda p: p.net.weight.data.mul_(3), then=Then.REPLAYS),
]  # fmt: skip
