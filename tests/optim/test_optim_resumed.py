"""Training that was saved at any step, or copied, goes on to the last bit as if it had never stopped."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from kernels_on_cpu import kernels_on_cpu
from optimizers import CASES, Case
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import ExponentialLR

SHAPES = [(3, 5), (5, 3), (4, 4)]
VECTORS = [(7,), (), (1,), (2, 3, 2)]
STEPS = 6

Program = dict[str, Any]
"""How an optimizer is made, and what happens to it: drawn by `programs`."""


class Net(nn.Module):
    """Parameters without a forward: gradients are drawn."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        shapes = SHAPES + ([] if program["case"].name == "Muon" else VECTORS)
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator).to(program["dtype"])
            self.register_parameter(f"p{i}", nn.Parameter(value))


@some.composite
def programs(draw: some.DrawFn) -> Program:
    case: Case = draw(some.sampled_from(CASES))
    options: dict[str, Any] = dict(case.options)
    options |= draw(some.sampled_from([{}, *case.variants, case.state_options or {}]))
    options |= draw(
        some.fixed_dictionaries(
            {},
            optional={
                "master_weights": some.just(True),
                "max_norm": some.just(1.0),
                "ema": some.just(0.75),
                "accumulate": some.sampled_from([2, 3]),
                **({"state_dtype": some.just("int8")} if case.cls.low_bit else {}),
            },
        )
    )
    options = {name: value for name, value in options.items() if name not in ("fused", "capturable")}
    return {
        "case": case,
        "options": options,
        "dtype": draw(some.sampled_from([torch.float32, torch.bfloat16])),
        "lr": draw(some.sampled_from([0.01, 0.1])),
        "tensor_lr": draw(some.booleans()),
        "two_groups": draw(some.booleans()),
        "schedule": draw(some.booleans()),
        "skipped": draw(some.sampled_from([(), (0,), (1, 2)])),
        "stop": draw(some.integers(0, STEPS)),
        "way": draw(some.sampled_from(WAYS)),
    }


def make(program: Program, net: nn.Module) -> Any:
    params = list(net.parameters())
    lr = torch.tensor(program["lr"]) if program["tensor_lr"] else program["lr"]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": program["lr"] / 2}]
    return program["case"].cls(groups if program["two_groups"] else params, **{**program["options"], "lr": lr})


def schedule_of(program: Program, optimizer: Any) -> Any:
    return ExponentialLR(optimizer, 0.9) if program["schedule"] else None


def train(program: Program, net: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(net.parameters()):
            g = torch.randn(p.shape, generator=generator).to(p.dtype)
            if i in program["skipped"] and step % 2:
                continue
            p.grad = g if p.grad is None else p.grad + g
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def loaded(program: Program, saved: Any) -> tuple[nn.Module, Any]:
    """A new program with the weights and state of a saved one."""
    weights, state = saved
    net = Net(program)
    optimizer = make(program, net)
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return net, optimizer


def by_state_dict(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return loaded(program, copy.deepcopy((net.state_dict(), optimizer.state_dict())))


def by_file(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    buffer = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    return loaded(program, torch.load(buffer, weights_only=True))


def by_copy(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy((net, optimizer))


def by_pickle(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return pickle.loads(pickle.dumps((net, optimizer)))  # type: ignore[no-any-return]


def by_going_back(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """The same objects, loaded with what they were before two more steps."""
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(program, net, optimizer, None, range(100, 102))
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return net, optimizer


def by_checkpoint(program: Program, net: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    options = StateDictOptions(strict=not program["skipped"])
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
    again = Net(program)
    again.load_state_dict(net.state_dict())
    other = make(program, again)
    set_optimizer_state_dict(again, other, saved, options=options)
    return again, other


WAYS = [by_state_dict, by_file, by_copy, by_pickle, by_going_back, by_checkpoint]


def assert_resumed(program: Program, *, captured: bool = False, packed: bool = False) -> None:
    def begin() -> tuple[nn.Module, Any]:
        net = Net(program)
        optimizer = make(program, net)
        if captured:
            optimizer.capture(packed=packed)
        return net, optimizer

    whole, reference = begin()
    train(program, whole, reference, schedule_of(program, reference), range(STEPS))
    net, optimizer = begin()
    schedule = schedule_of(program, optimizer)
    train(program, net, optimizer, schedule, range(program["stop"]))
    again, other = program["way"](program, net, optimizer)
    if captured and other._capture is None:
        other.capture(packed=packed)
    if schedule is not None:
        schedule = resumed_schedule(other, schedule.state_dict())
    train(program, again, other, schedule, range(program["stop"], STEPS))
    for name, p in whole.named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name
    torch.testing.assert_close(other.state_dict()["state"], reference.state_dict()["state"], rtol=0, atol=0)


def resumed_schedule(optimizer: Any, saved: Any) -> Any:
    """The schedule of a loaded optimizer, which keeps the learning rates that it was loaded with."""
    rates = [copy.deepcopy(group["lr"]) for group in optimizer.param_groups]
    schedule = ExponentialLR(optimizer, 0.9)
    schedule.load_state_dict(saved)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(lr, torch.Tensor):
            group["lr"].copy_(lr)
        else:
            group["lr"] = lr
    return schedule


@settings(max_examples=settings().max_examples * 3 // 5)
@given(program=programs())
def test_training_goes_on_as_if_it_had_never_stopped(program: Program) -> None:
    assert_resumed(program)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@settings(max_examples=max(4, settings().max_examples // 5))
@given(program=programs(), packed=some.booleans())
def test_captured_training_goes_on_as_if_it_had_never_stopped(program: Program, packed: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run on the CPU where there is no GPU")
    with kernels_on_cpu():
        assert_resumed(program, captured=True, packed=packed)
