"""What is known of padding, and of true sizes, stays true after writes, windows and repeated calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import subtensors as st

D = st.Dim("n", max=8, buckets=8)
OTHER = st.Dim("a", max=8, buckets=8)


def rows(n: int = 5) -> Tensor:
    return torch.arange(1.0, n + 1, dtype=torch.float64)


def written_part(x: Tensor) -> Tensor:
    x[:-1].copy_(x[:-1] * 3)
    return x


def written_window(x: Tensor) -> Tensor:
    x[1:-1].copy_(x[1:-1].exp())
    return x


def written_expansion(x: Tensor) -> Tensor:
    y = x.expand_as(x)
    y.copy_(y.exp())
    return x.sum()


def written_dense(x: Tensor) -> Tensor:
    (x.dense if isinstance(x, st.PaddedTensor) else x).add_(1)
    return x.sum()


def size_as_value(x: Tensor) -> Tensor:
    x[0] = x.shape[0]
    x[x.shape[0] - 1] = x.shape[0] - 1
    return x


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "all but the last written": written_part,
    "the inner ones written": written_window,
    "an expansion written": written_expansion,
    "its storage written": written_dense,
    "sum of windows": lambda x: x.unfold(0, 2, 2).sum(),
    "product of windows": lambda x: x.unfold(0, 2, 1).prod(),
    "hardtanh above zero": lambda x: F.hardtanh(x, 1.0, 2.0).sum(),
    "hardtanh below zero": lambda x: F.hardtanh(x, -2.0, -1.0).sum(),
    "an infinite slope": lambda x: F.leaky_relu(x, math.inf).sum(),
    "an infinite multiple": lambda x: torch.add(x, x, alpha=math.inf).sum(),
    "a size assigned": size_as_value,
    "a size that is a tensor's value": lambda x: x[None].view(1, (x > 0).sum()),
    "a size as the value of a border": lambda x: F.pad(x, (0, 1), value=x.shape[0]),
    "a size as the value of a new tensor": lambda x: x.new_full((2,), x.shape[0]),
}


@pytest.mark.parametrize("fill", [0.0, 1.0, float("nan"), None])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("graded", [False, True])
def test_a_program_gives_what_it_gives_without_padding(name: str, fill: float | None, graded: bool) -> None:
    program, x = PROGRAMS[name], rows()
    padded = st.pad(x.clone(), {0: D}) if fill is None else st.pad(x.clone(), {0: D}, value=fill)
    with torch.set_grad_enabled(graded):
        found = program(padded)
        expected = program(x.clone())
    found = found.unpad() if isinstance(found, st.PaddedTensor) else found
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.T.exp().sum(),
        lambda x: x.exp().sum(1).sum(),
        lambda x: x.sum(1, keepdim=True).exp().sum(),
        lambda x: x.sum(-1).mul(2).sum(),
    ],
)
def test_a_gradient_is_padded_as_its_leaf_is(program: Callable[[Tensor], Tensor]) -> None:
    plain = rows(15).view(5, 3).div(9).requires_grad_()
    padded = st.pad(plain.detach(), {0: D}, value=float("nan")).requires_grad_()
    for x in (plain, padded):
        program(x).backward()
    assert isinstance(padded.grad, st.PaddedTensor)
    torch.testing.assert_close(padded.grad.unpad(), plain.grad)
    torch.testing.assert_close((padded.grad + padded).unpad().detach(), (plain.grad + plain).detach())


def test_no_repeated_call_swallows_that_there_are_no_elements() -> None:
    with torch.no_grad():
        for n in (3, 3):
            assert st.pad(torch.ones(2, n), {0: OTHER, 1: D}, value=-math.inf).argmax(1).tolist() == [0, 0]
        with pytest.raises(IndexError, match="non-zero size"):
            st.pad(torch.ones(2, 0), {0: OTHER, 1: D}, value=-math.inf).argmax(1)
