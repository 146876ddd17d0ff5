"""The batches of a group are kept from step to step, and made again when something changes."""

from __future__ import annotations

import re

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu
from python_calls import python_calls
from small_models import ones
from torch.nn import Parameter

import subtensors as st
from subtensors.kernels.fused.launch import Grid


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are stubbed where Triton interprets")
def test_a_step_runs_as_much_python_for_a_thousand_tensors_as_for_ten(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grid, "launch", lambda *_: None)

    def calls(count: int) -> int:
        params = [Parameter(torch.ones(i % 3 + 1, device=device)) for i in range(count)]
        optimizer = getattr(st.optim, name)(params)
        with kernels_on_cpu():
            for number in range(4):
                for p in params:
                    p.grad = torch.ones_like(p) if p.grad is None or number < 2 else p.grad
                seen = python_calls(optimizer.step)
        return seen

    assert 0 < calls(1000) == calls(10)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_parameters_at_the_addresses_of_earlier_ones_are_updated_with_their_own_shapes(name: str, device: str) -> None:
    memory, gradients = torch.zeros(64, device=device), torch.zeros(64, device=device)
    with kernels_on_cpu():
        for dtype, size in [(torch.float32, 3), (torch.float32, 5), (torch.bfloat16, 5), (torch.float16, 5)] * 2:
            p = Parameter(memory.view(dtype)[:size].fill_(1))
            p.grad = gradients.view(dtype)[:size].fill_(1)
            optimizer = getattr(st.optim, name)([p], lr=0.25)
            for _ in range(2):
                optimizer.step()
            assert p.tolist() == pytest.approx([0.5] * size)


def test_the_batches_of_a_group_are_made_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    params = ones(8)
    optimizer = st.optim.Adam(params)
    optimizer.step()
    batches = optimizer._updater.groups[0].batches
    for _ in range(3):
        optimizer.zero_grad()
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer._updater.groups[0].batches is batches
    params[3].grad = None
    optimizer.step()
    assert optimizer._updater.groups[0].batches is not batches
    assert re.fullmatch(r"\[0, 1, 2, 4, 5, 6, 7\]", str(optimizer._updater.groups[0].batches[0].indices))
