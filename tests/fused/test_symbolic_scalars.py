"""Arithmetic on dynamic scalars: Python's own, at each call."""

import math
from operator import add, floordiv, mod, mul, sub, truediv

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import subtensors
from subtensors.dispatch.fused.symbolic_scalars import compile_expression, expression_of, symbolic_scalar

NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-300, 1.0, 0.1]), st.integers(-3, 3), st.floats()
)
OPERATIONS = st.sampled_from([add, sub, mul, truediv, floordiv, mod])


def _applied(steps, start):
    result = start
    for operation, number, is_reflected in steps:
        number = start if number is None else number
        left, right = (number, result) if is_reflected else (result, number)
        result = operation(left, right)
    return result


def _or_error(function):
    try:
        return repr(function())
    except ArithmeticError as error:
        return repr(type(error))


@given(st.lists(st.tuples(OPERATIONS, st.none() | NUMBERS, st.booleans()), min_size=1, max_size=4), NUMBERS)
def test_an_expression_has_the_value_that_python_gives_it(steps, value):
    expression = expression_of(_applied(steps, symbolic_scalar(0, type(value))))
    assert _or_error(lambda: compile_expression(expression, 1)([value])) == _or_error(lambda: _applied(steps, value))


@pytest.mark.parametrize("k", [math.inf, -math.inf, math.nan, 2.0, 1e-20])
def test_numbers_that_look_like_zero_or_one_are_not_folded(k):
    @subtensors.fused
    def math_of(p, k):
        p.add_(k * 0).add_(k - k).add_(k / k).add_((k + 1) - 1)

    p, q = subtensors.TensorList([torch.ones(2, dtype=torch.float64)]), torch.ones(2, dtype=torch.float64)
    math_of(p, k)
    math_of.function(q, k)
    assert torch.equal(p[0], q) or (p[0].isnan().all() and q.isnan().all())


def test_a_number_compared_with_itself_is_refused_too():
    @subtensors.fused
    def is_nan(p, k):
        p.mul_(0 if k != k else 1)

    with pytest.raises(subtensors.RuleError, match="needs the value of a Python number"):
        is_nan(subtensors.TensorList([torch.ones(2)]), math.nan)
