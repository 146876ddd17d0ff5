"""`accumulate=`: the training loop is unchanged, and every n-th step updates by the mean of the passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from optimizers import TORCH_NAMES
from small_models import loss_of, model, ones

import subtensors as st


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: range) -> None:
    """A loop that knows nothing of accumulation."""
    for number in losses:
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(net: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: range, passes: int) -> None:
    for number in losses:
        (loss_of(net, number) / passes).backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", [*TORCH_NAMES, "Lion"])
def test_a_loop_that_knows_nothing_of_it_trains_as_one_by_hand(name: str, device: str) -> None:
    ours, theirs = model(device), model(device)
    train(ours, getattr(st.optim, name)(ours.parameters(), lr=0.01, accumulate=3), range(12))
    package = st.optim if name == "Lion" else torch.optim
    train_by_hand(theirs, getattr(package, name)(theirs.parameters(), lr=0.01), range(12), 3)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_clipping_is_by_the_norm_of_the_mean(device: str) -> None:
    ours, theirs = model(device), model(device)
    train(ours, st.optim.SGD(ours.parameters(), lr=0.1, accumulate=2, max_norm=0.1), range(8))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    plain.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1) and None)
    train_by_hand(theirs, plain, range(8), 2)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_a_loss_scale_that_may_change_between_passes_is_refused() -> None:
    (p,) = ones(1)
    optimizer = st.optim.AdamW([p], accumulate=2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((p * p).sum()).backward()
    with pytest.raises(RuntimeError, match="accumulate=2 adds up gradients of several loss scales"):
        scaler.step(optimizer)


def test_the_kernels_divide_by_the_passes() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=4)
    with kernels_on_cpu():
        for _ in range(4):
            optimizer.step()
    assert p.item() == 1 - 1 / 4


def test_gradients_are_kept_until_the_update_and_dropped_after_it() -> None:
    (p,) = ones(1)
    optimizer = st.optim.SGD([p], lr=1.0, accumulate=2)
    optimizer.zero_grad()
    assert p.grad is None
    p.grad = torch.ones(1)
    optimizer.step()
    optimizer.zero_grad()
    assert (p.item(), p.grad.item()) == (1.0, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert (p.item(), p.grad) == (0.5, None)


@pytest.mark.parametrize("passes", [0, -1, 1.5])
def test_passes_that_cannot_be_counted_are_refused(passes: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid accumulate: {passes}"):
        st.optim.SGD(ones(1), accumulate=passes)


def test_groups_that_would_update_at_different_times_are_refused() -> None:
    a, b = ones(2)
    with pytest.raises(ValueError, match="Invalid accumulate: 2; another group has 1"):
        st.optim.SGD([{"params": [a]}, {"params": [b], "accumulate": 2}])
