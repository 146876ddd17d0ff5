"""Ops that would move or resize a static tensor are refused, under every name that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st


def six(device: str) -> st.StaticAddressTensor:
    return st.static(torch.arange(6.0, device=device).reshape(2, 3))


MOVES: dict[str, Callable[[Tensor], Any]] = {
    ".data =": lambda t: setattr(t, "data", torch.ones(2, 3, device=t.device)),
    "set_": lambda t: t.set_(torch.ones(2, 3, device=t.device)),
    "resize_": lambda t: t.resize_(1000),
    "resize_ ": lambda t: torch.ops.aten.resize_.default(t, [1000]),
    "resize_  ": lambda t: torch.ops.aten.resize_(t, [1000]),
    "resize_as_": lambda t: t.resize_as_(torch.ones(1000, device=t.device)),
    "resize_as_ ": lambda t: torch.resize_as_(t, torch.ones(1000, device=t.device)),
    "set_ ": lambda t: torch.ops.aten.set_.source_Tensor(t, torch.ones(2, 3, device=t.device)),
    "as_strided_": lambda t: t.as_strided_((2,), (1,), 1),
    "torch.utils.swap_tensors": lambda t: torch.utils.swap_tensors(t, torch.ones(2, 3)),
    "torch.utils.swap_tensors ": lambda t: torch.utils.swap_tensors(torch.ones(2, 3), t),
}


@pytest.mark.parametrize("op", MOVES)
def test_a_relocating_op_is_refused_with_its_name_and_advice(device: str, op: str) -> None:
    s = six(device)
    before = s.data_ptr(), s.shape, s.tolist()
    with pytest.raises(st.AddressError, match=rf"^{op.strip()} would move .*shape \(2, 3\): \w+"):
        MOVES[op](s)
    assert (s.data_ptr(), s.shape, s.tolist()) == before


@pytest.mark.parametrize("shape", [(40, 40), (2,)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_an_out_of_another_shape_is_refused_and_leaves_shape_and_address(device: str, shape: tuple[int, ...]) -> None:
    s = six(device)
    at = s.data_ptr()
    with pytest.raises(st.AddressError, match=r"out=.*would move"):
        torch.add(torch.ones(shape, device=device), 1, out=s)
    assert (s.data_ptr(), s.shape) == (at, (2, 3))


TOPK = [torch.ops.aten.topk, torch.ops.aten.topk.values]


@pytest.mark.parametrize("topk", TOPK, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_out_arguments_of_other_names_are_written_in_place_or_refused(device: str, topk: Any) -> None:
    values, indices = (
        st.static(torch.zeros(2, device=device)),
        st.static(torch.zeros(2, dtype=torch.int64, device=device)),
    )
    x = torch.tensor([3.0, 9.0, 5.0], device=device)
    got = topk(x, 2, values=values, indices=indices)
    assert got[0] is values
    assert values.tolist() == [9, 5]
    assert indices.tolist() == [1, 2]
    with pytest.raises(st.AddressError, match=r"topk.*\(values, indices=...\) of shape \(3,\) would move"):
        topk(x, 3, values=values, indices=indices)
    assert (values.shape, indices.shape) == ((2,), (2,))


def test_addbmm_in_place_may_not_broadcast_the_tensor_itself(device: str) -> None:
    batches = torch.ones(5, 4, 2, device=device), torch.ones(5, 2, 3, device=device)
    row, full = (st.static(torch.ones(shape, device=device)) for shape in ((3,), (4, 3)))
    with pytest.raises(st.AddressError, match=r"addbmm_ would move .*shape \(3,\)"):
        row.addbmm_(*batches)
    assert row.shape == (3,)
    assert full.addbmm_(batches[0], batch2=batches[1]) is full
    assert torch.equal(full, torch.full_like(full, 11))
