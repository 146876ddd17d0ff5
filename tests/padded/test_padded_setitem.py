"""`x[...] = value` on padded tensors: any index, with gradients, of a ragged batch and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=16, buckets=[8, 16])
EVERY = slice(None)

Index = Callable[[Any], Any]
Value = Callable[[Any, Tensor], Any]

ASSIGNMENTS: dict[str, tuple[Index, Value]] = {
    "the first position": (lambda x: (EVERY, 0), lambda x, v: v),
    "the last position": (lambda x: (EVERY, -1), lambda x, v: v),
    "all but the first": (lambda x: (EVERY, slice(1, None)), lambda x, v: v),
    "the last two": (lambda x: (EVERY, slice(-2, None)), lambda x, v: v),
    "every other": (lambda x: (EVERY, slice(None, None, 2)), lambda x, v: v),
    "a shift": (lambda x: (EVERY, slice(1, None)), lambda x, v: x[:, :-1]),
    "a shift back": (lambda x: (EVERY, slice(None, -1)), lambda x, v: x[:, 1:] * 2),
    "a feature": (lambda x: (..., 0), lambda x, v: 3.0),
    "listed positions": (lambda x: (EVERY, torch.tensor([0, 2])), lambda x, v: v),
    "listed positions from the end": (lambda x: (EVERY, torch.tensor([0, -1])), lambda x, v: v),
    "under a mask": (lambda x: x > 0, lambda x, v: 1.0),
    "under a mask, values": (lambda x: x > 0, lambda x, v: x[x > 0] * 2),
    "everything": (lambda x: EVERY, lambda x, v: x * 2),
    "everything, broadcast": (lambda x: ..., lambda x, v: v),
}


def assign(name: str, x: Any, v: Tensor) -> Any:
    index, value = ASSIGNMENTS[name]
    y = x * 1
    y[index(x)] = value(x, v)
    return y


@pytest.mark.parametrize("lengths", [(5, 5), (5, 7, 3)], ids=["one size", "ragged"])
@pytest.mark.parametrize("records", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_an_assignment_equals_the_unpadded_one(name: str, records: bool, lengths: tuple[int, ...], device: str) -> None:
    padded_calls.fallbacks.clear()
    rows = [torch.randn(n, 3, dtype=torch.float64, device=device, requires_grad=records) for n in lengths]
    v = torch.randn(3, dtype=torch.float64, device=device, requires_grad=records)
    expected = [assign(name, row[None], v)[0] for row in rows]
    is_ragged = len(set(lengths)) > 1
    x = st.pad(rows if is_ragged else torch.stack(rows), {0 if is_ragged else 1: SEQ}, value=float("nan"))
    actual = list(assign(name, x, v).unpad())
    assert not padded_calls.fallbacks
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    if records:
        weights = [torch.randn_like(e) for e in expected]
        gradients, expected_gradients = (
            torch.autograd.grad(
                torch.stack([(o * w).sum() for o, w in zip(outs, weights, strict=True)]).sum(),
                [*rows, v],
                allow_unused=True,
            )
            for outs in (actual, expected)
        )
        for a, e in zip(gradients, expected_gradients, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                torch.testing.assert_close(a, e)


def test_an_assignment_preserves_the_contents_of_the_padding() -> None:
    x = st.pad(torch.zeros(2, 5), {1: SEQ}, value=7).requires_grad_() * 1
    x[:, 3:] = 1.0
    assert x.unpad().tolist() == [[0, 0, 0, 1, 1]] * 2
    assert x.dense[:, 5:].eq(7).all()


def test_a_value_of_the_wrong_shape_raises() -> None:
    x = st.pad(torch.zeros(2, 5, requires_grad=True), {1: SEQ}) * 1
    with pytest.raises(RuntimeError):
        x[:, 0] = torch.ones(3)


def test_assignments_compile_once_for_every_length() -> None:
    def program(x: Any, v: Tensor) -> Any:
        y = x * 1
        y[:, 0] = v
        y[:, 1:] = y[:, :-1].clone() * 2
        y[:, -1] = v
        return y.sum(1)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    seq = st.Dim("seq", max=8, buckets=[8])
    for i, n in enumerate((5, 8, 3)):
        t = torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
        v = torch.randn(3, dtype=torch.float64, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual, expected = compiled(st.pad(t, {1: seq}, value=float("nan")), v), program(t, v)
            torch.testing.assert_close(actual, expected)
            for a, e in zip(
                torch.autograd.grad(actual.sum(), [t, v]), torch.autograd.grad(expected.sum(), [t, v]), strict=True
            ):
                torch.testing.assert_close(a, e)
