"""The host's work that a GPU waits for: from `st.chunk` to the first product, and from there to its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from python_calls import python_calls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import subtensors as st
from subtensors.kernels.cross_entropy.linear_cross_entropy import LossPasses


class ReachedError(Exception):
    """The step has come as far as it is watched."""


class Ops(TorchDispatchMode):
    """The ops beneath autograd, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def until_reached(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(ReachedError):
            step()

    return run


@pytest.fixture
def step() -> Callable[[], Tensor]:
    hidden = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(48, 16, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(48, (32,))

    def loss() -> Tensor:
        return F.cross_entropy(F.linear(st.chunk(hidden, rows=8), weight).float(), target).realize()  # type: ignore[attr-defined]

    for _ in range(2):
        loss().backward()  # type: ignore[no-untyped-call]
    return loss


def reached(*args: Any, **kwargs: Any) -> Any:
    raise ReachedError


def test_little_python_runs_before_the_first_product(
    step: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", reached)
    with Ops() as ops, pytest.raises(ReachedError):
        step()
    # Memory for the logits, the first rows, and the weight as the product reads it.
    assert sorted(ops.names) == ["new_empty", "slice", "t"]
    caught = python_calls(until_reached(reached))
    assert python_calls(until_reached(step)) - caught <= 150


def test_the_autograd_node_is_made_after_all_chunks_were_launched(
    step: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    write, apply = LossPasses.fold_and_write_gradient, vars(torch.autograd.Function)["apply"]
    monkeypatch.setattr(LossPasses, "fold_and_write_gradient", lambda *args: order.append("chunk") or write(*args))

    def noted(cls: type[torch.autograd.Function], *args: Any) -> Any:
        order.append("node")
        return apply.__get__(None, cls)(*args)

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(noted))
    step()
    assert order == ["chunk"] * 4 + ["node"]
