"""Factors of dims: a reshape of the padded storage keeps each element valid or padding."""

from __future__ import annotations

import math
from itertools import product

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as some

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
from subtensors.dispatch.sizes.expressions import size_on_host, size_symbol

N, M = size_symbol("n"), size_symbol("m")


def valid(dims: list[Factors], sizes: dict[sympy.Symbol, int]) -> torch.Tensor:
    """True where an element of the padded storage is valid, by the definition of factors."""
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
def test_a_reshape_keeps_every_element_valid_or_padding(dims: list[Factors], data: some.DataObject) -> None:
    elements = math.prod(map(bucket_of, dims))
    assume(elements <= 2000)
    shape = []
    remaining = elements
    while remaining > 1:
        size = data.draw(some.sampled_from([d for d in range(2, remaining + 1) if remaining % d == 0]))
        shape.append(size)
        remaining //= size
    try:
        result = reshaped(tuple(dims), tuple(shape))
    except st.RuleError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "cuts through a padded dimension" in message
        return
    for n, m in product((0, 2, 4), (1, 3)):
        sizes = {N: n, M: m}
        before, after = valid(dims, sizes), valid(list(result), sizes)
        assert after.shape == torch.Size(shape)
        assert torch.equal(after, before.reshape(shape))
        for dim, mask_dim in zip(result, after.shape, strict=True):
            mask = valid([dim], sizes)
            assert int(mask.sum()) == size_on_host(size_of(dim), sizes)
            if is_prefix(dim):
                assert torch.equal(mask, torch.arange(mask_dim) < size_on_host(size_of(dim), sizes))


@given(some.lists(FACTORS, min_size=1, max_size=4))
def test_flatten_and_unflatten_return_the_same_dims(factors: list[Factor]) -> None:
    dims = tuple(merged([factor]) or (static(1),) for factor in factors)
    shape = tuple(factor.bucket for factor in factors)
    assume(math.prod(shape) <= 2000)
    assert reshaped(reshaped(dims, (math.prod(shape),)), shape) == dims


def test_batch_and_sequence_flatten_to_one_dim_of_two_factors() -> None:
    flat = reshaped(((Factor(8, M),), (Factor(16, N),), (static(4),)), (128, 4))
    assert flat == ((Factor(8, M), Factor(16, N)), (static(4),))
    assert size_of(flat[0]) == M * N
    assert not is_prefix(flat[0])
    assert reshaped(flat, (8, 16, 2, 2)) == ((Factor(8, M),), (Factor(16, N),), (static(2),), (static(2),))


def test_a_padded_factor_of_bucket_one_goes_to_a_free_dim_and_is_never_lost() -> None:
    rows, columns = (Factor(1, M),), (Factor(16, N),)
    assert reshaped((rows, columns), (16, 1)) == (columns, rows)
    assert reshaped((rows, columns), (16,)) == (rows + columns,)
    assert reshaped((columns, rows), (16,)) == (rows + columns,)


def test_a_reshape_that_cuts_a_padded_dim_raises_with_both_shapes() -> None:
    with pytest.raises(st.RuleError, match=r"\(2, 16\) to \(4, 8\) cuts through a padded dimension of bucket 16"):
        reshaped(((static(2),), (Factor(16, N),)), (4, 8))
    with pytest.raises(st.RuleError, match=r"\(5, 6\) is not one of 32 elements"):
        reshaped(((static(2),), (Factor(16, N),)), (5, 6))


def test_a_tensor_without_elements_takes_any_empty_shape() -> None:
    assert reshaped(((static(0),), (Factor(16, N),)), (4, 0)) == ((static(4),), (static(0),))
