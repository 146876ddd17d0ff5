"""PaddedTensor itself: shapes and sizes, padding and unpadding, and programs that never read the padding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from padded_programs import NAN, PROGRAMS, RAGGED, SEQ
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls


def test_shape_is_the_buckets_and_logical_shape_the_true_one() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ})
    assert x.shape == (2, 8)
    assert x.logical_shape == (2, 5)
    assert x.dense.shape == (2, 8)
    assert x.mask().sum() == 10
    assert x.count(1).item() == x.count(-1).item() == 5
    assert x.count(0).item() == 2
    assert x.unpad().equal(torch.ones(2, 5))
    assert x.tolist() == torch.ones(2, 5).tolist()


@given(lengths=some.lists(some.integers(1, 24), min_size=1, max_size=4), width=some.integers(1, 3))
def test_unpadding_a_ragged_batch_returns_its_rows_and_gradients(lengths: list[int], width: int) -> None:
    rows = [torch.randn(n, width, requires_grad=True) for n in lengths]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    assert x.logical_shape == (len(rows), tuple(lengths), width)
    assert x.count(1).tolist() == lengths
    back = x.unpad()
    assert all(a.equal(b) for a, b in zip(back, rows, strict=True))
    sum((i + 1) * row.sum() for i, row in enumerate(back)).backward()  # type: ignore[union-attr]
    assert all(row.grad is not None and row.grad.eq(i + 1).all() for i, row in enumerate(rows))


@given(n=some.integers(1, 24), m=some.integers(1, 16))
def test_several_dims_are_padded_at_once_and_padding_twice_changes_nothing(n: int, m: int) -> None:
    t = torch.randn(n, 2, m)
    dims = {0: SEQ, -1: st.Dim("width", max=16, buckets=4)}
    x = st.pad(t, dims)
    assert x.shape == (SEQ.bucket(n), 2, -(-m // 4) * 4)
    assert st.pad(x, dims) is x
    assert x.unpad().equal(t)
    assert st.PaddedTensor(t, dims).unpad().equal(t)


def test_sizes_that_disagree_or_exceed_the_max_raise_with_the_dims_name() -> None:
    with pytest.raises(st.SizeError, match="seq is 5 in dim 1 and 4 in dim 0"):
        st.pad(torch.ones(4, 5), {0: SEQ, 1: SEQ})
    with pytest.raises(st.SizeError, match="seq is 30, beyond its max of 24"):
        st.pad(torch.ones(30), {0: SEQ})
    with pytest.raises(st.SizeError, match="seq is 5 in one tensor and 6 in another"):
        _ = st.pad(torch.ones(5), {0: SEQ}) + st.pad(torch.ones(6), {0: SEQ})
    with pytest.raises(ValueError, match="cannot pad dim 2 of a tensor with 1 dims"):
        st.pad(torch.ones(3), {2: SEQ})
    with pytest.raises(ValueError, match="may differ in the padded dims"):
        st.pad([torch.ones(3, 2), torch.ones(3, 4)], {0: SEQ})


def test_a_non_strict_dim_that_does_not_fit_pads_nothing() -> None:
    hint = st.Dim("hint", max=4, buckets=4, strict=False)
    assert type(st.pad(torch.ones(9), {0: hint})) is Tensor
    rows = [torch.arange(3.0), torch.arange(9.0)]
    batch = st.pad(rows, {0: hint}, value=NAN)
    assert batch.shape == (2, 9)
    assert [row.tolist() for row in batch.unpad()] == [row.tolist() for row in rows]
    images = [torch.randn(3, 9), torch.randn(9, 3)]
    assert all(a.equal(b) for a, b in zip(st.pad(images, {0: hint, 1: hint}).unpad(), images, strict=True))


def test_rows_of_different_dtypes_raise() -> None:
    with pytest.raises(ValueError, match=r"row 1 is of torch.int64 on cpu and row 0 of torch.float32"):
        st.pad([torch.ones(3), torch.ones(3, dtype=torch.int64)], {0: SEQ})


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_steps_a_padded_parameter(foreach: bool) -> None:
    source = torch.randn(5, dtype=torch.float64)
    leaves = [st.pad(source, {0: SEQ}, value=NAN).requires_grad_(), source.clone().requires_grad_()]
    for leaf in leaves:
        optimizer = torch.optim.Adam([leaf], lr=0.1, foreach=foreach)
        for _ in range(2):
            optimizer.zero_grad()
            (leaf * leaf).sum().backward()
            optimizer.step()
    torch.testing.assert_close(leaves[0].unpad(), leaves[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_keep_values_and_sizes(clone: Callable[[Any], Any]) -> None:
    x = st.pad([torch.ones(3), torch.ones(5)], {0: SEQ}).requires_grad_()
    again = clone(x)
    assert again.logical_shape == x.logical_shape
    assert again.requires_grad
    assert (again._sizes.values is x._sizes.values) == (clone is copy.copy)  # type: ignore[union-attr]
    assert [row.tolist() for row in again.unpad()] == [row.tolist() for row in x.unpad()]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
def test_valid_values_and_gradients_equal_the_unpadded_programs(name: str, poison: float) -> None:
    program = PROGRAMS[name]
    source = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = program(source, weight)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [source, weight], cotangent, allow_unused=True)
    actual = program(st.pad(source, {1: SEQ}, value=poison), weight)
    actual = actual.unpad() if isinstance(actual, st.PaddedTensor) else actual
    torch.testing.assert_close(actual, expected)
    for a, e in zip(torch.autograd.grad(actual, [source, weight], cotangent, allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", RAGGED)
def test_each_row_of_a_ragged_batch_gets_the_result_it_has_alone(name: str) -> None:
    program = PROGRAMS[name]
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 7, 2)]
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = [program(row[None], weight)[0] for row in rows]
    total = sum((e * e).sum() for e in expected)
    assert isinstance(total, Tensor)
    wanted = torch.autograd.grad(total, [*rows, weight], allow_unused=True)
    actual = program(st.pad(rows, {0: SEQ}, value=NAN), weight)
    parts = actual.unpad() if isinstance(actual, st.PaddedTensor) else list(actual)
    for a, e in zip(parts, expected, strict=True):
        torch.testing.assert_close(a, e)
    square = sum((a * a).sum() for a in parts)
    assert isinstance(square, Tensor)
    for a, e in zip(torch.autograd.grad(square, [*rows, weight], allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(a, e)


def test_an_op_without_a_rule_runs_on_unpadded_data_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    padded_calls.fallbacks.pop("renorm", None)
    t = torch.randn(5, 3)
    x = st.pad(t, {0: SEQ}, value=NAN)
    with caplog.at_level("WARNING", "subtensors.padded"):
        for _ in range(2):
            out = torch.renorm(x, 2, 0, 0.5)
    assert out.unpad().equal(torch.renorm(t, 2, 0, 0.5))
    assert out.shape == (8, 3)
    assert padded_calls.fallbacks["renorm"] == 2
    assert [record.message for record in caplog.records if "renorm runs on the unpadded data" in record.message]
    assert len(caplog.records) == 1


def test_indexing_rows_of_a_ragged_batch_keeps_their_lengths() -> None:
    rows = [torch.arange(float(n)) for n in (5, 3, 7)]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    assert x[1].unpad().equal(rows[1])
    assert x[-1].logical_shape == (7,)
    assert [row.unpad().tolist() for row in x] == [row.tolist() for row in rows]
    assert [row.tolist() for row in x[1:].unpad()] == [row.tolist() for row in rows[1:]]
    assert x[torch.arange(3), torch.tensor([-1, -1, -2])].tolist() == [4.0, 2.0, 5.0]


@pytest.mark.parametrize("lengths", [(5, 7, 2), (7,)])
@pytest.mark.parametrize(("needs_weights", "zero"), [(True, False), (False, False), (False, True)])
def test_multihead_attention_over_a_ragged_batch_equals_attention_per_row(
    needs_weights: bool, zero: bool, lengths: tuple[int, ...]
) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=zero).double()
    rows = [torch.randn(n, 8, dtype=torch.float64) for n in lengths]
    x = st.pad(rows, {0: SEQ}, value=NAN)
    out, weights = attention(x, x, x, need_weights=needs_weights)
    for i, row in enumerate(rows):
        expected, expected_weights = attention(row, row, row, need_weights=needs_weights)
        torch.testing.assert_close(out.unpad()[i], expected)
        if needs_weights:
            torch.testing.assert_close(weights.unpad()[i], expected_weights)


def test_a_reduction_over_the_rows_alone_raises() -> None:
    x = st.pad([torch.ones(5), torch.ones(3)], {0: SEQ})
    for reduce in (torch.sum, torch.mean, torch.amax, torch.var):
        with pytest.raises(st.RuleError, match="rows of a ragged batch"):
            reduce(x, 0)
    assert x.mean().item() == 1


def test_moving_to_another_device_moves_the_sizes_too() -> None:
    x = st.pad(torch.ones(5), {0: SEQ}).to("meta")
    assert x.logical_shape == (5,)
    assert x.exp().mask().device.type == "meta"


@pytest.mark.parametrize("n", [3, 5, 8])
def test_dropout_draws_random_numbers_for_the_whole_bucket(n: int) -> None:
    t = torch.randn(2, n, 3)
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(torch.ones(2, 8, 3), 0.5)[:, :n] * t
    torch.manual_seed(1)
    actual = torch.nn.functional.dropout(st.pad(t, {1: SEQ}, value=NAN), 0.5)
    torch.testing.assert_close(actual.unpad(), expected)


@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_functions_of_torch_masked_that_would_count_padding_raise(name: str) -> None:
    function = {"mean": torch.masked.mean, "var": torch.masked.var, "std": torch.masked.std}[name]
    x = torch.randn(2, 5, dtype=torch.float64)
    mask = x > -1
    padded, padded_mask = st.pad(x, {1: SEQ}, value=NAN), st.pad(mask, {1: SEQ}, value=True)
    for keywords in ({}, {"mask": torch.ones(2, padded.shape[1], dtype=torch.bool)}):
        with pytest.raises(st.RuleError, match=f"torch.masked.*{name}.* counts padding: call the method"):
            function(padded, 1, **keywords)
        with pytest.raises(Exception, match=f"torch.masked.*{name}.* counts padding"):
            torch.compile(lambda: function(padded, 1, **keywords), fullgraph=True, backend="eager")()  # noqa: B023
    torch.testing.assert_close(function(padded, 1, mask=padded_mask), function(x, 1, mask=mask))


def test_numpy_returns_the_unpadded_data() -> None:
    t = torch.randn(2, 5)
    x = st.pad(t, {1: SEQ}, value=NAN)
    assert (x.numpy() == t.numpy()).all()
    assert (np.asarray(x) == t.numpy()).all()
    with pytest.raises(st.RuleError, match="a ragged batch is no array"):
        st.pad([t[0], t[0, :3]], {0: SEQ}).numpy()


def test_apply_and_map_run_on_the_unpadded_data() -> None:
    x = st.pad(torch.ones(2, 5), {1: SEQ}, value=NAN)
    assert x.apply_(lambda v: v + 1) is x
    assert x.map_(st.pad(torch.ones(2, 5), {1: SEQ}), lambda a, b: a + b).unpad().eq(3).all()


def test_narrow_with_a_negative_start_counts_from_the_true_end() -> None:
    t = torch.randn(2, 5, 3)
    x = st.pad(t, {1: SEQ}, value=NAN)
    for start, length in ((-2, 2), (-4, 2), (1, 3), (0, 5)):
        assert x.narrow(1, start, length).unpad().equal(t.narrow(1, start, length))
    assert x.narrow(1, 1, x.shape[1] - 1).unpad().equal(t[:, 1:])
    for start, length in ((-6, 2), (1, 5), (-2, 3)):
        for source in (t, x):
            with pytest.raises((RuntimeError, IndexError)):
                source.narrow(1, start, length)


def test_queries_of_the_storage_are_answered_by_the_wrapper() -> None:
    x, y = st.pad(torch.ones(2, 5), {1: SEQ}), st.pad(torch.ones(2, 9), {1: SEQ})
    assert (x.is_same_size(x), x.is_same_size(y), x.is_set_to(y), x.is_pinned()) == (True, False, False, False)


def test_slices_that_may_be_empty_broadcast_where_they_are_not() -> None:
    for n in (1, 2, 5):
        t = torch.randn(2, n, 3)
        x = st.pad(t, {1: SEQ}, value=NAN)
        assert (x[:, ::2][:, :1] + x[:, 1::2][:, :1]).unpad().equal(t[:, ::2][:, :1] + t[:, 1::2][:, :1])
