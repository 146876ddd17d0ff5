"""PaddedTensor and autograd: gradients, second derivatives, autocast, and the transforms that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
NAN = float("nan")


def test_the_gradient_of_a_leaf_has_its_padding() -> None:
    x = st.pad(torch.ones(5), {0: SEQ}).requires_grad_()
    (x * 2).sum().backward()
    assert isinstance(x.grad, st.PaddedTensor)
    assert x.grad.unpad().tolist() == [2.0] * 5


def test_gradients_of_one_tensor_used_twice_add_up() -> None:
    source = torch.randn(2, 5, requires_grad=True)
    x = st.pad(source, {1: SEQ}, value=NAN).requires_grad_()
    ((x * 2).unpad().sum() + (x * 3).unpad().sum()).backward()
    assert source.grad is not None
    assert source.grad.eq(5).all()


SMOOTH: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: torch.softmax(x, 1) * x,
    "log softmax": lambda x: torch.log_softmax(x, 1) * x,
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=0.1) * x,
    "rms norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], eps=0.1) * x,
    "logsumexp": lambda x: x.logsumexp(1),
    "variance": lambda x: x.var(1) ** 2,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1) ** 3,
    "product": lambda x: x.prod(1),
    "maximum": lambda x: x.amax(1) ** 2,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_equal_the_unpadded_programs(name: str, device: str) -> None:
    source = torch.randn(2, 5, 3, dtype=torch.float64, device=device, requires_grad=True)

    def penalty(x: Any, leaf: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((SMOOTH[name](x) ** 2).sum(), leaf, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), leaf)
        return h

    torch.testing.assert_close(penalty(st.pad(source, {1: SEQ}, value=NAN), source), penalty(source, source))


@given(n=some.integers(1, 6), m=some.integers(1, 4))
def test_gradients_agree_with_finite_differences(n: int, m: int) -> None:
    dims = {0: st.Dim("n", max=8, buckets=4), 1: st.Dim("m", max=8, buckets=4)}

    def program(t: Tensor, w: Tensor) -> Tensor:
        x = st.pad(t, dims, value=NAN)
        out: Tensor = (torch.softmax(x * w, 0).cumsum(1) @ x.transpose(0, 1)).unpad()
        return out

    t = torch.randn(n, m, dtype=torch.float64, requires_grad=True)
    w = torch.randn((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(program, (t, w))


def test_autocast_casts_as_it_does_without_padding() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    t = torch.randn(2, 5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(t, weight).softmax(-1)
        actual = torch.nn.functional.linear(st.pad(t, {1: SEQ}, value=NAN), weight).softmax(-1)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.unpad(), expected)
    (gradient,) = torch.autograd.grad(actual.unpad().square().sum(), weight)
    assert gradient.isfinite().all()


RECURRENT = torch.nn.GRU(3, 2, batch_first=True)
CAST: dict[str, Callable[[Any], Any]] = {
    "recurrent": lambda x: RECURRENT(x)[0],
    "covariance": lambda x: torch.cov(x[0].mT),
    "border": lambda x: torch.nn.functional.pad(x.mT, (1, 1), "reflect"),
    "likelihood": lambda x: torch.nn.functional.nll_loss(x.mT, torch.zeros(x.shape[:2], dtype=torch.int64)),
    "einsum": lambda x: torch.einsum("bnf,bmf->bnm", x, x),
    "inner": lambda x: torch.inner(x, torch.ones(3, dtype=x.dtype)),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(3, 2, dtype=x.dtype), dims=([2], [0])),
    "matmul": lambda x: x @ x.mT,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "convolution": lambda x: torch.nn.functional.conv1d(x.mT, torch.ones(2, 3, 1)),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "loss": lambda x: torch.nn.functional.mse_loss(x, x * 2),
    "softmax": lambda x: x.softmax(1),
    "sum": lambda x: x.sum(1),
    "norm": lambda x: x.norm(dim=1),
    "cosine": lambda x: torch.nn.functional.cosine_similarity(x, x * 2 + 1, dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAST)
def test_autocast_casts_each_op_as_it_does_without_padding(name: str, dtype: torch.dtype) -> None:
    # Fixed: sums of bfloat16 that nearly cancel differ by their order.
    t = torch.randn(2, 5, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = CAST[name](t)
        actual = CAST[name](st.pad(t, {1: SEQ}, value=NAN))
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda x: torch.func.vmap(lambda row: row.sum())(x),
        lambda x: torch.func.vmap(lambda s: (x * s).sum())(torch.ones(3)),
        lambda x: torch.func.grad(lambda v: (v * v).sum())(x),
        lambda x: torch.func.grad(lambda s: (x * s).sum())(torch.ones(())),
        lambda x: torch.func.grad(lambda s: (st.chunk(x, 1) * s).sum())(torch.ones(())),
    ],
)
def test_transforms_of_torch_func_raise_with_advice(transformed: Callable[[Any], Any]) -> None:
    with pytest.raises(st.RuleError, match="unpad before"):
        transformed(st.pad(torch.randn(2, 5), {1: SEQ}))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda t: torch.func.vmap(lambda row: st.pad(row, {0: SEQ}).sum())(t),
        lambda t: torch.func.grad(lambda t: st.pad(t, {1: SEQ}).sum())(t),
        lambda t: torch.func.jvp(lambda t: st.pad(t, {1: SEQ}).sum(), (t,), (t,)),
    ],
)
def test_padding_inside_a_transform_raises_with_advice(transformed: Callable[[Tensor], Any]) -> None:
    with pytest.raises(st.RuleError, match="pad before"):
        transformed(torch.randn(2, 5))


def test_forward_mode_differentiation_raises() -> None:
    x = st.pad(torch.randn(2, 5), {1: SEQ})
    with torch.autograd.forward_ad.dual_level(), pytest.raises(st.RuleError, match="forward-mode"):
        torch.exp(x)


@pytest.mark.parametrize(
    "program",
    [lambda x: x * x.conj(), lambda x: (x @ x.mH).real, lambda x: x + 3 * x.conj(), lambda x: x.conj().imag * x.real],
)
def test_gradients_of_complex_tensors_and_their_conjugates_add_up(program: Callable[[Any], Any]) -> None:
    source = torch.randn(2, 5, dtype=torch.complex128, requires_grad=True)
    expected, actual = program(source), program(st.pad(source, {1: SEQ}, value=NAN))
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    wanted, given = (torch.autograd.grad(out, source, cotangent) for out in (expected, actual))
    torch.testing.assert_close(given, wanted)


class Scaled(torch.autograd.Function):
    """x^2 w, whose backward calls composite ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, w) = gradients, ctx.saved_tensors
        return g * 2 * x * w, torch.nn.functional.linear(g * x * x, torch.eye(len(w), dtype=w.dtype)).sum((0, 1))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_custom_autograd_function_gets_padded_tensors_in_its_backward(compiled: bool) -> None:
    def program(x: Any, w: Tensor) -> Any:
        return Scaled.apply(x, w).softmax(1)  # type: ignore[no-untyped-call]

    run = torch.compile(program, fullgraph=True, backend="aot_eager") if compiled else program
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for n in (5, 7):
        source, cotangent = (torch.randn(2, n, 3, dtype=torch.float64) for _ in range(2))
        leaf, wanted = source.clone().requires_grad_(), st.pad(source, {1: SEQ}, value=NAN).requires_grad_()
        expected = torch.autograd.grad(program(leaf, w), [leaf, w], cotangent)
        given = torch.autograd.grad(run(wanted, w), [wanted, w], st.pad(cotangent, {1: SEQ}, value=NAN))
        torch.testing.assert_close((given[0].unpad(), given[1]), expected)  # type: ignore[attr-defined]
        run(wanted, w).backward(st.pad(cotangent, {1: SEQ}, value=NAN))
        torch.testing.assert_close((wanted.grad.unpad(), w.grad), expected)  # type: ignore[union-attr]
        w.grad = None


def test_gradients_of_unused_padded_tensors_are_made_zeros_where_asked_for() -> None:
    x, unused = (st.pad(torch.ones(5), {0: SEQ}).requires_grad_() for _ in range(2))
    grads = torch.autograd.grad((x * 2).sum(), [x, unused], materialize_grads=True)
    assert [grad.tolist() for grad in grads] == [[2.0] * 5, [0.0] * 5]
