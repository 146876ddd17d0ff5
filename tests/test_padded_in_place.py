"""Writing to padded tensors: in place, through views, by `out=`; what is padding keeps what it held."""

from __future__ import annotations

import pytest
import torch

import subtensors as st

SEQ = st.Dim("seq", max=24, buckets=st.Linear(8))
NAN = float("nan")


def test_a_plain_tensor_cannot_take_padded_values_in_place() -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(8).add_(st.pad(torch.ones(5), {0: SEQ}))


def test_an_op_in_place_leaves_padding_as_it_was_only_where_something_is_known_of_it() -> None:
    known, unknown = st.pad(torch.ones(3), {0: SEQ}, value=2.0), st.pad(torch.ones(3), {0: SEQ})
    unknown = unknown + 1
    for x in (known, unknown):
        before, kept = x.dense.data_ptr(), x.dense[3:].clone()
        view = x[None]
        x.mul_(3).add_(x)
        assert x.dense.data_ptr() == before
        assert x.unpad().tolist() == view.unpad()[0].tolist() == [6.0 * (1 + (x is unknown))] * 3
        assert torch.equal(x.dense[3:], kept) == (x is known)
    assert known.prod().item() == 6.0**3


def test_a_view_writes_into_what_it_views() -> None:
    x = st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    x[:, :-1].fill_(1)
    assert x.unpad().tolist() == [[1, 1, 1, 1, 0]] * 2
    assert x.dense[:, 5:].eq(7).all()
    x[:, -1].fill_(2)
    x[:, -3:-1].mul_(3)
    assert x.unpad().tolist() == [[1, 1, 3, 3, 2]] * 2
    assert x.dense[:, 5:].eq(7).all()


def test_a_copy_takes_values_and_keeps_padding() -> None:
    x = st.pad(torch.zeros(2, 5), {1: SEQ}, value=7)
    source = st.pad(torch.ones(2, 5), {1: SEQ}, value=NAN)
    for copied in (lambda: x.copy_(source), lambda: x.zero_().copy_(other=source)):
        assert copied() is x
        assert x.unpad().eq(1).all()
        assert x.dense[:, 5:].eq(7).all()


def test_a_call_may_write_to_an_out_argument() -> None:
    x, out = st.pad(torch.ones(5), {0: SEQ}), st.pad(torch.zeros(5), {0: SEQ}, value=7)
    assert torch.add(x, 1, out=out) is out
    assert out.unpad().tolist() == [2.0] * 5
    assert out.dense[5:].eq(7).all()
