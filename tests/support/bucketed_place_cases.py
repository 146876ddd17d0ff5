"""Cases of values in the places where methods, decorators, classes, optimizers and dicts keep them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bucketed_changes import Case, Program, Then, assign, double_parameter, linear, put, replace, vector
from torch import Tensor, nn

config = SimpleNamespace(scale=1.0)


class InForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0) * config.scale


class InHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(x.softmax(0))

    def _scaled(self, x: Tensor) -> Tensor:
        return x * config.scale


class InStaticMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x.softmax(0))

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * config.scale


class InObject:
    def __call__(self, x: Tensor) -> Tensor:
        return x.softmax(0) * config.scale


def of_a_file(kind: type) -> Callable[[str], Program]:
    def make(device: str) -> Program:
        global config
        config = SimpleNamespace(scale=1.0)
        return Program(call=kind(), file=sys.modules[__name__])

    return make


def of_a_closure(device: str) -> Program:
    own = SimpleNamespace(scale=1.0)

    class ReadsItsClosure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(0) * own.scale

    def change() -> None:
        nonlocal own
        own = SimpleNamespace(scale=own.scale + 1)

    return Program(call=ReadsItsClosure(), own=own, replace=change)


def of_a_class(device: str) -> Program:
    class HasConfig(nn.Module):
        config = SimpleNamespace(scale=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(0) * self.config.scale

    return Program(call=HasConfig(), kind=HasConfig)


def decorated(device: str) -> Program:
    net, options = linear(device), SimpleNamespace(scale=1.0)

    def scaled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(function)
        def wrapper(x: Tensor) -> Tensor:
            return function(net(x) * options.scale + net.training)

        return wrapper

    @scaled
    def program(x: Tensor) -> Tensor:
        return x.softmax(0)

    return Program(call=program, net=net, options=options)


class AddsAll(nn.Module):
    """Adds what is registered with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        x = x.softmax(0)
        for layer in self.layers:
            x = layer(x)
        for t in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            x = x + t
        return x


def adds_all(device: str) -> Program:
    return Program(call=AddsAll().train(), device=device)


def two_groups(device: str) -> Program:
    weights = [nn.Parameter(vector(device)), nn.Parameter(vector(device, 2))]
    opt = torch.optim.SGD([{"params": [w], "lr": lr} for w, lr in zip(weights, (0.1, 0.5), strict=True)])

    def step(x: Tensor) -> Tensor:
        loss = ((x * weights[0]).softmax(0) * weights[1]).square().sum()
        loss.backward()
        opt.step()
        for w in weights:
            w.grad = None
        return loss.detach()

    return Program(call=step, groups=opt.param_groups, net=nn.ParameterList(weights))


def swap_groups(p: Program) -> None:
    first, second = p.groups
    first["params"], second["params"] = second["params"], first["params"]


def step_one_twice(p: Program) -> None:
    p.groups[0]["params"] = [p.groups[1]["params"][0]]


def sums_a_dict(device: str) -> Program:
    keys: dict[Any, float] = {0.0: 1.0}

    def program(x: Tensor, given: dict[Any, float]) -> Tensor:
        return torch.stack([value * x.softmax(0) / key for key, value in given.items()]).sum(0)

    return Program(call=program, arguments=(keys,), keys=keys)


def negate_the_key(p: Program) -> None:
    p.keys.clear()
    p.keys[-0.0] = 1.0


PLACES = [
    *[
        Case(f"{path} {kind.__name__}", of_a_file(kind), put(path, value), warning)
        for kind in (InForward, InHelper, InStaticMethod, InObject)
        for path, value, warning in (
            ("file.config.scale", 2.0, "scale changed"),
            ("file.config", SimpleNamespace(scale=2.0), "config was replaced"),
        )
    ],
    Case("an attribute of an object in a method's closure", of_a_closure, put("own.scale", 2.0), "scale changed"),
    Case("an object in a method's closure", of_a_closure, lambda p: p.replace(), "a part of the program was replaced"),
    Case("an object of a class", of_a_class, put("kind.config", SimpleNamespace(scale=2.0)), "config was replaced"),
    Case("an attribute of an object of a class", of_a_class, put("kind.config.scale", 2.0), "scale changed"),
    Case("a parameter in a decorator", decorated, replace("net.weight", double_parameter), "weight was replaced"),
    Case("an attribute in a decorator", decorated, put("options.scale", 2.0), "scale changed"),
    Case("a mode in a decorator", decorated, lambda p: p.net.eval(), then=Then.CAPTURES_ANOTHER),
    Case("a first submodule", adds_all, lambda p: p.call.layers.append(linear(p.device)), "a module got its first"),
    Case("a first buffer", adds_all, lambda p: p.call.register_buffer("b", vector(p.device)), "a module got its first"),
    Case("a first parameter", adds_all, assign("call.w", lambda device: nn.Parameter(vector(device))),
         "a module got its first"),
    *[
        Case(f"parameters of groups, which {what}", two_groups, change, "the parameters of an optimizer changed",
             before=(5, 5, 5), gradients=True)
        for what, change in {"are swapped": swap_groups, "are replaced": step_one_twice}.items()
    ],
    Case("the sign of a key of a dict", sums_a_dict, negate_the_key, then=Then.CAPTURES_ANOTHER),
]  # fmt: skip
