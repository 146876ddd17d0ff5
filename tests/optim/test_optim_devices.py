"""One optimizer over parameters on several devices: a group is updated on each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_oracle import STEPS, assert_as_accurate, exact_maker, random_tensors, start
from torch import Tensor
from torch.nn import Parameter

import subtensors as st

pytestmark = pytest.mark.gpu

SHAPES = [(7,), (3, 5), (65, 33), (), (1030,), (16, 16)]
PLACES = [
    pytest.param(("cpu", "cuda:0"), id="a CPU and a GPU"),
    pytest.param(
        ("cuda:0", "cuda:1"),
        id="two GPUs",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most"),
    ),
]


def trained(make: Any, dtype: torch.dtype, places: tuple[str, ...], max_norm: float | None = None) -> list[Tensor]:
    """Twenty steps of parameters that take turns in where they are; clipped by torch where `max_norm` is given."""
    values = start("cpu", torch.float32, SHAPES)
    params = [Parameter(v.to(places[i % len(places)], dtype)) for i, v in enumerate(values)]
    optimizer = make(params)
    for number in range(STEPS):
        for p, g in zip(params, random_tensors("cpu", torch.float32, SHAPES, seed=number + 1), strict=True):
            p.grad = g.to(p.device, dtype)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
    assert [p.device for p in params] == [torch.device(places[i % len(places)]) for i in range(len(params))]
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_group_over_devices_ends_where_one_on_the_cpu_does(
    name: str, max_norm: float | None, places: tuple[str, ...]
) -> None:
    ours = trained(lambda p: getattr(st.optim, name)(p, lr=0.01, max_norm=max_norm), torch.float32, places)
    reference = exact_maker(name, {"lr": 0.01})
    theirs = trained(reference, torch.float32, ("cpu",), max_norm)
    truth = trained(reference, torch.float64, ("cpu",), max_norm)
    assert_as_accurate(ours, theirs, truth, torch.float32)


@pytest.mark.parametrize("places", PLACES)
def test_averages_and_masters_are_where_their_parameters_are(places: tuple[str, ...]) -> None:
    params = [Parameter(torch.ones(5, device=place, dtype=torch.bfloat16)) for place in places]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = st.optim.SGD(params, lr=0.5, ema=0.5, master_weights=True)
    optimizer.step()
    for p in params:
        assert {t.device for t in optimizer.state[p].values()} == {p.device}
        assert p.tolist() == [0.5] * 5
        assert optimizer.state[p]["ema"].tolist() == [0.75] * 5


@pytest.mark.parametrize("places", PLACES)
def test_matrices_on_several_devices_are_batched_on_each(places: tuple[str, ...]) -> None:
    values = random_tensors("cpu", torch.float64, [(8, 8)] * 4)

    def shampoo(on: tuple[str, ...]) -> list[Tensor]:
        params = [Parameter(v.to(on[i % len(on)], copy=True)) for i, v in enumerate(values)]
        optimizer = st.optim.Shampoo(params, lr=0.1, max_norm=1.0)
        for number in range(3):
            for p, g in zip(params, random_tensors("cpu", torch.float64, [(8, 8)] * 4, seed=number + 1), strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
        return [p.detach().cpu() for p in params]

    torch.testing.assert_close(shampoo(places), shampoo(("cpu",)))
