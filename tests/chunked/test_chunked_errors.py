"""Calls that a ChunkedTensor does not support raise an error that says what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subtensors as st


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"chunks": 0}, st.SizeError, "chunks must be at least 1, got 0"),
        ({"rows": -3}, st.SizeError, "rows must be at least 1, got -3"),
        ({"chunks": 2, "rows": 2}, ValueError, "one of chunks, rows and memory_limit; got chunks, rows"),
        ({"chunks": 2.5}, TypeError, "chunks is a whole number, got 2.5"),
        ({"memory_limit": "much"}, ValueError, "got 'much'"),
        ({"accumulate": "slow"}, ValueError, "got 'slow'"),
        ({"dim": 2}, IndexError, "got 2"),
        ({"dim": "rows"}, TypeError, "dim is a whole number, got 'rows'"),
        ({"dim": True}, TypeError, "dim is a whole number, got True"),
    ],
)
def test_a_wrong_argument_of_chunk_is_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        st.chunk(torch.ones(4, 3), **arguments)


def test_only_a_tensor_with_rows_can_be_chunked() -> None:
    with pytest.raises(st.SizeError, match="no rows"):
        st.chunk(torch.ones(()))
    with pytest.raises(TypeError, match="got list"):
        st.chunk([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "convert",
    [
        Tensor.to_sparse,
        Tensor.to_mkldnn,
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    ],
)
def test_a_tensor_without_strides_is_not_chunked(convert: Any) -> None:
    with pytest.raises(TypeError, match="chunk takes a dense tensor"):
        st.chunk(convert(torch.ones(4, 3)))


@pytest.mark.parametrize(
    "use",
    [
        Tensor.share_memory_,
        Tensor.data_ptr,
        lambda x: x.apply_(abs),
        lambda x: x.set_(torch.ones(4, 3)),
    ],
)
def test_what_needs_memory_of_its_own_is_refused(use: Any) -> None:
    with pytest.raises(st.RuleError, match="realize"):
        use(st.chunk(torch.ones(4, 3), rows=2) * 2)


def test_dir_lists_the_methods_of_a_chunked_tensor_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {"realize", "explain", "shape", "sum"} <= set(dir(st.chunk(torch.ones(4, 3))))


@pytest.mark.parametrize("reduce", [lambda y: y.exp().mean(), lambda y: y.amax(), lambda y: y.realize().square().sum()])
def test_a_second_derivative_is_refused_even_where_it_may_be_unused(reduce: Any) -> None:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    loss = reduce(F.linear(st.chunk(x, rows=2), w).exp())
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    with pytest.raises(st.RuleError, match="differentiated twice"):
        torch.autograd.grad(grad.square().sum(), x, allow_unused=True)


def copied(x: Tensor) -> Tensor:
    return copy.deepcopy(x)


def pickled(x: Tensor) -> Any:
    return pickle.loads(pickle.dumps(x))


def loaded(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("copy_of", [copied, pickled, loaded])
def test_a_copy_of_a_chunked_tensor_is_the_plain_tensor(copy_of: Any) -> None:
    h, w = torch.randn(4, 3), torch.randn(5, 3)
    found = copy_of(F.linear(st.chunk(h, rows=2), w))
    assert type(found) is Tensor
    torch.testing.assert_close(found, F.linear(h, w))


def test_hooks_and_requires_grad_belong_to_the_tensor_that_was_chunked() -> None:
    h = st.chunk(torch.ones(4, 3, requires_grad=True), rows=2)
    assert h.requires_grad
    with pytest.raises(st.RuleError, match="the tensor that was chunked"):
        h.register_hook(print)
    with pytest.raises(st.RuleError, match="the tensor that was chunked"):
        h.requires_grad_(False)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_the_cross_entropy_of_integer_logits_is_torchs_own_error(dtype: torch.dtype, reduction: str) -> None:
    logits, target = torch.ones(4, 3).to(dtype), torch.tensor([0, 1, 2, 0])
    for either in (logits, st.chunk(logits, rows=2)):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            F.cross_entropy(either, target, reduction=reduction).sum().item()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def test_the_result_of_an_autograd_function_is_refused() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    y = Reversed.apply(st.chunk(x, rows=2))
    for use in (torch.Tensor.sum, torch.exp, st.ChunkedTensor.realize):
        with pytest.raises(st.RuleError, match=r"came out of Reversed.*realize"):
            use(y)
    Reversed.apply(st.chunk(x, rows=2).realize()).sum().backward()
    assert x.grad is not None
    assert (x.grad == -1).all()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * torch.ones(4, 3)


def test_a_gradient_from_a_users_autograd_function_is_refused() -> None:
    h = st.chunk(torch.ones(4, 3, requires_grad=True), rows=2)
    with pytest.raises(st.RuleError, match="outside its region"):
        Doubled.apply(h).backward()


def differentiated_forward(function: Any) -> Any:
    def tangent(x: Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))

    return tangent


def squares(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).square().mean()


def entropy(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, differentiated_forward])
@pytest.mark.parametrize("loss", [squares, entropy])
def test_transforms_of_functions_are_refused_clearly(loss: Any, transform: Any) -> None:
    square, outside = torch.ones(4, 4), st.chunk(torch.ones(4, 4), rows=2)
    for function in (
        lambda x: loss(st.chunk(x, rows=2), square),
        lambda w: loss(st.chunk(square, rows=2), w),
        lambda w: loss(outside, w),
    ):
        with pytest.raises(st.RuleError, match=r"inside torch\.func transforms"):
            transform(function)(torch.ones(2, 4, 4) if transform is torch.func.vmap else square)


def test_a_memory_limit_that_cannot_be_met_is_refused_with_the_least_that_can() -> None:
    h, w = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    target = torch.zeros(64, dtype=torch.int64)
    programs: list[Callable[[Tensor], Tensor]] = [
        lambda h: F.cross_entropy(F.linear(h, w), target),
        lambda h: F.linear(h, w).logsumexp(-1).mean(),
        lambda h: F.linear(h, w).relu().sum(),
    ]
    for program in programs:
        with pytest.raises(ValueError, match=r"memory_limit=1000 can't be met: .* bytes are needed at least") as raised:
            program(st.chunk(h, memory_limit=1000)).backward()
        found = re.search(r"(\d+) bytes", str(raised.value))
        assert found
        least = int(found[1])
        assert least > h.nbytes + w.nbytes, "the gradients"
        program(st.chunk(h, memory_limit=least)).backward()
        with pytest.raises(ValueError, match=f": {least} bytes"):
            program(st.chunk(h, memory_limit=least - 1)).backward()
    with pytest.raises(
        ValueError, match=r"give more, chunk a dim of more than 1 rows \(st.chunk\(x, dim\)\), or leave"
    ):
        F.linear(st.chunk(h[None], memory_limit=1000), w).relu().sum().backward()


def test_values_too_large_for_their_limit_are_explained_beside_the_loss_that_fits() -> None:
    logits = F.linear(st.chunk(torch.randn(64, 8), memory_limit=100_000), torch.randn(500, 8))
    with pytest.raises(ValueError, match="can't be met"):
        logits.realize()
    refused, loss = st.explain(logits).splitlines()
    assert refused.startswith("memory_limit=100000 can't be met")
    assert loss.startswith("their cross entropy would take")


def test_an_error_of_the_program_is_raised_without_a_word_about_chunks(caplog: pytest.LogCaptureFixture) -> None:
    h = st.chunk(torch.randn(4, 5), rows=2)
    for program in (lambda: F.linear(h, torch.ones(3, 4)), lambda: h + torch.ones(7), lambda: h.view(3, 3)):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            program()
    assert not caplog.records
