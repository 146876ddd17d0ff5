"""Training steps under `torch.compile` that include the optimizer's step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import subtensors as st


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(step: Callable[..., None], steps: int, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    optimizer = st.optim.AdamW(model.parameters(), lr=0.1, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    for _ in range(steps):
        step(model, optimizer, torch.ones(5, 3, device=device))
        schedule.step()
    return [p.detach() for p in model.parameters()]


def test_a_compiled_training_step_runs_the_optimizers_step_eagerly(device: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(train_step, backend=counter)
    few = trained(compiled, 3, device)
    graphs = counter.frame_count
    torch.testing.assert_close(few, trained(train_step, 3, device))
    # The model's forward pass, and no Python of the optimizer's.
    assert counter.op_count <= 10
    torch.testing.assert_close(trained(compiled, 6, device), trained(train_step, 6, device))
    assert counter.frame_count <= graphs + 1  # for a model that is another one


def test_a_step_that_is_itself_compiled_is_the_step() -> None:
    counter = CompileCounter()
    p = nn.Parameter(torch.ones(3))
    optimizer = st.optim.Adam([p], lr=0.5)
    other = nn.Parameter(copy.deepcopy(p.detach()))
    expected = st.optim.Adam([other], lr=0.5)
    step: Any = torch.compile(optimizer.step, backend=counter)
    for _ in range(3):
        p.grad, other.grad = torch.ones(3), torch.ones(3)
        step()
        expected.step()
    assert torch.equal(p, other)
    assert not counter.frame_count


def test_a_graph_that_may_not_break_at_a_step_is_refused_with_the_reason() -> None:
    optimizer = st.optim.SGD([nn.Parameter(torch.ones(3))])

    @torch.compile(backend="eager", fullgraph=True)
    def stepped(x: Tensor) -> Tensor:
        optimizer.step()
        return x * 2

    with pytest.raises(Exception, match="a step runs its own kernels"):
        stepped(torch.ones(2))
