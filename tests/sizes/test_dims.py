"""Dims give each size its bucket, raise on sizes out of range, and agree between tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import subtensors as st
from subtensors.sizes.bucket_policies import BucketPolicy
from subtensors.sizes.dims import SizeAgreement

POLICIES = some.one_of(
    some.integers(1, 40).map(st.Linear),
    some.tuples(some.floats(1.01, 4), some.integers(1, 40)).map(lambda pair: st.Geometric(*pair)),
)


def policy_for(largest: int) -> some.SearchStrategy[BucketPolicy]:
    return POLICIES | some.lists(some.integers(1, largest), min_size=1, max_size=6).map(st.Sizes)


@given(some.data(), some.integers(1, 300))
def test_a_size_gets_the_smallest_bucket_that_holds_it(data: Any, largest: int) -> None:
    dim = st.Dim("n", max=largest, buckets=data.draw(policy_for(largest)))
    assert list(dim.buckets) == sorted(set(dim.buckets))
    assert dim.buckets[-1] == largest
    for size in range(1, largest + 1):
        assert dim.bucket(size) == min(bucket for bucket in dim.buckets if bucket >= size)


@given(POLICIES)
def test_without_a_max_every_size_has_a_bucket(policy: BucketPolicy) -> None:
    dim = st.Dim("n", buckets=policy)
    buckets = [dim.bucket(size) for size in range(1, 200)]
    assert all(bucket >= size for size, bucket in enumerate(buckets, 1))
    assert buckets == sorted(buckets)
    assert [dim.bucket(bucket) for bucket in buckets] == buckets
    with pytest.raises(st.SizeError, match="has no max, so its buckets have no end"):
        dim.buckets  # noqa: B018


def test_a_linear_policy_has_the_multiples_and_a_geometric_one_the_powers() -> None:
    assert st.Dim("n", max=250, buckets=st.Linear(64)).buckets == (64, 128, 192, 250)
    assert st.Dim("n", max=200, buckets=st.Geometric(2, 16)).buckets == (16, 32, 64, 128, 200)
    assert st.Geometric(1.1, 1).up_to(6) == (1, 2, 3, 4, 5, 6)


def test_an_int_is_a_step_and_a_list_the_buckets() -> None:
    assert st.Dim("n", max=24, buckets=8) == st.Dim("n", max=24, buckets=st.Linear(8))
    assert st.Dim("n", buckets=[64, 16]) == st.Dim("n", max=64, buckets=st.Sizes([16, 64]))


def test_buckets_that_no_size_of_the_dim_needs_are_left_out() -> None:
    assert st.Dim("n", min=17, max=64, buckets=16).buckets == (32, 48, 64)


def test_an_empty_dimension_has_the_smallest_bucket() -> None:
    assert st.Dim("n", max=64, buckets=16).bucket(0) == 16


def test_a_size_out_of_range_raises_with_the_name_range_and_advice() -> None:
    dim = st.Dim("seq", min=4, max=512)
    with pytest.raises(
        st.SizeError, match=r"seq is 513, beyond its max of 512; raise max in st.Dim\('seq'.*strict=False"
    ):
        dim.bucket(513)
    with pytest.raises(st.SizeError, match="seq is 3, below its min of 4; lower min"):
        dim.bucket(3)


def test_a_non_strict_dim_returns_the_size_itself_where_a_strict_one_raises() -> None:
    dim = st.Dim("seq", min=4, max=512, strict=False)
    assert (dim.bucket(513), dim.bucket(3), dim.bucket(17)) == (513, 3, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a-b"}, "identifier, got 'a-b'"),
        ({"name": 3}, "identifier, got 3"),
        ({"max": 0}, "max of Dim 'n' is an int of at least 1, got 0"),
        ({"max": 2.5}, "got 2.5"),
        ({"min": -1}, "min of Dim 'n' is an int of at least 0, got -1"),
        ({"min": 9, "max": 8}, "min 9 above max 8"),
        ({"max": 8, "buckets": [4, 16]}, "a bucket of 16, beyond its max of 8"),
        ({"buckets": []}, r"Sizes takes one or more ints of at least 1, got \(\)"),
        ({"buckets": [4, 0]}, "got 0"),
        ({"buckets": 0}, "Linear takes a step of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_raises_with_its_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        st.Dim(**{"name": "n", **arguments})


def test_buckets_of_a_wrong_type_raise() -> None:
    with pytest.raises(TypeError, match=r"buckets are a policy.*got 'linear'"):
        st.Dim("n", buckets="linear")  # type: ignore[arg-type]
    for base, start in ((1, 16), (float("inf"), 16), (2, 0)):
        with pytest.raises(ValueError, match="Geometric takes"):
            st.Geometric(base, start)


@given(some.data())
def test_copies_of_a_dim_are_equal_to_it(data: Any) -> None:
    dim = st.Dim("n", max=300, min=2, buckets=data.draw(policy_for(300)), strict=data.draw(some.booleans()))
    for other in (copy.deepcopy(dim), copy.copy(dim), pickle.loads(pickle.dumps(dim))):
        assert other == dim
        assert hash(other) == hash(dim)
        assert other.symbol == dim.symbol
        assert other.buckets == dim.buckets
    assert dim != st.Dim("m", max=300, min=2, buckets=dim.policy, strict=dim.strict)


def test_tensors_that_disagree_on_a_dim_raise_with_their_names() -> None:
    seq, batch = st.Dim("seq", max=512), st.Dim("batch", max=8)
    sizes = SizeAgreement()
    assert sizes.bind(seq, 77, "dim 1 of input_ids")
    assert sizes.bind(batch, 4, "dim 0 of input_ids")
    assert sizes.bind(copy.deepcopy(seq), 77, "dim 1 of attention_mask")
    assert sizes.sizes == {seq: 77, batch: 4}
    with pytest.raises(st.SizeError, match="seq is 78 in dim 1 of labels and 77 in dim 1 of input_ids"):
        sizes.bind(seq, 78, "dim 1 of labels")


def test_two_dims_of_one_name_raise_in_one_call() -> None:
    sizes = SizeAgreement()
    sizes.bind(st.Dim("seq", max=512), 77, "x")
    with pytest.raises(st.SizeError, match=r"two Dims are named 'seq'.*max=512.* in x and .*max=256.* in y"):
        sizes.bind(st.Dim("seq", max=256), 77, "y")


def test_ragged_rows_agree_row_by_row_and_each_is_in_range() -> None:
    seq = st.Dim("seq", max=512)
    sizes = SizeAgreement()
    assert sizes.bind(seq, (3, 5), "x")
    with pytest.raises(st.SizeError, match=r"seq is \[3, 6\] in y and \[3, 5\] in x"):
        sizes.bind(seq, (3, 6), "y")
    with pytest.raises(st.SizeError, match="seq is 513, beyond its max"):
        sizes.bind(seq, (3, 513), "z")


def test_a_non_strict_dim_that_does_not_fit_is_logged_and_not_padded(caplog: pytest.LogCaptureFixture) -> None:
    seq = st.Dim("seq", max=512, strict=False)
    sizes = SizeAgreement()
    assert not sizes.bind(seq, 513, "w")
    assert sizes.bind(seq, 77, "x")
    with caplog.at_level("INFO", "subtensors.sizes"):
        assert not sizes.bind(seq, 78, "y")
    assert "seq is 78 in y and 77 in x: the latter is not padded" in caplog.text
    assert sizes.sizes == {seq: 77}


@pytest.mark.parametrize("name", ["rows", "Max", "floor"])
def test_a_dim_may_have_any_identifier_as_its_name(name: str) -> None:
    dim = st.Dim(name, max=16, buckets=8)
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    x = st.pad(rows, {0: dim}, value=float("nan"))
    for y in (x, pickle.loads(pickle.dumps(x))):
        found = y.softmax(1).sum(1).unpad()
        torch.testing.assert_close(found, torch.stack([row.softmax(0).sum(0) for row in rows]))


def test_a_size_that_is_no_int_has_no_bucket() -> None:
    dim = st.Dim("n", max=16, buckets=8)
    with pytest.raises(TypeError, match=r"a size of n is an int, got 1\.5"):
        dim.bucket(1.5)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_pad_names_what_it_does_not_take() -> None:
    dim = st.Dim("n", max=16)
    with pytest.raises(TypeError, match="a list of at least one tensor, got None"):
        st.pad(None, {0: dim})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of at least one tensor, got an empty list"):
        st.pad([], {0: dim})
    with pytest.raises(TypeError, match=r"a nested one is for st\.pad_nested"):
        st.pad(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), {1: dim})
