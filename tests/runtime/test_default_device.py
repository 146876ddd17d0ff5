"""The default device has no effect on lists, fused functions and optimizers.

On a CPU the other device is "meta", whose tensors hold nothing: what were made there would be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subtensors as st

SHAPES = [(3, 4), (5,), (700,)]


@pytest.fixture(params=["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with torch.device(name):
        yield name


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu") for shape in SHAPES]


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    params = [nn.Parameter(v) for v in values(0)]
    optimizer = make(params)
    for number in range(3):
        for p, g in zip(params, values(number + 1), strict=True):
            p.grad = g
        optimizer.step()
    for state in optimizer.state.values():
        assert {t.device.type for t in state.values() if isinstance(t, Tensor)} <= {"cpu"}
    optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach() for p in params]


OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda p: st.optim.SGD(p, lr=0.1, momentum=0.9, max_norm=0.5),
    lambda p: st.optim.AdamW(p, ema=0.5, accumulate=2),
    lambda p: st.optim.AdamW(p, state_dtype="int8"),
    lambda p: st.optim.RAdam(p),
    lambda p: st.optim.LAMB(p),
    lambda p: st.optim.Adafactor(p),
    lambda p: st.optim.Muon(p[:1]),
    lambda p: st.optim.Shampoo(p[:1], update_freq=2),
    lambda p: st.optim.SOAP(p[:1]),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_is_the_same(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], elsewhere: str) -> None:
    away = trained(make)
    with torch.device("cpu"):
        here = trained(make)
    for a, h in zip(away, here, strict=True):
        torch.testing.assert_close(a, h)


@st.fused
def decayed(p: Tensor, *, rate: float) -> Tensor:
    p.mul_(1 - rate * torch.where(p > 0, 1.0, 2.0))
    return p.norm()


def test_fused_maths_is_the_same_compiled_too(elsewhere: str) -> None:
    def f(x: Any) -> Any:
        return decayed(x, rate=0.5)

    expected = values(0)
    norms = [decayed.function(t, rate=0.5) for t in expected]
    for call in (f, torch.compile(f, backend="eager")):
        x = st.TensorList(values(0))
        with torch.no_grad():
            results = call(x)
        for a, e in zip([*x, *results], [*expected, *norms], strict=True):
            torch.testing.assert_close(a, e)


def test_the_compiler_gets_the_same_layout_of_a_list(elsewhere: str) -> None:
    names: dict[str, Any] = {"__name__": "torch._subclasses.of_the_compiler"}
    exec("def layout_of(x): return x.layout", names)
    x = st.TensorList(values(0))
    assert names["layout_of"](x) is torch.strided
    assert x.layout == [torch.strided] * len(x)


def test_a_list_is_the_same(elsewhere: str) -> None:
    x, y = st.TensorList(values(0)), st.TensorList(values(1))
    expected = [a * 2 + b.exp() for a, b in zip(x, y, strict=True)]
    norm = torch.cat([t.flatten() for t in x]).norm()
    for made in (x * 2 + y.exp(), x.pack() * 2 + y.pack().exp()):
        for a, e in zip(made, expected, strict=True):
            torch.testing.assert_close(a, e)
    torch.testing.assert_close(st.total_norm(x), norm)


@pytest.mark.gpu
def test_a_step_is_captured_when_the_gpu_is_the_default_device() -> None:
    with torch.device("cuda"):
        params = [nn.Parameter(v.cuda()) for v in values(0)]
        optimizer = st.optim.AdamW(params, lr=0.1, graph=True)
        for number in range(4):
            for p, g in zip(params, values(number + 1), strict=True):
                p.grad = g.cuda()
            optimizer.step()
    assert optimizer.replays
