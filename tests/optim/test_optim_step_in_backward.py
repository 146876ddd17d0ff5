"""Steps within the backward pass: they end where plain steps do, with few gradients alive at a time."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any, ClassVar

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


def largest(net: nn.Module, x: Tensor) -> int:
    """Run a backward, and return the most bytes of gradients that are there as each one arrives."""
    seen: list[int] = []
    hooks = [
        p.register_hook(
            lambda g: seen.append(g.nbytes + sum(q.grad.nbytes for q in net.parameters() if q.grad is not None))
        )
        for p in net.parameters()
    ]
    net(x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return max(seen)


class Halving(st.optim.Optimizer):
    """SGD whose attribute decides on a momentum."""

    state: ClassVar[Any] = {"buf": torch.zeros_like}

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.has_momentum = True

    def needs_state(self, entry: str, group: dict[str, Any]) -> bool:
        return self.has_momentum

    def update(self, p: Any, g: Any, buf: Any, *, lr: Any) -> None:
        p.sub_(lr * (g if buf is None else buf.mul_(0.5).add_(g)))


MAKERS: dict[str, Any] = {
    "AdamW": lambda net: st.optim.AdamW(net.parameters(), lr=1e-2),
    "SGD": lambda net: st.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "8-bit state and averages": lambda net: st.optim.Adam(net.parameters(), ema=0.9, state_dtype="int8"),
    "matrices": lambda net: st.optim.SOAP(net.parameters(), lr=1e-3),
    "groups": lambda net: st.optim.Adam([{"params": [p], "lr": 1e-3} for p in net.parameters()]),
    "schedule-free": lambda net: st.optim.AdamWScheduleFree(net.parameters(), lr=1e-2),
    "a class with attributes": lambda net: Halving(net.parameters()),
    "masters": lambda net: st.optim.AdamW(net.bfloat16().parameters(), lr=1e-2, master_weights=True),
}


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_parameters_and_state_end_where_plain_steps_end(maker: str, is_loaded: bool) -> None:
    ends = []
    for in_backward in (True, False):
        net = model()
        opt = MAKERS[maker](net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        if in_backward:
            opt.step_in_backward()
        for i, x in enumerate(torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))):
            net(x.to(net[0].weight.dtype)).square().mean().backward()
            assert all((p.grad is None) == in_backward for p in net.parameters())
            opt.step()
            schedule.step()
            opt.zero_grad()
            if i == 1 and is_loaded:
                opt.load_state_dict(opt.state_dict())
        ends.append(([p.detach() for p in net.parameters()], opt.state_dict()))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0, atol=0)
    torch.testing.assert_close(ends[0][1]["state"], ends[1][1]["state"], rtol=0, atol=0)
    assert ends[0][1]["param_groups"] == ends[1][1]["param_groups"]


def test_one_gradient_is_alive_at_a_time() -> None:
    net, x = model(), torch.randn(8, WIDTH)
    opt = st.optim.AdamW(net.parameters())
    assert largest(net, x) == LAYERS * LAYER
    opt.zero_grad()
    hooks = opt.step_in_backward()
    assert largest(net, x) <= LAYER
    for hook in hooks:
        hook.remove()
    assert largest(net, x) == LAYERS * LAYER


def test_a_tied_parameter_is_updated_once_and_others_are_left_to_the_step() -> None:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    opt = st.optim.SGD([*first.parameters()], lr=0.5)
    opt.step_in_backward()
    opt.add_param_group({"params": [*last.parameters()]})
    before = first.weight.detach().clone()
    first(last(first(torch.eye(4)))).sum().backward()
    changed, later = first.weight.detach().clone(), last.weight.detach().clone()
    assert [w.grad is None for w in (first.weight, last.weight)] == [True, False]
    leaf, other = before.requires_grad_(), later.clone()
    (torch.eye(4) @ leaf.T @ other.T @ leaf.T).sum().backward()
    torch.testing.assert_close(changed, before.detach() - 0.5 * leaf.grad)
    opt.step()
    assert [torch.equal(first.weight, changed), torch.equal(last.weight, later)] == [True, False]


def test_hooks_do_not_keep_the_optimizer_alive() -> None:
    net = model()
    opt = st.optim.SGD(net.parameters(), lr=0.1)
    opt.step_in_backward()
    net(torch.ones(1, WIDTH)).sum().backward()
    held = weakref.ref(opt._parts[net[0].weight])
    gc.disable()
    try:
        del opt
        assert held() is None
    finally:
        gc.enable()
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
    opt.step_in_backward()
    opt.param_groups[0]["max_norm"] = 1.0
    with pytest.raises(RuntimeError, match="max_norm needs"):
        net(torch.ones(1, WIDTH)).sum().backward()


def test_a_scaler_comes_too_late() -> None:
    net = model()
    opt = st.optim.SGD(net.parameters(), lr=0.1)
    opt.step_in_backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, WIDTH)).sum()).backward()
    with pytest.raises(RuntimeError, match="before a GradScaler"):
        scaler.step(opt)


def test_a_checkpoint_that_asks_for_state_before_leaves_the_steps_alone() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = model()
    opt = st.optim.AdamW(net.parameters(), lr=1e-2)
    get_state_dict(net, opt)
    opt.step_in_backward()
    for _ in range(2):
        net(torch.ones(1, WIDTH)).sum().backward()
        opt.step()
    assert all(state["step"] == 2 for state in opt.state_dict()["state"].values())


def test_state_is_made_at_the_first_update_from_what_the_parameters_are_then() -> None:
    ends = []
    for in_backward in (False, True):
        w = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        opt = st.optim.AdamW([w], lr=1e-2, master_weights=True, ema=0.5)
        if in_backward:
            opt.step_in_backward()
        with torch.no_grad():
            w.fill_(100.0)
        for _ in range(2):
            w.sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
        ends.append([w.detach(), *(x for x in opt.state[w].values() if isinstance(x, Tensor))])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_replacing_the_state_dict_of_an_optimizer_starts_its_state_again() -> None:
    w = nn.Parameter(torch.zeros(1))
    opt = st.optim.SGD([w], lr=1.0, momentum=0.5)
    opt.step_in_backward()
    for expected in (-1.0, -2.0, -3.5):
        w.sum().backward()
        assert w.item() == expected
        if expected == -1.0:
            opt.state = defaultdict(dict)


def test_a_parameter_is_updated_by_the_group_that_has_it() -> None:
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    opt = st.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.0}])
    opt.step_in_backward()
    opt.param_groups[0]["params"].insert(0, opt.param_groups[1]["params"].pop())
    (a + b).sum().backward()
    assert (a.item(), b.item()) == (pytest.approx(0.9), pytest.approx(0.9))
    opt.param_groups[0]["params"].pop()
    (a + b).sum().backward()
    assert (a.item(), a.grad, b.item()) == (pytest.approx(0.9), torch.ones(1), pytest.approx(0.8))


def test_an_update_that_a_scaler_skipped_is_the_only_one_skipped() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = st.optim.SGD([w], lr=0.5)
    opt.step_in_backward()
    opt.found_inf = torch.tensor(1.0)
    w.sum().backward()
    assert torch.equal(w, torch.ones(2))
    del opt.found_inf
    w.sum().backward()
    assert torch.equal(w, torch.full((2,), 0.5))
