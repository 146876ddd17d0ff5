"""A runner has its program's attributes, and can take its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from torch import Tensor, nn

import subtensors as st


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.config = {"width": 3}
        self.name = "its own"

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).softmax(1)

    def scores(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.fixture
def net() -> Net:
    return Net().double()


@pytest.fixture
def run(net: Net) -> Any:
    return st.bucketed(net, {"x": {1: SEQ}})


def test_a_runner_has_the_attributes_of_its_module(net: Net, run: Any) -> None:
    assert run.config is net.config
    assert run.linear is net.linear
    assert [*run.parameters()] == [*net.parameters()]
    assert run.state_dict().keys() == net.state_dict().keys()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(run.scores(x), net.scores(x))


def test_a_method_that_returns_the_module_returns_the_runner(net: Net, run: Any) -> None:
    assert run.eval() is run
    assert not net.training
    assert run.training is False
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run(x), net(x))
    assert run.train().training
    assert run.requires_grad_(False) is run
    assert not any(p.requires_grad for p in net.parameters())


def test_a_step_of_the_runner_s_parameters_is_one_of_the_module_s(net: Net, run: Any) -> None:
    twin = copy.deepcopy(net).eval()
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (run.eval(), twin)]
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    for _ in range(3):
        for program, opt in zip((run, twin), optimizers, strict=True):
            opt.zero_grad()
            program(x).square().sum().backward()
            opt.step()
    torch.testing.assert_close([*run.parameters()], [*twin.parameters()])


def test_a_runner_s_own_attributes_come_first(net: Net, run: Any) -> None:
    assert run.name == "Net"
    assert run.program.name == "its own"


@pytest.mark.parametrize("program", [torch.exp, Net()])
def test_an_attribute_that_neither_has_is_an_error(program: Any) -> None:
    run = st.bucketed(program, {0: {0: SEQ}})
    with pytest.raises(AttributeError, match="neither 'Bucketed' nor its program has an attribute 'nothing'"):
        _ = run.nothing
    assert not hasattr(run, "nothing")
    assert not hasattr(run, "__fspath__")


def test_a_copy_is_a_runner_of_a_copied_program(net: Net, run: Any) -> None:
    twin = copy.deepcopy(run)
    assert twin.linear is not net.linear
    assert twin.eval() is twin
