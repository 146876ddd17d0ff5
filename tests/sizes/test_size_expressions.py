"""Size expressions say what torch makes of the true sizes, on the host and on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as some
from torch.fx.experimental.proxy_tensor import make_fx

import subtensors as st
from subtensors.dispatch.sizes.dim_factors import (
    Factor,
    Factors,
    bucket_of,
    is_prefix,
    merged,
    reshaped,
    size_of,
    static,
)
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


def assert_sizes(expression: Size, truth: Callable[[int], int], least: int = 0) -> None:
    """For each size of `n`, the expression has this value, on the host and on the device."""
    rows = torch.arange(least, 24)
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


def test_a_slice_of_a_slice_is_what_python_makes_of_both() -> None:
    _, once = sliced(N, 2, -1)
    _, twice = sliced(once, 1, None, 2)
    assert_sizes(twice, lambda n: len(range(n)[2:-1][1::2]))


@given(some.integers(1, 5), some.integers(1, 3), some.integers(0, 2), some.integers(1, 3))
def test_a_convolution_has_the_size_that_torch_gives_it(kernel: int, stride: int, padding: int, dilation: int) -> None:
    weight = torch.ones(1, 1, kernel)
    expression = convolved(N, kernel, stride, padding, dilation)
    least = max(dilation * (kernel - 1) + 1 - 2 * padding, 1)
    assert_sizes(
        expression, lambda n: F.conv1d(torch.ones(1, 1, n), weight, None, stride, padding, dilation).shape[2], least
    )


@given(some.integers(1, 5), some.integers(1, 4), some.integers(0, 2), some.booleans())
def test_a_pooling_has_the_size_that_torch_gives_it(kernel: int, stride: int, padding: int, ceil_mode: bool) -> None:
    assume(2 * padding <= kernel)
    expression = convolved(N, kernel, stride, padding, ceil_mode=ceil_mode)
    pooled = lambda n: F.avg_pool1d(torch.ones(1, 1, n), kernel, stride, padding, ceil_mode).shape[2]  # noqa: E731
    assert_sizes(expression, pooled, least=max(kernel, 1))


@given(some.integers(1, 5), some.integers(1, 3), some.integers(0, 1), some.integers(1, 2))
def test_a_transposed_convolution_has_the_size_that_torch_gives_it(
    kernel: int, stride: int, padding: int, dilation: int
) -> None:
    weight = torch.ones(1, 1, kernel)

    def truth(n: int) -> int:
        return F.conv_transpose1d(torch.ones(1, 1, n), weight, None, stride, padding, dilation=dilation).shape[2]

    assert_sizes(deconvolved(N, kernel, stride, padding, dilation), truth, least=3)


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


def test_a_quotient_is_an_expression_only_where_it_is_whole_for_every_size() -> None:
    assert divided(6 * N * M, 3 * M) == 2 * N
    assert divided(2 * N + 4, 2) == N + 2
    for size, by in ((N, 2), (2 * N + 1, 2), (N, M), (6, 4)):
        with pytest.raises(st.RuleError, match="cannot be divided by"):
            divided(size, by)


def test_what_no_expression_is_worth_is_refused_by_name() -> None:
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


def real(dims: list[Factors], sizes: dict[sympy.Symbol, int]) -> torch.Tensor:
    """True where an element of the padded storage is real, by the definition of factors."""
    factors = [factor for dim in dims for factor in dim]
    mask = torch.ones([factor.bucket for factor in factors], dtype=torch.bool)
    for axis, factor in enumerate(factors):
        inside = torch.arange(factor.bucket) < size_on_host(factor.size, sizes)
        mask &= inside.view([-1 if i == axis else 1 for i in range(len(factors))])
    return mask.reshape([bucket_of(dim) for dim in dims])


FACTORS = some.one_of(
    some.integers(1, 4).map(static),
    some.sampled_from([Factor(4, N), Factor(3, M), Factor(8, 2 * N), Factor(5, N + 1)]),
)


@given(some.lists(some.lists(FACTORS, max_size=2).map(tuple), min_size=1, max_size=3), some.data())
def test_a_reshape_keeps_every_element_as_real_as_it_was(dims: list[Factors], data: some.DataObject) -> None:
    elements = math.prod(map(bucket_of, dims))
    assume(elements <= 2000)
    shape = []
    rest = elements
    while rest > 1:
        size = data.draw(some.sampled_from([d for d in range(2, rest + 1) if rest % d == 0]))
        shape.append(size)
        rest //= size
    try:
        result = reshaped(dims, shape)
    except st.RuleError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "cuts through a padded dimension" in refusal
        return
    for n, m in product((0, 2, 4), (1, 3)):
        sizes = {N: n, M: m}
        before, after = real(dims, sizes), real(result, sizes)
        assert after.shape == torch.Size(shape)
        assert torch.equal(after, before.reshape(shape))
        for dim, mask_dim in zip(result, after.shape, strict=True):
            mask = real([dim], sizes)
            assert int(mask.sum()) == size_on_host(size_of(dim), sizes)
            if is_prefix(dim):
                assert torch.equal(mask, torch.arange(mask_dim) < size_on_host(size_of(dim), sizes))


@given(some.lists(FACTORS, min_size=1, max_size=4))
def test_flattening_and_back_gives_the_dimensions_that_there_were(factors: list[Factor]) -> None:
    dims = [merged([factor]) for factor in factors]
    shape = [factor.bucket for factor in factors]
    assume(math.prod(shape) <= 2000)
    assert reshaped(reshaped(dims, [-1]), shape) == dims


def test_batch_and_sequence_flatten_and_come_back() -> None:
    flat = reshaped([(Factor(8, M),), (Factor(16, N),), (static(4),)], (-1, 4))
    assert flat == [(Factor(8, M), Factor(16, N)), (static(4),)]
    assert size_of(flat[0]) == M * N
    assert not is_prefix(flat[0])
    assert reshaped(flat, (8, 16, 2, 2)) == [(Factor(8, M),), (Factor(16, N),), (static(2),), (static(2),)]


def test_a_shape_through_a_padded_dimension_is_refused_with_both_shapes() -> None:
    with pytest.raises(st.RuleError, match=r"\(2, 16\) to \(4, 8\) cuts through a padded dimension of bucket 16"):
        reshaped([(static(2),), (Factor(16, N),)], (4, 8))
    with pytest.raises(st.RuleError, match=r"\(5, -1\) is not one of 32 elements"):
        reshaped([(static(2),), (Factor(16, N),)], (5, -1))


def test_a_tensor_without_elements_takes_any_empty_shape() -> None:
    assert reshaped([(static(0),), (Factor(16, N),)], (4, 0)) == [(static(4),), (static(0),)]
