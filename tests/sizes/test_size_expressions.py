"""Size expressions have the values that torch's ops give, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as some
from torch.fx.experimental.proxy_tensor import make_fx

import subtensors as st
from subtensors.dispatch.sizes.expressions import (
    Size,
    added,
    convolved,
    deconvolved,
    divided,
    largest,
    multiplied,
    size_on_device,
    size_on_host,
    size_symbol,
    sliced,
    smallest,
)

N, M = size_symbol("n"), size_symbol("m")
ROWS = torch.arange(24)


def assert_sizes(expression: Size, truth: Callable[[int], int], min_size: int = 0) -> None:
    """Check the expression's value for each size of `n`, on the host and on the device."""
    rows = torch.arange(min_size, 24)
    expected = [truth(n) for n in rows.tolist()]
    assert size_on_device(expression, [N], rows[None]).tolist() == expected
    assert [size_on_host(expression, {N: n}) for n in rows.tolist()] == expected


BOUNDS = some.none() | some.integers(-12, 12)


@given(BOUNDS, BOUNDS, some.integers(1, 4))
def test_a_slice_has_the_start_and_the_length_that_python_gives_it(
    start: int | None, stop: int | None, step: int
) -> None:
    first, length = sliced(N, start, stop, step)
    assert_sizes(length, lambda n: len(range(n)[start:stop:step]))
    assert_sizes(first, lambda n: slice(start, stop, step).indices(n)[0])


def test_a_slice_of_a_slice_has_the_length_that_python_gives_it() -> None:
    _, once = sliced(N, 2, -1)
    _, twice = sliced(once, 1, None, 2)
    assert_sizes(twice, lambda n: len(range(n)[2:-1][1::2]))


@given(some.integers(1, 5), some.integers(1, 3), some.integers(0, 2), some.integers(1, 3))
def test_a_convolution_has_the_size_that_torch_gives_it(kernel: int, stride: int, padding: int, dilation: int) -> None:
    weight = torch.ones(1, 1, kernel)
    expression = convolved(N, kernel, stride, padding, dilation)
    min_size = max(dilation * (kernel - 1) + 1 - 2 * padding, 1)
    assert_sizes(
        expression, lambda n: F.conv1d(torch.ones(1, 1, n), weight, None, stride, padding, dilation).shape[2], min_size
    )


@given(some.integers(1, 5), some.integers(1, 4), some.integers(0, 2), some.booleans())
def test_a_pooling_has_the_size_that_torch_gives_it(kernel: int, stride: int, padding: int, ceil_mode: bool) -> None:
    assume(2 * padding <= kernel)
    expression = convolved(N, kernel, stride, padding, ceil_mode=ceil_mode)
    pooled = lambda n: F.avg_pool1d(torch.ones(1, 1, n), kernel, stride, padding, ceil_mode).shape[2]  # noqa: E731
    assert_sizes(expression, pooled, min_size=max(kernel, 1))


@given(some.integers(1, 5), some.integers(1, 3), some.integers(0, 1), some.integers(1, 2))
def test_a_transposed_convolution_has_the_size_that_torch_gives_it(
    kernel: int, stride: int, padding: int, dilation: int
) -> None:
    weight = torch.ones(1, 1, kernel)

    def truth(n: int) -> int:
        return F.conv_transpose1d(torch.ones(1, 1, n), weight, None, stride, padding, dilation=dilation).shape[2]

    assert_sizes(deconvolved(N, kernel, stride, padding, dilation), truth, min_size=3)


EXPRESSIONS = some.recursive(
    some.sampled_from([N, M]) | some.integers(1, 5).map(sympy.Integer),
    lambda inner: some.one_of(
        some.tuples(inner, inner).map(lambda pair: added(*pair)),
        some.tuples(inner, inner).map(lambda pair: multiplied(*pair)),
        some.tuples(inner, inner).map(lambda pair: smallest(*pair)),
        some.tuples(inner, inner).map(lambda pair: largest(*pair)),
        some.tuples(inner, some.integers(-3, 3), some.integers(1, 3)).map(lambda s: sliced(s[0], s[1], None, s[2])[1]),
        some.tuples(inner, some.integers(1, 3)).map(lambda s: convolved(s[0], kernel=1, stride=s[1], padding=1)),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, some.lists(some.tuples(some.integers(0, 40), some.integers(0, 40)), min_size=1, max_size=5))
def test_device_arithmetic_agrees_with_the_host_on_any_expression(
    expression: Size, rows: list[tuple[int, int]]
) -> None:
    sizes = torch.tensor(rows).T
    expected = [size_on_host(expression, {N: n, M: m}) for n, m in rows]
    assert size_on_device(expression, [N, M], sizes).tolist() == expected
    # One size for all rows: a number, without a dimension.
    assert size_on_device(expression, [N, M], sizes[:, 0]).item() == expected[0]


def test_a_minimum_of_maxima_has_a_value_where_sympy_leaves_numbers_unevaluated() -> None:
    assert_sizes(smallest(largest(1, N), largest(2, N)), lambda n: max(n, 1))


def test_a_quotient_raises_unless_it_is_an_integer_for_every_size() -> None:
    assert divided(6 * N * M, 3 * M) == 2 * N
    assert divided(2 * N + 4, 2) == N + 2
    for size, by in ((N, 2), (2 * N + 1, 2), (N, M), (6, 4)):
        with pytest.raises(st.RuleError, match="cannot be divided by"):
            divided(size, by)


def test_expressions_without_a_value_raise_with_their_symbols() -> None:
    with pytest.raises(st.SizeError, match=r"the size n \+ 1 needs \['n'\]"):
        size_on_host(N + 1, {M: 3})
    with pytest.raises(st.SizeError, match="the size n - 3 is -1 for n=2"):
        size_on_host(N - 3, {N: 2})
    with pytest.raises(st.RuleError, match="the size n is that of no dimension here"):
        size_on_device(N, [M], torch.tensor([3]))
    with pytest.raises(st.RuleError, match="cos is not known"):
        size_on_device(sympy.cos(N), [N], torch.tensor([3]))
    with pytest.raises(st.RuleError, match="a slice with step -1"):
        sliced(N, None, None, -1)


def test_one_trace_serves_every_size() -> None:
    expression = smallest(convolved(N, 3, stride=2, padding=1), added(M, 1))
    traced = make_fx(lambda sizes: size_on_device(expression, [N, M], sizes))(torch.tensor([5, 0]))
    assert [traced(torch.tensor([n, m])).item() for n, m in ((5, 9), (6, 9), (9, 9), (9, 3))] == [3, 3, 5, 4]
