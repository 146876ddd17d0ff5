"""TensorList.pack: one flat arena a device and dtype, of which the elements are views."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from conformance import check_call
from hypothesis import given
from pytrees import same_values, tensors, trees

import subtensors as st
from subtensors.lists.torch_function import explain_call


def model() -> st.TensorList:
    torch.manual_seed(0)
    values = [
        torch.randn(3, 4),
        torch.randn(5),
        torch.randn(4, 2).t(),
        torch.zeros(0),
        torch.randn(2, dtype=torch.float64),
    ]
    return st.TensorList([torch.nn.Parameter(v) for v in values])


@given(trees(tensors()).filter(optree.tree_leaves))
def test_packing_keeps_values_and_dense_strides(tree: Any) -> None:
    tl = st.TensorList(tree)
    before = [(t, t.clone(), torch.empty_like(t).stride()) for t in tl]
    assert tl.pack() is tl
    for (original, values, strides), t in zip(before, tl, strict=True):
        assert t is original
        assert same_values(t, values)
        assert t.stride() == strides
        assert t.data_ptr() % 16 == 0
    assert len(tl.flats) == len({(t.device, t.dtype) for t in tl})


def test_a_packed_list_shares_storage_with_its_originals() -> None:
    p = model()
    p[0].grad = torch.ones(3, 4)
    originals, gradient = list(p), p[0].grad
    p.pack()
    assert all(type(t) is torch.nn.Parameter and t.requires_grad and t.is_leaf for t in originals)
    assert originals[0].grad is gradient
    with torch.no_grad():
        p.fill_(7.0)
    assert all((t == 7).all() for t in originals)
    originals[1].data.fill_(3.0)
    assert (p.flats[0] == 3).sum() == 5


def test_results_of_pointwise_math_on_packed_lists_stay_packed() -> None:
    with torch.no_grad():
        p = model().pack()
        q = torch.where(p > 0, p, 0.0).to(torch.bfloat16)
        assert q.arena is p.arena
        assert {f.dtype for f in q.flats} == {torch.bfloat16}
        assert explain_call(torch.mul, p, q) == "on the packed flats (2 groups)"
        assert [t.shape for t in q] == p.shape


def test_a_list_is_unpacked_once_an_element_left_its_arena(caplog: pytest.LogCaptureFixture) -> None:
    moves: list[Callable[[torch.Tensor], None]] = [
        lambda t: setattr(t, "data", torch.full((3, 4), 9.0)),
        lambda t: setattr(t, "data", t.data[:2]),
        lambda t: setattr(t, "data", t.data.view(4, 3)),
    ]
    for move in moves:
        with torch.no_grad(), caplog.at_level(logging.WARNING, "subtensors"):
            caplog.clear()
            p = model().pack()
            move(p[0])
            expected = [t + 1 for t in p]
            result = p + 1
            assert all(same_values(a, b) for a, b in zip(result, expected, strict=True))
            assert p.arena is None
            assert "an element of a packed TensorList was moved" in caplog.text
            with pytest.raises(ValueError, match="not packed"):
                p.flats  # noqa: B018


def test_autograd_sees_that_a_packed_update_changed_the_elements() -> None:
    w = torch.ones(3, requires_grad=True)
    p = st.TensorList([w]).pack()
    loss = (w * w).sum()
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_flow_through_packed_elements() -> None:
    p = model().pack()
    (p * p).sum().backward()
    torch.testing.assert_close(p.grad.tree(), [2 * t.detach() for t in p])


def test_tied_elements_are_packed_once_and_updated_as_a_map_would() -> None:
    w, b = torch.ones(3), torch.ones(2)
    p = st.TensorList({"head": w, "embedding": w, "bias": b}).pack()
    assert p["head"].data_ptr() == p["embedding"].data_ptr()
    assert sum(f.numel() for f in p.flats) == 128
    p.add_(1)
    assert (w.tolist(), b.tolist()) == ([3, 3, 3], [2, 2])


def test_elements_that_share_part_of_their_memory_are_refused() -> None:
    base = torch.zeros(10)
    with pytest.raises(ValueError, match=re.escape("pack() can't move ['a'] and ['b']: they share part")):
        st.TensorList({"a": base[:6], "b": base[4:]}).pack()
    halves = st.TensorList([base[:5], base[5:]]).pack()
    assert halves.add_(1).sum().tolist() == [5, 5]


def test_sparse_and_subclass_tensors_are_not_packed() -> None:
    with pytest.raises(ValueError, match=re.escape("[0] is a torch.sparse_coo")):
        st.TensorList([torch.eye(2).to_sparse()]).pack()
    with pytest.raises(ValueError, match=r"moves tensors .*\[1\] is a torch.strided StaticAddressTensor"):
        st.TensorList([torch.eye(2), st.static(torch.eye(2))]).pack()


def test_a_copy_of_a_packed_list_is_packed_in_memory_of_its_own() -> None:
    p = model().pack()
    q = copy.deepcopy(p)
    assert q.arena is p.arena
    assert isinstance(q[0], torch.nn.Parameter)
    assert q[0].data_ptr() != p[0].data_ptr()


def test_a_0d_element_promotes_as_an_unpacked_one_does() -> None:
    x = st.TensorList([torch.tensor(1.0, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)])
    assert check_call(torch.add, [x, torch.tensor(1.0)], packed=True)
    assert (x.pack() + torch.tensor(1.0)).dtype == [torch.float32, torch.bfloat16]


def test_integer_division_does_not_read_the_gaps_between_elements() -> None:
    x, y = (st.TensorList([torch.full((3,), v), torch.full((2,), v)]) for v in (7, 2))
    for func in (torch.floor_divide, torch.remainder, torch.fmod):
        assert check_call(func, [x, y], packed=True)
    assert check_call(torch.div, [x, y], {"rounding_mode": "floor"}, packed=True)


def test_a_packed_list_is_packed_again_when_it_is_unpickled() -> None:
    tl = st.TensorList([torch.ones(2), torch.arange(3.0)]).pack()
    loaded = pickle.loads(pickle.dumps(tl))
    assert loaded.arena is not None
    assert all(torch.equal(a, b) for a, b in zip(tl.tensors, loaded.tensors, strict=True))


def test_a_packed_list_notices_each_change_of_its_elements() -> None:
    p = model().pack()
    for t in p:
        t.requires_grad_(False)
    assert explain_call(torch.add, p, 1) == "on the packed flats (2 groups)"
    p[1].requires_grad_()
    assert explain_call(torch.add, p, 1) != "on the packed flats (2 groups)"
    (p * 2)[1].sum().backward()
    assert p[1].grad is not None
    with torch.inference_mode():
        assert explain_call(torch.add, p, 1) == "on the packed flats (2 groups)"
    square = torch.nn.Parameter(torch.arange(4.0).view(2, 2))
    q = st.TensorList([square]).pack()
    assert q.arena is not None
    square.data = square.data.t()
    assert q.arena is None
    with torch.no_grad():
        assert (q + 0)[0].tolist() == [[0, 2], [1, 3]]


def test_elements_without_other_references_are_made_again_as_views_when_read() -> None:
    state = st.TensorList([torch.full((2, n), float(n)) for n in (3, 5)]).pack()
    assert state._elements is None  # there is none to look at
    assert state.arena is not None
    assert state[1] is state[1]
    assert [t.tolist() for t in state.add_(1)] == [[[4.0] * 3] * 2, [[6.0] * 5] * 2]
    state[0].data = torch.zeros(2, 3)
    assert state.arena is None
    assert state[0].sum() == 0


@pytest.mark.parametrize("tie", ["name", "weak reference", "attribute", "autograd", "a graph", "the list's own list"])
def test_elements_with_other_references_keep_their_identity(tie: str) -> None:
    tl = st.TensorList([torch.ones(2), torch.ones(3)])
    names: list[Any] = []
    if tie == "name":
        names.append(tl[1])
    elif tie == "weak reference":
        names.append(weakref.ref(tl[1]))
    elif tie == "attribute":
        tl[1].note = "mine"
    elif tie == "autograd":
        tl[1].requires_grad_()
    elif tie == "a graph":
        names.append(torch.ones(3, requires_grad=True) * tl[1])
    else:
        names.append(tl.tensors)
    first = id(tl[1])
    assert id(tl.pack()[1]) == first
