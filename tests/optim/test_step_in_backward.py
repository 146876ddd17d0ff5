"""Steps within the backward pass: they end where plain steps do, with few gradients alive at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subtensors as st

WIDTH, LAYERS = 32, 6
LAYER = 4 * WIDTH * (WIDTH + 1)
"""Bytes of the gradients of a layer."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def alive(net: nn.Module) -> int:
    """Count the bytes of gradients."""
    return sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)


def largest(net: nn.Module, x: Tensor) -> int:
    """Run a backward, and count the most bytes of gradients that are there at once."""
    seen: list[int] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda _: seen.append(alive(net))) for p in net.parameters()]
    net(x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return max(*seen, alive(net))


MAKERS: dict[str, Any] = {
    "AdamW": lambda net: st.optim.AdamW(net.parameters(), lr=1e-2),
    "SGD": lambda net: st.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "8-bit state and averages": lambda net: st.optim.Adam(net.parameters(), ema=0.9, state_dtype="int8"),
    "matrices": lambda net: st.optim.SOAP(net.parameters(), lr=1e-3),
    "groups": lambda net: st.optim.Adam([{"params": [p], "lr": 1e-3} for p in net.parameters()]),
    "schedule-free": lambda net: st.optim.AdamWScheduleFree(net.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("bucket_size", [1, LAYER, "1GiB"])
def test_parameters_and_state_end_where_plain_steps_end(maker: str, bucket_size: int | str) -> None:
    ends = []
    for in_backward in (True, False):
        net = model()
        opt = MAKERS[maker](net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        if in_backward:
            opt.step_in_backward(bucket_size)
        for x in torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1)):
            net(x).square().mean().backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
        ends.append(([p.detach() for p in net.parameters()], opt.state_dict()["state"]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_few_gradients_are_alive_at_a_time() -> None:
    net, x = model(), torch.randn(8, WIDTH)
    opt = st.optim.AdamW(net.parameters())
    assert largest(net, x) == LAYERS * LAYER
    opt.zero_grad()
    hooks = opt.step_in_backward(bucket_size=LAYER)
    assert largest(net, x) <= LAYER + 4 * WIDTH * WIDTH
    assert alive(net) < LAYER  # what is left to `step()`
    hooks.remove()
    opt.zero_grad()
    assert largest(net, x) == LAYERS * LAYER


def test_hooks_do_not_keep_the_optimizer_alive() -> None:
    net = model()
    st.optim.SGD(net.parameters(), lr=0.1).step_in_backward(1)
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.ones(1, WIDTH)).sum().backward()
    torch.testing.assert_close([p.detach() for p in net.parameters()], before, rtol=0, atol=0)


REFUSALS: dict[str, dict[str, Any]] = {
    "max_norm needs": {"max_norm": 1.0},
    "accumulate adds up": {"accumulate": 2},
    "a captured step": {"graph": True},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_needs_all_gradients_is_refused(reason: str) -> None:
    with pytest.raises(RuntimeError, match=f"one by one, and {reason}"):
        st.optim.AdamW(model().parameters(), **REFUSALS[reason]).step_in_backward()


def test_an_option_that_comes_later_is_refused_in_the_backward() -> None:
    net = model()
    opt = st.optim.AdamW(net.parameters())
    opt.step_in_backward(1)
    opt.param_groups[0]["max_norm"] = 1.0
    with pytest.raises(RuntimeError, match="max_norm needs"):
        net(torch.ones(1, WIDTH)).sum().backward()


def test_a_closure_and_a_scaler_come_too_late() -> None:
    net = model()
    opt = st.optim.SGD(net.parameters(), lr=0.1)
    opt.step_in_backward()
    with pytest.raises(RuntimeError, match="before a closure or a GradScaler"):
        opt.step(lambda: 0.0)
    net(torch.ones(1, WIDTH)).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="before a closure or a GradScaler"):
        scaler.step(opt)
