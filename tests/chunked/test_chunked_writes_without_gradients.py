"""Writes to chunked values under `no_grad`, which change numbers and leave gradients, and writes without a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st
from subtensors.dispatch.chunked import compile_chunk

ROWS, CLASSES, WIDTH = 12, 20, 6


def scaled(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        z.mul_(2)
    return F.cross_entropy(z, t)


def masked(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        z[:, 12:] = -torch.inf
    return F.cross_entropy(z, t % 12) + z.logsumexp(-1).mean()


def zeroed(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        z.zero_()
    return (z * torch.arange(CLASSES)).sum()


def of_a_statistic(z: Tensor, t: Tensor) -> Tensor:
    s = z.logsumexp(-1) * 1
    with torch.no_grad():
        s.clamp_(max=3)
        s[0] = 7
    return s.square().sum()


def after_a_statistic(z: Tensor, t: Tensor) -> Tensor:
    s = z.sum(-1)
    with torch.no_grad():
        z.mul_(2)
    return (s * z.logsumexp(-1)).mean()


def through_views(z: Tensor, t: Tensor) -> Tensor:
    y = z.view(3, 4, CLASSES)
    with torch.no_grad():
        y.mul_(2)
        y[1].add_(1)
        z.t()[2] = 1
    return z.square().mean() + y.logsumexp(-1).mean()


def between_recorded_writes(z: Tensor, t: Tensor) -> Tensor:
    before = z + 1
    with torch.no_grad():
        z[:, 3:].mul_(2)
        z[1] = 0
        z += torch.arange(CLASSES) / CLASSES
    z.mul_(3)
    with torch.no_grad():
        z.masked_fill_((t > 9)[:, None], 0.5)
    return F.cross_entropy(z, t) + before.mean()


def by_chunked_numbers(z: Tensor, t: Tensor) -> Tensor:
    other = (z * 3).exp()
    with torch.no_grad():
        z.copy_(other)
    return z.logsumexp(-1).mean() + other.mean()


def random(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        z[:, 2].copy_(torch.linspace(0, 1, ROWS))
        z[:, :2].fill_(4)
    return z.square().mean()


WRITES = [
    scaled,
    masked,
    zeroed,
    of_a_statistic,
    after_a_statistic,
    through_views,
    between_recorded_writes,
    by_chunked_numbers,
    random,
]


def in_inference_mode(z: Tensor, t: Tensor) -> Tensor:
    with torch.inference_mode():
        z.mul_(2)
    return F.cross_entropy(z, t)


def materialized(z: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        z.cumsum_(0)
    return F.cross_entropy(z, t)


def materialized_through_a_view(z: Tensor, t: Tensor) -> Tensor:
    z[:, :10].cumsum_(0)
    with torch.no_grad():
        z[2:5].cumsum_(0)
    z[4:8].cumsum_(0)
    return F.cross_entropy(z, t) + z.square().mean()


def detached(z: Tensor, t: Tensor) -> Tensor:
    y, x, s = z + 1, z * 2, z.logsumexp(-1).mean()
    y.detach_()
    with torch.no_grad():
        x.detach_()
    return (y * z).mean() + (x * z).mean() + s


EAGER = [in_inference_mode, materialized, materialized_through_a_view, detached]


def value_and_gradients(program: Any, chunk: Callable[[Tensor], Tensor], compiled: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, WIDTH, generator=g, dtype=torch.float64).requires_grad_() for n in (ROWS, CLASSES))
    t = torch.randint(0, CLASSES, (ROWS,), generator=g)

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return program(F.linear(chunk(h), w) + 0, t)  # type: ignore[no-any-return]

    out = (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(h, w, t)
    return [out.detach(), *torch.autograd.grad(out, [h, w])]


@pytest.mark.parametrize("program", [*WRITES, *EAGER])
@pytest.mark.parametrize("compile", [False, True])
def test_the_gradient_is_that_of_plain_torch(program: Any, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_chunk, "BACKEND", "aot_eager")
    expected = value_and_gradients(program, lambda h: h)
    found = value_and_gradients(program, lambda h: st.chunk(h, rows=5, compile=compile))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("program", [scaled, masked, after_a_statistic, detached])
def test_the_gradient_of_compiled_code_is_that_of_plain_torch(program: Any) -> None:
    expected = value_and_gradients(program, lambda h: h)
    torch.testing.assert_close(value_and_gradients(program, lambda h: st.chunk(h, rows=5), compiled=True), expected)


def test_a_write_to_chunked_rows_leaves_the_gradient_of_what_was_chunked() -> None:
    h = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    x = st.chunk(h, rows=3)
    with torch.no_grad():
        x.mul_(2)
    (3 * x).square().sum().backward()
    torch.testing.assert_close(h.grad, 36 * h.detach())


def test_a_view_is_not_detached_in_place() -> None:
    x = st.chunk(torch.ones(4, 2, requires_grad=True), rows=2)
    y = x * 2
    y.detach_()
    assert not y.requires_grad
    with pytest.raises(st.RuleError, match="take what detach returns"):
        x.view(2, 2, 2).detach_()
