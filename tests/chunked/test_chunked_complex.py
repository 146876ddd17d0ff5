"""Complex programs on chunked tensors: products of every kind, their conjugates, and what gradients make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st

PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (lambda x, w: x @ w, (7, 4), (4, 3)),
    "mm of a conjugate": (lambda x, w: x.conj() @ w.mH, (7, 4), (3, 4)),
    "mm from the left": (lambda x, w: w @ x, (7, 4), (3, 7)),
    "mm with an adjoint": (lambda x, w: w @ x.mH, (7, 4), (3, 4)),
    "gram": (lambda x, w: (x.mH @ x) * w, (7, 3), (3,)),
    "mv": (lambda x, w: x @ w, (7, 4), (4,)),
    "dot": (torch.dot, (7,), (7,)),
    "vdot": (lambda x, w: torch.vdot(x, w) + torch.vdot(w, x).conj(), (7,), (7,)),
    "vecdot": (torch.linalg.vecdot, (7, 3), (7, 3)),
    "outer": (torch.outer, (7,), (4,)),
    "addr": (lambda x, w: torch.addr(w[0] * torch.ones(7, 4, dtype=w.dtype), x, w), (7,), (4,)),
    "linear": (F.linear, (2, 7, 4), (3, 4)),
    "linear with a bias": (lambda x, w: F.linear(x, w[:, 1:], w[:, 0]), (7, 4), (3, 5)),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), (7, 4), (4, 3)),
    "scaled addmm": (lambda x, w: torch.addmm(w[0], x, w, beta=0.5j, alpha=2 + 1j), (7, 4), (4, 3)),
    "bmm": (torch.bmm, (7, 4, 3), (7, 3, 5)),
    "baddbmm": (lambda x, w: torch.baddbmm(w[:, :1], x, w), (7, 4, 3), (7, 3, 5)),
    "matmul": (torch.matmul, (2, 7, 4), (4, 3)),
    "einsum": (lambda x, w: torch.einsum("bi,ij,bj->b", x.conj(), w, x), (7, 4), (4, 4)),
    "kron": (torch.kron, (5, 3), (2, 2)),
    "convolution": (F.conv1d, (7, 4, 9), (5, 4, 3)),
}

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda y: y,
    "conj": torch.conj,
    "turned": lambda y: y * (1 - 2j),
    "magnitude": lambda y: y.abs() * (1 + 1j),
    "real part": lambda y: y.real + 2j * y.imag,
    "parts": lambda y: torch.view_as_complex(torch.view_as_real(y.resolve_conj()) * torch.tensor([1.0, -3.0])),
    "power": lambda y: y * y.conj() + y.square(),
    "in place": lambda y: (y * 1).mul_(1j).add_(1),
    "exponential": lambda y: (0.1 * y).exp(),
    "sums": lambda y: y.cumsum(0),
    "centred": lambda y: y - y.mean(0),
    "spread": lambda y: y / (2 + y.var(0, correction=0)),
}

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "kept": lambda y: y,
    "sum": torch.sum,
    "turned mean": lambda y: y.mean() * (1 + 2j),
    "real part of the sum": lambda y: y.sum().real * 3,
    "sum of imaginary parts": lambda y: y.imag.sum(),
    "mean magnitude": lambda y: y.abs().mean(),
    "magnitudes, turned": lambda y: y.abs().sum() * (1 + 2j),
    "norm": torch.linalg.vector_norm,
}


def results(program: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, **division: int) -> list[Any]:
    """A program's result and gradients for a fixed complex upstream."""
    torch.manual_seed(1)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = program(st.chunk(x, **division) if division else x, w)
    out = out.realize() if isinstance(out, st.ChunkedTensor) else out
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    return [out.detach().resolve_conj(), x.grad, w.grad]


@given(
    some.sampled_from(sorted(PRODUCTS)),
    some.lists(some.sampled_from(sorted(STEPS)), max_size=3),
    some.sampled_from(sorted(ENDS)),
    some.sampled_from([torch.complex64, torch.complex128]),
    some.integers(0, 2),
)
def test_a_complex_program_on_a_chunked_tensor_equals_the_plain_one(
    product: str, steps: list[str], end: str, dtype: torch.dtype, dim: int
) -> None:
    multiply, *sizes = PRODUCTS[product]
    torch.manual_seed(0)
    x, w = (torch.randn(size, dtype=dtype) for size in sizes)

    largest = 1.0  # of what may cancel

    def program(x: Tensor, w: Tensor) -> Tensor:
        nonlocal largest
        y = multiply(x, w)
        for name in ["nothing", *steps]:
            y = STEPS[name](y) if y.ndim else y
            if not isinstance(y, st.ChunkedTensor):
                largest = max(largest, float(y.detach().abs().max()))
        return ENDS[end](y)

    expected = results(program, x, w)
    assume(all(e.isfinite().all() for e in expected))
    found = results(program, x, w, dim=dim % x.ndim, rows=3)
    rounding = torch.finfo(dtype).eps
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        torch.testing.assert_close(f, e, rtol=0, atol=400 * rounding * max(largest, float(e.abs().max())))


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_the_variance_of_complex_rows_is_real(name: str) -> None:
    x = torch.randn(7, 3, dtype=torch.complex64)
    found, expected = (getattr(torch, name)(y, 0) for y in (st.chunk(x, rows=2), x))
    torch.testing.assert_close(found, expected)
