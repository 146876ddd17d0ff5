"""Functions whose compiled graph breaks keep tensors of each type as they are in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st

WEIGHT = torch.arange(16.0).reshape(4, 4) / 10


SEQ = st.Dim("seq", max=16, buckets=8)


def plain() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, 4)


def padded() -> st.PaddedTensor:
    return st.pad(plain(), {1: SEQ})


def chunked() -> st.ChunkedTensor:
    torch.manual_seed(0)
    return st.chunk(torch.randn(8, 4), dim=0, chunks=2)


def static() -> st.StaticAddressTensor:
    return st.static(torch.arange(4.0))


def padded_write(x: Any) -> Tensor:
    y = x @ WEIGHT
    torch._dynamo.graph_break()
    y[:, :2] = 0
    return y.cumsum(1).unpad()  # type: ignore[no-any-return]


def padded_norm(x: Any) -> Tensor:
    y = F.layer_norm(x, (4,))
    torch._dynamo.graph_break()
    y.mul_(2)
    torch._dynamo.graph_break()
    return y.softmax(1).amax(1) / x.count(1)  # type: ignore[no-any-return]


def chunked_loss(h: Any) -> Tensor:
    logits = F.linear(h, WEIGHT)
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))


def chunked_mean(h: Any) -> Tensor:
    torch._dynamo.graph_break()
    return (h @ WEIGHT).logsumexp(-1).mean()  # type: ignore[no-any-return]


def static_write(s: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    s.add_(1)
    torch._dynamo.graph_break()
    return torch.mul(s, 2, out=s) + s.detach()


def padding(t: Tensor) -> Tensor:
    rows = st.pad([t[0], t[1, :3]], {0: SEQ})
    return (st.pad(t, {1: SEQ}) @ WEIGHT).sum(1) + rows.mean(1)


def training(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    optimizer = st.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    return layer.weight.detach()


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (padding, plain),
        (training, plain),
        (padded_write, padded),
        (padded_norm, padded),
        (chunked_loss, chunked),
        (chunked_mean, chunked),
        (static_write, static),
    ],
)
def test_a_function_with_a_graph_break_computes_the_eager_result(
    function: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    compiled = torch.compile(function, backend="aot_eager")
    expected = function(make())
    for _ in range(2):
        torch.testing.assert_close(compiled(make()), expected)
