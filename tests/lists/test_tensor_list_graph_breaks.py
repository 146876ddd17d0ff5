"""Lists at graph breaks: they are real tensors again, and nothing that fake tensors lack is invented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import subtensors as st


def parameters() -> st.TensorList:
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    return st.TensorList(params)


@pytest.mark.parametrize("packed", [False, True])
def test_after_a_graph_break_a_list_and_its_elements_are_the_original_tensors(packed: bool) -> None:
    def f(x: st.TensorList) -> Any:
        doubled = x * 2
        torch._dynamo.graph_break()
        return doubled, x, x[1], [*x], x.grad, x.tree(), x.requires_grad

    x = parameters().pack() if packed else parameters()
    counter = CompileCounter()
    with torch.no_grad():
        doubled, same, element, elements, gradients, tree, requires_grad = torch.compile(f, backend=counter)(x)
    assert counter.frame_count == 1  # no call after the break is compiled
    assert [t.tolist() for t in doubled] == [[[2.0] * 3] * 2, [2.0] * 4]
    assert same is x
    assert element is x[1]
    assert all(a is b for got in (elements, tree) for a, b in zip(got, x, strict=True))
    assert all(g is p.grad for g, p in zip(gradients, x, strict=True))
    assert requires_grad == [True, True]


@pytest.mark.parametrize("ask", [lambda x: x[0].grad, lambda x: [t.grad for t in x], lambda x: x.tensors[1].grad])
def test_the_gradient_of_an_element_in_compiled_code_is_refused(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception, match="fake tensors for the elements of a TensorList"):
        torch.compile(ask, backend="eager")(parameters())


def test_the_gradients_of_a_list_break_the_graph() -> None:
    def f(x: st.TensorList) -> Any:
        return x * 2, x.grad

    x = parameters()
    with torch.no_grad():
        _, gradients = torch.compile(f, backend="eager")(x)
    assert all(g is p.grad for g, p in zip(gradients, x, strict=True))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"have no \.grad"), torch.no_grad():
        torch.compile(f, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norms_are_compiled(order: float) -> None:
    def f(x: st.TensorList, params: list[Tensor]) -> tuple[Tensor, Tensor]:
        return st.total_norm(x, order), st.clip_grad_norm_(params, 0.5, order)

    ours, theirs = ([*parameters()] for _ in range(2))
    total, before = torch.compile(f, backend="aot_eager", fullgraph=True)(st.TensorList([torch.ones(3)] * 2), ours)
    torch.testing.assert_close(total, torch.linalg.vector_norm(torch.ones(6), order))
    torch.testing.assert_close(before, nn.utils.clip_grad_norm_(theirs, 0.5, order))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
