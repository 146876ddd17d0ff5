"""Conversions between padded tensors, jagged nested tensors, and tensors with a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))


@given(lengths=some.lists(some.integers(1, 24), min_size=1, max_size=4))
def test_a_jagged_tensor_round_trips_with_its_gradients(lengths: list[int]) -> None:
    rows = [torch.randn(n, 2, requires_grad=True) for n in lengths]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    x = st.pad_nested(nested, SEQ, value=float("nan"))
    assert x.logical_shape == (len(rows), tuple(lengths), 2)
    back = st.to_nested(x * 3)
    assert [n.tolist() for n in back.unbind()] == [(3 * row).tolist() for row in rows]
    back.values().sum().backward()
    assert all(row.grad is not None and row.grad.eq(3).all() for row in rows)


def test_a_jagged_tensor_with_holes_between_its_rows_is_padded_row_by_row() -> None:
    base = torch.arange(12.0).view(2, 6)
    nested = torch.nested.narrow(base, 1, torch.tensor([1, 0]), torch.tensor([3, 5]), layout=torch.jagged)
    x = st.pad_nested(nested, SEQ)
    assert [row.tolist() for row in x.unpad()] == [[1, 2, 3], [6, 7, 8, 9, 10]]
    assert [row.tolist() for row in st.to_nested(x).unbind()] == [[1, 2, 3], [6, 7, 8, 9, 10]]


def test_values_before_and_after_the_rows_of_a_jagged_tensor_have_no_effect() -> None:
    values = torch.arange(7.0, requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([1, 3, 6]))
    x = st.pad_nested(nested, SEQ)
    assert [row.tolist() for row in x.unpad()] == [[1, 2], [3, 4, 5]]
    x.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 1, 1, 1, 1, 1, 0]


def test_to_nested_raises_unless_the_second_dim_alone_is_ragged() -> None:
    for x in (st.pad(torch.ones(2, 5), {1: SEQ}), st.pad([torch.ones(2, 5)], {1: SEQ})):
        with pytest.raises(st.RuleError, match="ragged in its second dim alone"):
            st.to_nested(x)


@given(lengths=some.lists(some.integers(1, 10), min_size=1, max_size=4), width=some.integers(10, 12))
def test_a_masked_tensor_round_trips_with_its_gradients(lengths: list[int], width: int) -> None:
    t = torch.randn(len(lengths), width, 3, requires_grad=True)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    x = st.pad_masked(t, mask, SEQ)
    assert x.logical_shape[1] == tuple(lengths)
    dense, mask_back = st.to_masked(x)
    common = min(width, mask_back.shape[1])
    assert mask_back[:, :common].equal(mask[:, :common])
    assert dense[:, :common].equal((t * mask[..., None])[:, :common])
    x.sum().backward()
    assert t.grad is not None
    assert t.grad.equal(mask[..., None].expand_as(t).to(t.dtype))


def test_masks_that_are_no_right_padding_raise() -> None:
    t = torch.ones(1, 3)
    with pytest.raises(st.SizeError, match="right padding"):
        st.pad_masked(t, torch.tensor([[0, 1, 1]]), SEQ)
    with pytest.raises(ValueError, match="a mask is"):
        st.pad_masked(t, torch.ones(3), SEQ)
    with pytest.raises(TypeError, match="jagged"):
        st.pad_nested(t, SEQ)
    with pytest.raises(st.RuleError, match="jagged"):
        st.to_nested(st.pad(t, {1: SEQ}))
