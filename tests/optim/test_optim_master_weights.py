"""Master weights in float32 of narrower parameters: their accuracy, saving and loading, and when they begin."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_oracle import flat, start, take_steps, train
from optimizers import STATE_SHAPES
from torch.nn import Parameter

import subtensors as st


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
def test_master_weights_keep_what_rounding_each_step_would_lose(name: str, dtype: torch.dtype, device: str) -> None:
    values = start(device, dtype, STATE_SHAPES)
    cls = getattr(st.optim, name)

    def ending(dtype: torch.dtype, **kwargs: Any) -> tuple[list[Parameter], torch.optim.Optimizer]:
        return train(lambda p: cls(p, lr=1e-4, **kwargs), values, dtype, 60)

    truth = flat(ending(torch.float64)[0])
    with_masters, optimizer = ending(dtype, master_weights=True)
    masters = [optimizer.state[p]["master_param"] for p in with_masters]
    floats = [t for p in with_masters for n, t in optimizer.state[p].items() if n != "step"]
    assert {t.dtype for t in floats} == {torch.float32}
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(with_masters, masters, strict=True))
    error = (flat(masters) - truth).norm()
    in_float32 = (flat(ending(torch.float32)[0]) - truth).norm()
    assert error <= 1.5 * in_float32 + torch.finfo(torch.float32).eps * truth.norm()
    assert error < 0.1 * (flat(ending(dtype)[0]) - truth).norm()


def test_masters_are_kept_for_narrow_parameters_alone(device: str) -> None:
    params = [Parameter(torch.ones(3, device=device, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)]
    optimizer = st.optim.Adam(params, lr=0.1, master_weights=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert ["master_param" in optimizer.state[p] for p in params] == [True, False, False]
    assert [p.detach().float().round(decimals=2)[0].item() for p in params] == pytest.approx([0.9, 0.9, 0.9], rel=2**-8)


def test_masters_are_saved_and_loaded_in_float32(device: str) -> None:
    values = start(device, torch.bfloat16, STATE_SHAPES)
    make = lambda p: st.optim.AdamW(p, lr=1e-4, master_weights=True)  # noqa: E731
    params, optimizer = train(make, values, torch.bfloat16, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [Parameter(p.detach().clone()) for p in params]
    other = st.optim.AdamW(again)
    other.load_state_dict(saved)
    take_steps(optimizer, params, values, range(5, 10))
    take_steps(other, again, values, range(5, 10))
    assert torch.equal(flat(params), flat(again))
    for p, q in zip(params, again, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], other.state[q]["master_param"])


def test_masters_begin_when_a_state_without_them_is_loaded() -> None:
    values = start("cpu", torch.bfloat16, STATE_SHAPES)
    params, theirs = train(lambda p: torch.optim.Adam(p), values, torch.bfloat16, 2)
    optimizer = st.optim.Adam(params, master_weights=True)
    optimizer.load_state_dict(theirs.state_dict())
    before = copy.deepcopy(params)
    take_steps(optimizer, params, values, range(2, 3))
    for p, old in zip(params, before, strict=True):
        assert optimizer.state[p]["step"] == 3
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32
        assert (optimizer.state[p]["master_param"] - old.float()).abs().max().item() <= 2e-3 if p.numel() else True


def test_masters_begin_when_parameters_are_cast_between_steps(device: str) -> None:
    p = Parameter(torch.ones(3, device=device))
    optimizer = st.optim.SGD([p], lr=2**-10, master_weights=True)
    for step in range(9):
        if step == 1:
            p.grad, p.data = None, torch.ones_like(p, dtype=torch.bfloat16)
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.detach().tolist() == [1 - 2**-7] * 3


def test_float32_parameters_take_bfloat16_gradients_in_float32(device: str) -> None:
    values = start(device, torch.float32, STATE_SHAPES)
    widened, mixed = [[Parameter(v.clone()) for v in values] for _ in range(2)]
    for p, q in zip(widened, mixed, strict=True):
        g = torch.randn_like(p).bfloat16()
        p.grad = g.float()
        q.grad_dtype = torch.bfloat16
        q.grad = g
    for params in (widened, mixed):
        st.optim.Adam(params, lr=0.1).step()
    assert torch.equal(flat(widened), flat(mixed))
