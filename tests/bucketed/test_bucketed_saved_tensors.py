"""Tensors that a compiled forward saved are freed during the backward: they shrink as the gradients grow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bucketed_rows import SEQ
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import subtensors as st

WIDTH = 5
ROWS = 16
"""Of activations, at least; weights have fewer."""


class Spy:
    """A backend that notes which activations somebody else holds, after each call."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []
        """Activations that a call was given, and those of them that are alive when it has let go of them."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiled(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
            def run(args: list[Any]) -> Any:
                tensors = [a for a in args if isinstance(a, Tensor)]
                given = [weakref.ref(a) for a in tensors if a.shape[-1:] == (WIDTH,) and a.numel() >= WIDTH * ROWS]
                del tensors
                out = graph(*args)
                args.clear()
                self.held.append((len(given), sum(ref() is not None for ref in given)))
                return out

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        made: Callable[..., Any] = aot_autograd(fw_compiler=compiled)(module, inputs)
        return made


def network() -> nn.Module:
    parts = [nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("is_whole_step", [False, True])
def test_a_backward_frees_saved_tensors_once_it_has_read_them(is_whole_step: bool) -> None:
    spy, net = Spy(), network()
    loss = st.bucketed(lambda x: net(x).square().mean(), {"x": {1: SEQ}}, compile={"backend": spy})
    opt = st.optim.AdamW(net.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        value: Tensor = loss(x)
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
        return value.detach()

    run = st.bucketed(step, {"x": {1: SEQ}}) if is_whole_step else step
    for n in (5, 8, 11):
        run(torch.randn(2, n, 3))
    assert any(given for given, _ in spy.held)
    assert not any(alive for _, alive in spy.held)


def test_a_retained_graph_keeps_its_saved_tensors() -> None:
    net = network()
    inner = st.bucketed(lambda x: net(x).square().mean(), {"x": {1: SEQ}}, compile={"backend": "aot_eager"})

    def twice(x: Tensor) -> Tensor:
        value: Tensor = inner(x)
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    run = st.bucketed(twice, {"x": {1: SEQ}})
    x = torch.randn(2, 5, 3)
    run(x)
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    (2 * net(x).square().mean()).backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters()])
