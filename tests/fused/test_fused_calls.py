"""Fused calls: arguments, results and errors, and the ways in which elements run."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from fused_lists import groups, lists, sgd
from programs import Lowering, check, each_kernel_lowering, each_lowering, interpreted
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.executors import EagerExecutor
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.torch_executor import TorchExecutor


@each_lowering
def test_results_are_lists_of_the_same_structure(lowering: Lowering) -> None:
    @st.fused
    def function(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return p + g, p.sum(), None

    tree = {"w": torch.ones(2, 3, device=lowering.device), "b": [torch.zeros(70, device=lowering.device)]}
    p = st.TensorList(tree)
    with lowering.running():
        total, size, nothing = function(p, p)
    assert nothing is None
    assert isinstance(total, st.TensorList)
    assert total.treespec == size.treespec == p.treespec
    assert torch.equal(total["w"].cpu(), torch.full((2, 3), 2.0))
    assert size["w"] == 6
    assert size["w"].shape == ()


def test_an_argument_that_is_returned_is_the_list_itself() -> None:
    p = st.TensorList([torch.ones(2)])
    assert st.fused(lambda p: p.add_(1))(p) is p


def test_plain_tensors_alone_give_plain_tensors() -> None:
    p = torch.ones(3)
    assert st.fused(lambda p, lr: p.sub_(lr))(p, 0.5) is p
    result = st.fused(lambda p: (p * 2, p.sum()))(p)
    assert torch.equal(result[0], torch.ones(3))
    assert result[1] == 1.5


@each_lowering
def test_a_list_of_one_and_of_two_thousand_tensors(lowering: Lowering) -> None:
    for count in (1, 2000 if lowering is not Lowering.INTERPRETER else 150):
        p = [torch.full((i % 5 + 1,), float(i), device=lowering.device) for i in range(count)]
        with lowering.running():
            FusedFunction(sgd)(TensorColumn(p), TensorColumn(torch.ones_like(t) for t in p), 0.5)
        assert all((t == i - 0.5).all() for i, t in enumerate(p))


class Doubled(torch.nn.Module):
    """Math as a module."""

    def forward(self, p: Tensor) -> Tensor:
        return p * 2


@st.fused
def tripled(p: Tensor) -> Tensor:
    return p * 3


@pytest.mark.parametrize(
    ("function", "name", "factor"),
    [
        (functools.partial(torch.mul, other=2), "mul", 2),
        (Doubled(), "Doubled", 2),
        (Doubled().forward, "forward", 2),
        (tripled, "tripled", 3),
    ],
)
def test_any_callable_can_be_fused(function: Callable[[Tensor], Tensor], name: str, factor: int) -> None:
    fused = st.fused(function)
    x = st.TensorList([torch.ones(2), torch.ones(3)])
    assert torch.equal(fused(x)[1], torch.full((3,), float(factor)))
    assert fused.explain(x).startswith(f"{name}: 2 elements")


def test_a_fused_function_is_pickled_and_copied_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(tripled)) is copy.deepcopy(tripled) is tripled


@each_lowering
def test_a_call_with_empty_lists_does_nothing(lowering: Lowering) -> None:
    fusion = FusedFunction(sgd)
    with lowering.running():
        assert fusion(TensorColumn([]), TensorColumn([]), 0.5) is None
    assert fusion.traces == 0


def test_structures_that_differ_are_refused_with_the_first_path() -> None:
    p = st.TensorList({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": torch.ones(2)}})
    g = st.TensorList({"a": torch.ones(2), "b": {"c": torch.ones(2), "e": torch.ones(2)}})
    before = [t.clone() for t in p.tensors]
    with pytest.raises(ValueError, match=r"sgd.*different structure.*'b'"):
        st.fused(sgd)(p, g, lr=0.5)
    assert all(torch.equal(a, b) for a, b in zip(p.tensors, before, strict=True))


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="sgd: lists of 2 and of 1 tensors do not match"):
        FusedFunction(sgd)(lists((2,), (2,)), lists((2,)), 0.5)


@pytest.mark.parametrize("bad", [object(), 1j, np.ones(2), b"x", {1, 2}])
def test_an_argument_that_is_no_tensor_or_number_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"an argument of fused math is .* got {type(bad).__name__}"):
        FusedFunction(lambda p, x: p)(lists((2,)), bad)


def test_a_call_without_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="sgd needs a tensor or a list of tensors"):
        FusedFunction(sgd)(1.0, 2.0, 3.0)


@each_lowering
def test_a_shared_tensor_is_read_but_not_written(lowering: Lowering) -> None:
    shared = torch.tensor(2.0, device=lowering.device)
    p = lists((3,), (70,), device=lowering.device)
    with lowering.running():
        with pytest.raises(st.RuleError, match=r"writes to a tensor that all elements share.*pass a list"):
            FusedFunction(lambda p, t: t.add_(p.sum()))(p, shared)
        assert shared == 2
        check(lowering, lambda p, t: p.mul_(t), p, shared)


@interpreted
def test_a_shared_tensor_is_not_written_by_the_one_element_of_its_shape() -> None:
    shared = torch.ones(3)
    fusion = FusedFunction(lambda x, total: total.add_(x.sum()))
    with pytest.raises(st.RuleError, match="writes to a tensor that all elements share"):
        fusion(TensorColumn([torch.ones(1), torch.ones(3)]), shared)
    assert shared.tolist() == [1.0] * 3


def add_largest(p: Tensor) -> None:
    p.add_(p.amax())


@each_lowering
def test_the_largest_of_an_empty_tensor_is_refused(lowering: Lowering) -> None:
    with lowering.running(), pytest.raises(RuntimeError, match="amax"):
        FusedFunction(add_largest)(TensorColumn([torch.ones(0, device=lowering.device)]))


@each_kernel_lowering
def test_the_largest_of_an_empty_tensor_is_refused_before_anything_is_written(lowering: Lowering) -> None:
    p = TensorColumn([torch.ones(n, device=lowering.device) for n in (3, 0)])
    with lowering.running(), pytest.raises(RuntimeError, match="amax of an empty tensor"):
        FusedFunction(add_largest)(p)
    assert p[0].tolist() == [1.0] * 3


def test_keyword_and_nested_arguments_are_distinguished() -> None:
    fusion = FusedFunction(lambda p, *, a=1.0, b=(1.0, 2.0): p * a + b[0] - b[1])
    p = TensorColumn([torch.ones(2)])
    assert torch.equal(fusion(p, a=2.0, b=(3.0, 1.0))[0], torch.full((2,), 4.0))
    assert torch.equal(fusion(p)[0], torch.zeros(2))


@pytest.mark.parametrize(
    "number", [np.float64(0.5), np.float32(0.5), np.int64(3), np.uint8(3), Fraction(1, 2)], ids=repr
)
def test_a_numpy_number_is_a_dynamic_scalar(number: Any) -> None:
    fusion = FusedFunction(lambda p, x: p * x)
    for factor in (number, number + number):
        assert torch.equal(fusion(TensorColumn([torch.ones(2)]), factor)[0], torch.full((2,), float(factor)))
    assert fusion.traces == 1


@each_lowering
def test_an_integer_number_is_an_exponent_or_a_base(lowering: Lowering) -> None:
    x = TensorColumn([torch.arange(4, device=lowering.device)])
    for function in (lambda x, n: x**n, lambda x, n: n**x):
        fusion = FusedFunction(function)
        with lowering.running():
            assert all(torch.equal(fusion(x, n)[0], function(x[0], n)) for n in (2, 3))
        assert fusion.traces == 1


@each_lowering
def test_fused_math_calls_fused_math_with_its_numbers(lowering: Lowering) -> None:
    @st.fused
    def average(m: Tensor, x: Tensor, *, rate: float) -> Tensor:
        return m.lerp_(x, 1 - rate)

    @st.fused
    def descend(p: Tensor, g: Tensor, m: Tensor, *, lr: float) -> None:
        p.sub_(lr * average(m, g, rate=lr / 2))

    p, g, m = (st.TensorList([torch.full((3,), x, device=lowering.device)]) for x in (1.0, 2.0, 4.0))
    with lowering.running():
        descend(p, g, m, lr=0.5)
        descend(p, g, m, lr=0.25)
    assert m[0].tolist() == [2.0625] * 3
    assert p[0].tolist() == [1 - 0.5 * 2.5 - 0.25 * 2.0625] * 3


@each_lowering
def test_sparse_and_subclass_elements_run_the_function_itself(lowering: Lowering) -> None:
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]], device=lowering.device).to_sparse()
    fusion = FusedFunction(lambda x: x * 2)
    with lowering.running():
        for _ in range(2):
            (result,) = fusion(TensorColumn([sparse]))
    assert torch.equal(result.to_dense(), sparse.to_dense() * 2)
    assert isinstance(groups(fusion)[0], EagerExecutor)


def test_elements_that_differ_run_in_separate_groups() -> None:
    x = TensorColumn([torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.0), torch.ones(5)])
    fusion = FusedFunction(lambda x: x * 2)
    with Lowering.INTERPRETER.running():
        result = fusion(x)
    assert all(torch.equal(r, t * 2) for r, t in zip(result, x, strict=True))
    assert [r.dtype for r in result] == [t.dtype for t in x]
    assert len(groups(fusion)) == 3


def test_an_op_without_a_formula_runs_through_torch_in_one_program() -> None:
    fusion, x = FusedFunction(lambda x: torch.digamma(x) * 2), lists((3,))
    with Lowering.INTERPRETER.running():
        assert torch.equal(fusion(x)[0], torch.digamma(x[0]) * 2)
    assert isinstance(groups(fusion)[0], TorchExecutor)


@each_lowering
def test_complex_elements_run_through_torch(lowering: Lowering) -> None:
    x = TensorColumn([torch.tensor([1 + 2j, 3j], device=lowering.device)])
    with lowering.running():
        result = FusedFunction(lambda x, n: (x * n).abs())(x, 2.0)
    assert torch.allclose(result[0], (x[0] * 2).abs())
