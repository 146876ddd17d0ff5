"""Hooks of modules, and dispatch modes around a runner and PaddedTensors, see what they are to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bucketed_rows import SEQ, assert_same, rows
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import subtensors as st

DIMS = {"input": {0: SEQ}}


def net(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).to(device, torch.float64)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("grad", [False, True])
def test_hooks_of_modules_are_a_part_of_the_program(grad: bool, device: str) -> None:
    own, alone = net(device), net(device)
    for model in (own, alone):
        model[0].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        model[2].register_forward_hook(lambda module, given, out: out * 2)
        model[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 3,))
    run = st.bucketed(own, DIMS)
    with torch.set_grad_enabled(grad):
        for n in (5, 6, 20, 7):
            x = rows(n, device)
            found, expected = run(x), alone(x)
            assert_same(found, expected)
            if grad:
                for out in (found, expected):
                    out.square().sum().backward()
                assert_same([p.grad for p in own.parameters()], [p.grad for p in alone.parameters()])
    assert run.stats().hits == 2
    assert not run.stats().fallbacks


@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_around_a_call_sees_the_programs_ops(grad: bool, device: str) -> None:
    own = net(device)
    run = st.bucketed(own, DIMS)

    def flops(call: Any, x: Tensor) -> int:
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as mode:
            out = call(x)
            if grad:
                out.sum().backward()
        return mode.get_total_flops()

    with torch.set_grad_enabled(grad):
        run(rows(5, device))
    for n in (5, 6):
        x = rows(n, device)
        assert flops(run, x) == flops(own, x) > 0
    assert run.stats().fallbacks == {"a dispatch mode is around it, which is to see each op": 2}


def test_a_dispatch_mode_counts_the_padded_ops_of_a_padded_tensor(device: str) -> None:
    model, x = net(device), rows(5, device)
    with FlopCounterMode(display=False) as padded:
        model(st.pad(x, {0: SEQ})).sum().backward()
    with FlopCounterMode(display=False) as dense:
        model(torch.zeros(8, 3, dtype=torch.float64, device=device)).sum().backward()
    assert padded.get_total_flops() == dense.get_total_flops() > 0
