"""A TensorList that compiled code makes has the gradients and the writes that it has in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors import TensorList


@st.fused
def square_and_one(p: Tensor) -> Tensor:
    return p * p + 1


@st.fused
def exchange(p: Tensor, q: Tensor, share: float) -> None:
    p.sub_(share * q)
    q.mul_(2)


def total(values: Any) -> Any:
    return sum(values.sum())


def of_list_tuple_and_dict(a: Tensor, b: Tensor) -> Any:
    nested = TensorList({"x": a.sin(), "y": [b, (a * 2,)]})
    return total(nested * a) + nested["y", 1, 0].sum() + total(TensorList((a, b)) ** 2)


def of_activations(a: Tensor, b: Tensor) -> Any:
    return total(TensorList([a * 2, (b @ a).relu()]) ** 2)


def of_lists(a: Tensor, b: Tensor) -> Any:
    doubled = TensorList((TensorList([a, b]) * 2).tensors)
    return total(doubled.detach() * doubled) + st.total_norm(TensorList([a, b]))


def partly_detached(a: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        made = TensorList([a, b.detach()])
        squares = (made * made).sum()
    return total(made * squares)


def fused(a: Tensor, b: Tensor) -> Any:
    return total(square_and_one(TensorList([a, b])))


def iterated(a: Tensor, b: Tensor) -> Any:
    x, y = TensorList([a, a * b]) * 3
    return [x, y, *TensorList([torch.arange(3), a])]


@pytest.mark.parametrize(
    "function", [of_list_tuple_and_dict, of_activations, of_lists, partly_detached, fused, iterated]
)
def test_gradients_flow_through_a_list_that_compiled_code_makes(function: Callable[..., Any]) -> None:
    outcomes = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        a, b = torch.randn(3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
        results = call(a, b)
        results = results if isinstance(results, list) else [results]
        total_of_all = torch.stack([t.sum().double() for t in results]).sum()
        total_of_all.backward()
        outcomes.append([*[t.detach() for t in results], a.grad, b.grad])
    torch.testing.assert_close(outcomes[1], outcomes[0])


def through_views(x: Tensor, y: Tensor) -> Any:
    TensorList([x[:2], x[2:]]).add_(1)


def twice(x: Tensor, y: Tensor) -> Any:
    TensorList([x, x]).mul_(2)


def each_into_the_other(x: Tensor, y: Tensor) -> Any:
    lists = TensorList([x, y])
    lists += TensorList([y, x])
    lists[0] = y
    return lists.tensors


def of_something_local(x: Tensor, y: Tensor) -> Any:
    local = x + 1
    TensorList([local]).copy_(TensorList([y]))
    return [local]


def by_fused_math(x: Tensor, y: Tensor) -> Any:
    exchange(TensorList([x, y]), TensorList([y, x]), 0.5)


@pytest.mark.parametrize("function", [through_views, twice, each_into_the_other, of_something_local, by_fused_math])
def test_writes_to_a_list_that_compiled_code_makes_reach_its_elements(function: Callable[..., Any]) -> None:
    outcomes = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        x, y = torch.randn(3), torch.randn(3)
        outcomes.append([*(call(x, y) or []), x, y])
    torch.testing.assert_close(outcomes[1], outcomes[0])


def test_compiled_code_may_not_write_to_a_list_that_requires_grad_or_return_it() -> None:
    def write(a: Tensor) -> Any:
        return total(TensorList([a * 2]).mul_(3))

    def return_list(a: Tensor) -> Any:
        return TensorList([a]) * 2

    a = torch.ones(3, requires_grad=True)
    for function, message in (
        (write, "no rule that writes where a TensorList requires grad"),
        (return_list, "return its elements"),
    ):
        with pytest.raises((st.RuleError, torch._dynamo.exc.TorchDynamoException), match=message):
            torch.compile(function, backend="aot_eager", fullgraph=True)(a)
