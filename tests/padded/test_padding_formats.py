"""Padded tensors from and to nested tensors and masks, and the debug mode for arithmetic on sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))


@given(lengths=some.lists(some.integers(1, 24), min_size=1, max_size=4))
def test_a_jagged_tensor_comes_back_as_it_was_with_its_gradients(lengths: list[int]) -> None:
    rows = [torch.randn(n, 2, requires_grad=True) for n in lengths]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    x = st.pad_nested(nested, SEQ, value=float("nan"))
    assert x.logical_shape == (len(rows), tuple(lengths), 2)
    back = st.to_nested(x * 3)
    assert [n.tolist() for n in back.unbind()] == [(3 * row).tolist() for row in rows]
    back.values().sum().backward()
    assert all(row.grad is not None and row.grad.eq(3).all() for row in rows)


def test_a_jagged_tensor_with_holes_between_its_rows_is_padded_row_by_row() -> None:
    whole = torch.arange(12.0).view(2, 6)
    nested = torch.nested.narrow(whole, 1, torch.tensor([1, 0]), torch.tensor([3, 5]), layout=torch.jagged)
    x = st.pad_nested(nested, SEQ)
    assert [row.tolist() for row in x.unpad()] == [[1, 2, 3], [6, 7, 8, 9, 10]]
    assert [row.tolist() for row in st.to_nested(x).unbind()] == [[1, 2, 3], [6, 7, 8, 9, 10]]


def test_only_a_batch_ragged_in_its_second_dim_is_a_jagged_tensor() -> None:
    for x in (st.pad(torch.ones(2, 5), {1: SEQ}), st.pad([torch.ones(2, 5)], {1: SEQ})):
        with pytest.raises(st.RuleError, match="ragged in its second dim alone"):
            st.to_nested(x)


@given(lengths=some.lists(some.integers(1, 10), min_size=1, max_size=4), width=some.integers(10, 12))
def test_a_mask_comes_back_as_it_was(lengths: list[int], width: int) -> None:
    t = torch.randn(len(lengths), width, 3, requires_grad=True)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    x = st.pad_masked(t, mask, SEQ)
    assert x.logical_shape[1] == tuple(lengths)
    dense, again = st.to_masked(x)
    common = min(width, again.shape[1])
    assert again[:, :common].equal(mask[:, :common])
    assert dense[:, :common].equal((t * mask[..., None])[:, :common])
    x.sum().backward()
    assert t.grad is not None
    assert t.grad.equal(mask[..., None].expand_as(t).to(t.dtype))


def test_what_is_no_right_padding_is_refused() -> None:
    t = torch.ones(1, 3)
    with pytest.raises(st.SizeError, match="right padding"):
        st.pad_masked(t, torch.tensor([[0, 1, 1]]), SEQ)
    with pytest.raises(ValueError, match="a mask is"):
        st.pad_masked(t, torch.ones(3), SEQ)
    with pytest.raises(TypeError, match="jagged"):
        st.pad_nested(t, SEQ)
    with pytest.raises(st.RuleError, match="jagged"):
        st.to_nested(st.pad(t, {1: SEQ}))


def test_arithmetic_on_a_padded_size_warns_with_its_line() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    with warnings.catch_warnings(record=True) as caught, st.watch_size_arithmetic():
        warnings.simplefilter("always")
        _ = x.sum() / x.shape[1]
        _ = x.size(1) * 2
        _ = 1 / x.size()[1]
        _ = torch.ones(x.shape[1])
        _ = x.sum() / x.numel()
        expected = len(caught)
        _ = x.view(x.shape[0], x.shape[1], 1)[:, : x.shape[1] - 1]
        _ = x.sum() / x.shape[0]
        _ = x.sum() / x.count(1)
    assert expected == 5
    assert len(caught) == expected
    assert all(issubclass(w.category, st.PaddedSizeWarning) for w in caught)
    assert all(Path(w.filename).name == Path(__file__).name for w in caught)
    lines = Path(__file__).read_text().splitlines()
    assert "x.sum() / x.shape[1]" in lines[caught[0].lineno - 1]
    assert "the bucket of dim 1 (true size seq)" in str(caught[0].message)


WITHIN: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list of positions": lambda x, i: x[:, i],
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(2, -1)),
    "take_along_dim": lambda x, i: x.take_along_dim(i[None], 1),
    "rows and positions": lambda x, i: x[torch.zeros_like(i), i],
    "scatter": lambda x, i: x.scatter(1, i.expand(2, -1), 0.0),
    "index_fill": lambda x, i: x.index_fill(1, i, 0.0),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7)])
def test_positions_beyond_the_true_size_are_refused_in_the_mode(name: str, lengths: tuple[int, int]) -> None:
    rows = [torch.randn(n) for n in lengths]
    x = st.pad(rows, {0: SEQ}) if len(set(lengths)) > 1 else st.pad(torch.stack(rows), {1: SEQ})
    index = WITHIN[name]
    index(x, torch.arange(6))
    with st.watch_size_arithmetic():
        index(x, torch.arange(5))
        with pytest.raises(IndexError, match="position 5 of dim 1 is padding"):
            index(x, torch.arange(6))


def test_outside_of_the_mode_a_size_is_a_plain_int() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    assert type(x.shape[1]) is int
