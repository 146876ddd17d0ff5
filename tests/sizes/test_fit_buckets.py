"""Fitted buckets waste no more than any other choice of as many buckets."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import subtensors as st


def waste(buckets: tuple[int, ...], lengths: list[int]) -> int:
    """Padded elements over a sample of lengths."""
    return sum(min(b for b in buckets if b >= n) - n for n in lengths)


@given(some.lists(some.integers(1, 30), min_size=1, max_size=9), some.integers(1, 4), some.integers(1, 5))
def test_fitted_buckets_waste_as_little_as_the_best_choice(lengths: list[int], max_graphs: int, multiple: int) -> None:
    fitted = st.fit_buckets(lengths, max_graphs=max_graphs, multiple_of=multiple).sizes
    assert len(fitted) <= max_graphs
    assert all(bucket % multiple == 0 for bucket in fitted)
    top = -(-max(lengths) // multiple) * multiple
    rest = range(multiple, top, multiple)
    choices = (
        (*chosen, top) for k in range(min(max_graphs, len(rest) + 1)) for chosen in itertools.combinations(rest, k)
    )
    best = min(waste(chosen, lengths) for chosen in itertools.islice(choices, 5000))
    assert waste(fitted, lengths) <= best


def test_there_are_no_more_fitted_buckets_than_the_lengths_need() -> None:
    assert st.fit_buckets([5, 5, 9], max_graphs=8) == st.Sizes([5, 9])
    assert st.fit_buckets([5, 6, 9], max_graphs=1) == st.Sizes([9])
    assert st.fit_buckets(torch.tensor([5, 6, 17]), max_graphs=8, multiple_of=8) == st.Sizes([8, 24])


def test_fitting_thousands_of_lengths_wastes_less_than_linear_buckets_do() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(20_000, generator=generator).mul(0.6).exp() * 120).long().clamp(1, 2048).tolist()
    fitted = st.fit_buckets(lengths, max_graphs=8).sizes
    assert len(fitted) == 8
    linear = st.Dim("n", max=max(lengths), buckets=-(-max(lengths) // 8)).buckets
    assert waste(fitted, lengths) < 0.5 * waste(linear, lengths)


@pytest.mark.parametrize("lengths", [[], [0], [3, -1], [2.5], [[3]]])
def test_wrong_arguments_of_fit_buckets_raise(lengths: Any) -> None:
    with pytest.raises(ValueError, match="fit_buckets takes one or more lengths"):
        st.fit_buckets(lengths)
    with pytest.raises(ValueError, match="max_graphs is an int of at least 1, got 0"):
        st.fit_buckets([3], max_graphs=0)


def test_a_counter_of_lengths_is_as_the_lengths() -> None:
    lengths = [12] * 100 + [60, 64, 500]
    assert st.fit_buckets(Counter(lengths), max_graphs=2) == st.fit_buckets(lengths, max_graphs=2)
    assert st.fit_buckets(lengths, max_graphs=2) != st.fit_buckets(set(lengths), max_graphs=2)
