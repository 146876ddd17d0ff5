"""Tracing: the recorded program, and refusals that name the source line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import LOWERINGS, Lowering, check, each_lowering
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn

F = torch.nn.functional


def lists(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorColumn:
    generator = torch.Generator().manual_seed(0)
    return TensorColumn(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


OUTSIDE = torch.ones(3)

ATTRIBUTE = "pass gradients as a list of their own"
HOST_VALUE = "keep the decision on the device: torch.where"
SHAPE = "use a reduction such as"
VIEW = "take the view before the call"
REDUCE = "reduce over dimensions on the TensorList itself"
RANDOM = "draw the numbers before the call"
NUMBER = "compute with ** and torch functions, or pass a bool"

REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda x, n: x * x.sum().item(), HOST_VALUE),
    (lambda x, n: x * float(x.amax()), HOST_VALUE),
    (lambda x, n: x * int(x.amax()), HOST_VALUE),
    (lambda x, n: x if x.sum() > 0 else -x, HOST_VALUE),
    (lambda x, n: x * x.tolist()[0], HOST_VALUE),
    (lambda x, n: x * x.numpy()[0], HOST_VALUE),
    (lambda x, n: x * x.shape[0], SHAPE),
    (lambda x, n: x * x.size(0), SHAPE),
    (lambda x, n: x * x.numel(), SHAPE),
    (lambda x, n: x * torch.numel(x), SHAPE),
    (lambda x, n: x * x.ndim, SHAPE),
    (lambda x, n: x * x.dim(), SHAPE),
    (lambda x, n: x * len(x), SHAPE),
    (lambda x, n: x * x.stride(0), SHAPE),
    (lambda x, n: x * x.nbytes, SHAPE),
    (lambda x, n: x if x.is_contiguous() else -x, SHAPE),
    (lambda x, n: sum(x), SHAPE),
    (lambda x, n: F.kl_div(x, x, reduction="batchmean"), "a function of torch computes with the shape"),
    (lambda x, n: torch.atleast_2d(x), VIEW),
    (lambda x, n: x.reshape(-1), VIEW),
    (lambda x, n: x.view(3, 5), VIEW),
    (lambda x, n: x.expand(3, 5), VIEW),
    (lambda x, n: x.squeeze(), VIEW),
    (lambda x, n: x.T, VIEW),
    (lambda x, n: x[0], VIEW),
    (lambda x, n: x[:3].zero_(), VIEW),
    (lambda x, n: x[:1000] * 2, VIEW),
    (lambda x, n: x.unbind()[0], VIEW),
    (lambda x, n: x.split(1)[0], VIEW),
    (lambda x, n: x.view(torch.int32), VIEW),
    (lambda x, n: torch._neg_view(x), "x.conj_physical() and x.neg() are new ones"),
    (lambda x, n: torch.complex(x, x).conj(), "x.conj_physical() and x.neg() are new ones"),
    (lambda x, n: x.contiguous().add_(1), "leave contiguous() out"),
    (lambda x, n: x if x.grad is None else x - x.grad, ATTRIBUTE),
    (lambda x, n: x if x.requires_grad else -x, ATTRIBUTE),
    (lambda x, n: x if isinstance(x, torch.nn.Parameter) else -x, ATTRIBUTE),
    (lambda x, n: x * getattr(x, "scale", 1.0), ATTRIBUTE),
    (lambda x, n: x.__setattr__("data", x * 2), "set attributes outside"),
    (lambda x, n: x.sum(0), REDUCE),
    (lambda x, n: x.mean(dim=-1), REDUCE),
    (lambda x, n: x.norm(dim=0), REDUCE),
    (lambda x, n: x.amax(0), REDUCE),
    (lambda x, n: x.var(0), REDUCE),
    (lambda x, n: x.sum(None, keepdim=True), REDUCE),
    (lambda x, n: x + torch.rand_like(x), RANDOM),
    (lambda x, n: x + torch.randn(()), RANDOM),
    (lambda x, n: F.dropout(x), RANDOM),
    (lambda x, n: x.normal_(), RANDOM),
    (lambda x, n: x.bernoulli_(0.5), RANDOM),
    (lambda x, n: x @ x, "call it on the TensorList itself, where it is batched by shape"),
    (lambda x, n: x.cumsum(0), "aten.cumsum.default (scan) has no rule here"),
    (lambda x, n: x.sort()[0], "call it on the TensorList itself"),
    (lambda x, n: x + OUTSIDE, "pass the tensor as an argument"),
    (lambda x, n: OUTSIDE.add_(x), "use the functional form"),
    (lambda x, n: x + torch.tensor([1.0, 2.0]), "pass it as an argument"),
    (lambda x, n: x + torch.zeros(3, 5), "take the shape of a tensor"),
    (lambda x, n: x + torch.arange(3.0), "take the shape of a tensor"),
    (lambda x, n: x + x.new_ones(2), "take the shape of a tensor"),
    (lambda x, n: x.index_put_((x > 0,), x.sum()), "choose with torch.where(condition, a, b)"),
    (lambda x, n: x * n if n > 0 else x, NUMBER),
    (lambda x, n: x * math.sqrt(n), NUMBER),
    (lambda x, n: x * float(n), NUMBER),
    (lambda x, n: x * max(n, 0.1), NUMBER),
    (lambda x, n: x * int(n), NUMBER),
    (lambda x, n: x * torch.tensor(n), NUMBER),
]


@pytest.mark.parametrize(("function", "advice"), REFUSED, ids=[str(f.__code__.co_firstlineno) for f, _ in REFUSED])
def test_untraceable_code_is_refused_with_its_line_and_advice(function: Callable[..., Any], advice: str) -> None:
    x = lists((3, 5), (4,))
    before = [t.clone() for t in x]
    with pytest.raises(st.RuleError) as refusal:
        FusedFunction(function)(x, 0.5)
    message = str(refusal.value)
    assert advice in message
    line = inspect.getsource(function).splitlines()[0].strip()
    assert f"{__file__}:{function.__code__.co_firstlineno}: {line}" in message
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


def test_assignment_by_a_mask_is_right_or_refused() -> None:
    def function(x: Tensor) -> None:
        x[x > 0] = 1.0

    x = lists((3, 5), (4,))
    before, expected = [t.clone() for t in x], [torch.where(t > 0, 1.0, t) for t in x]
    try:
        FusedFunction(function)(x)  # an index_put_ in some versions of torch, a masked_fill_ in others
    except st.RuleError:
        expected = before
    assert all(map(torch.equal, x, expected))


def test_a_refusal_inside_a_called_function_names_its_line() -> None:
    def inner(x: Tensor) -> Tensor:
        return x * x.shape[0]

    with pytest.raises(st.RuleError, match=rf"test_trace.py:{inner.__code__.co_firstlineno + 1}: return x \* x.shape"):
        FusedFunction(lambda x: inner(x) + 1)(lists((3,)))


def test_a_result_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(st.RuleError, match="returns tensors, got float"):
        FusedFunction(lambda x: (x, 1.5))(lists((3,)))


def test_a_refused_call_can_be_followed_by_a_right_one() -> None:
    fusion = FusedFunction(lambda x, flag: x * x.shape[0] if flag else x * 2)
    with pytest.raises(st.RuleError):
        fusion(lists((3,)), True)
    assert torch.equal(fusion(lists((3,)), False)[0], lists((3,))[0] * 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: i.mean(),
        lambda x, i: i.norm(),
        lambda x, i: i.std(),
        lambda x, i: i.add_(0.5),
        lambda x, i: i.copy_(x).div_(2),
        lambda x, i: i.mul_(0.5),
        lambda x, i: i.mul_(x),
        lambda x, i: i.lerp(i, 0.5),
        lambda x, i: torch.nn.functional.gelu(i),
        lambda x, i: x & 1,
        lambda x, i: ~x,
        lambda x, i: (x > 0) - (i > 0),
        lambda x, i: -(x > 0),
        lambda x, i: x.sum().add_(x),
        lambda x, i: torch.where(x, x, x),
        lambda x, i: x.lerp(i, 0.5),
    ],
)
@each_lowering
def test_calls_that_torch_refuses_are_refused(function: Callable[..., Any], lowering: Lowering) -> None:
    x, i = lists((3,)), TensorColumn([torch.tensor([1, 2, 3])])
    with pytest.raises((RuntimeError, TypeError)):
        function(x[0].clone(), i[0].clone())
    assert check(lowering, function, x, i) is None


def test_views_that_keep_any_shape_are_aliases_of_their_input() -> None:
    def function(x: Tensor, y: Tensor) -> None:
        for alias in (x[:], x[...], x.detach(), x.view_as(y), x.expand_as(y), x.reshape_as(y), x.transpose(0, 0)):
            alias.add_(1)

    x = TensorColumn(map(torch.zeros_like, lists((3, 5), (4,), (1, 7))))
    FusedFunction(function)(x, lists((3, 5), (4,), (1, 7)))
    assert all((t == 7).all() for t in x)


def program_of(function: Callable[..., Any], *args: Any) -> Any:
    fusion = FusedFunction(function)
    fusion(*args)
    (traced,) = fusion._variant.traces.values()
    return traced.program


def test_common_subexpressions_are_computed_once() -> None:
    program = program_of(lambda x, n: (x * n + 1, x * n - 1), lists((3,)), 0.5)
    assert [step.name for step in program.instructions] == ["mul", "add", "sub"]


def test_numbers_that_python_finds_equal_are_distinguished() -> None:
    program = program_of(lambda x: (x.copysign(0.0), x.copysign(-0.0), x.clamp(1), x.clamp(1.0)), lists((3,)))
    assert len(program.instructions) == 4


def test_a_write_reaches_every_alias_and_no_copy() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        alias, copy = x.detach(), x.clone()
        x.add_(1)
        return alias * 1, copy * 1

    x = lists((3,))
    before = x[0].clone()
    alias, copy = FusedFunction(function)(x)
    assert torch.equal(alias[0], before + 1)
    assert torch.equal(copy[0], before)


def test_an_expression_of_dynamic_scalars_is_one_scalar() -> None:
    program = program_of(lambda x, b, t: x / (1 - b**t), lists((3,)), 0.9, 3)
    assert [step.name for step in program.instructions] == ["div"]
    assert program.scalars == (float,)


@pytest.mark.parametrize(
    "host",
    [
        lambda a, n: a + n,
        lambda a, n: 1 - a**n,
        lambda a, n: (1 - a**n) ** 0.5,
        lambda a, n: a / n - n / a,
        lambda a, n: a * (1 / 3) + 0.1,
        lambda a, n: -a * n * 2,
        lambda a, n: n % 5 + n // 2,
        lambda a, n: abs(-a) * 1e-300 * 1e300,
        lambda a, n: a / (n - 1 - n + 1 + 3),
        lambda a, n: 2.0**n,
    ],
)
@each_lowering
def test_dynamic_scalars_are_computed_as_in_python(host: Callable[[float, int], float], lowering: Lowering) -> None:
    x = TensorColumn([torch.ones(3, dtype=torch.float64, device=lowering.device)])
    fusion = FusedFunction(lambda x, a, n: x * host(a, n))
    with lowering.running():
        for a, n in ((0.999, 7), (0.1, 1), (0.37, 100)):
            result = fusion(x, a, n)[0]
            assert (result - host(a, n)).abs().max() <= 4 * torch.finfo(torch.float64).eps * abs(host(a, n))
    assert fusion.traces == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("number", [0.1, 3])
@pytest.mark.parametrize("shape", [(3,), ()])
@each_lowering
def test_a_dynamic_scalar_in_where_has_the_type_of_a_plain_number(
    dtype: torch.dtype, number: float, shape: tuple[int, ...], lowering: Lowering
) -> None:
    x = TensorColumn([torch.ones(shape).to(dtype)])
    check(lowering, lambda x, n: (torch.where(x > 5, x, n), torch.where(x > 5, n, x)), x, number)
    check(lowering, lambda x, n: torch.where(x > 5, n, 0), x, number)
    check(lowering, lambda x, n: torch.where(x > 5, n, x.to(torch.float64)), x, number)


def test_every_way_to_run_is_tested() -> None:
    assert [p.values[0] for p in LOWERINGS] == list(Lowering)
