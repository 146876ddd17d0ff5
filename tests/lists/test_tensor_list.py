"""TensorList: structures, indexing, errors, serialisation, and calls."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from conformance import check_call
from hypothesis import given
from hypothesis import strategies as some
from pytrees import same_values, tensors, trees

import subtensors as st
from subtensors.lists.torch_function import explain_call


def leaves_are_the_same(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


@given(trees(tensors()))
def test_tree_returns_the_pytree_that_the_list_was_made_of(tree: Any) -> None:
    tl = st.TensorList(tree)
    assert optree.tree_structure(tl.tree()) == optree.tree_structure(tree) == tl.treespec
    assert leaves_are_the_same(tl.tree(), tree)
    assert len(tl) == len(list(tl)) == len(tl.tensors)


@given(trees(tensors()))
def test_a_path_selects_a_leaf_or_a_part_of_the_list(tree: Any) -> None:
    tl = st.TensorList(tree)
    for path, leaf in zip(tl.treespec.paths(), tl, strict=True):
        assert tl[tuple(path)] is leaf
        part = tree
        for depth, key in enumerate(path):
            part = part[key]
            found = tl[tuple(path[: depth + 1])]
            assert leaves_are_the_same(found.tree() if isinstance(found, st.TensorList) else found, part)


OPERATIONS: list[tuple[Callable[..., Any], list[Any]]] = [
    (torch.add, [2]),
    (torch.mul, ["same"]),
    (torch.Tensor.mul_, [2]),
    (torch.Tensor.copy_, ["same"]),
    (torch.eq, ["same"]),
    (torch.where, ["mask"]),
    (torch.sum, []),
    (torch.Tensor.to, [torch.float32]),
    (torch.flatten, []),
    (torch.Tensor.zero_, []),
    (torch.clone, []),
    (torch.zeros_like, []),
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@given(trees(tensors()).filter(optree.tree_leaves), some.sampled_from(OPERATIONS), some.booleans())
def test_a_call_is_the_call_on_each_element(tree: Any, operation: Any, packed: bool) -> None:
    func, rest = operation
    tl = st.TensorList(tree)
    args = [tl, *rest]
    if rest == ["same"]:
        args = [tl, tl.like([t.clone() for t in tl])]
    elif rest == ["mask"]:
        args = [tl.like([t.bool() for t in tl]), tl, tl.like([t.clone() for t in tl])]
    # Packing makes an expanded or strided element dense, and so may lay out a result otherwise.
    check_call(func, args, packed=packed, strides=not packed)


@given(trees(tensors()))
def test_a_list_survives_pickle_save_and_deepcopy(tree: Any) -> None:
    tl = st.TensorList(tree)
    for back in (pickle.loads(pickle.dumps(tl)), copy.deepcopy(tl)):
        assert back.same_structure(tl)
        assert all(same_values(a, b) and a is not b for a, b in zip(back, tl, strict=True))
    shared = copy.copy(tl)
    assert shared is not tl
    assert leaves_are_the_same(shared.tensors, tl.tensors)


def test_a_saved_list_loads_with_weights_only() -> None:
    tl = st.TensorList({"layers": [torch.randn(2, 3), torch.ones(4, dtype=torch.bfloat16)], "step": (torch.tensor(3),)})
    for saved in (tl, copy.deepcopy(tl).pack()):
        file = io.BytesIO()
        torch.save({"state": saved}, file)
        file.seek(0)
        back = torch.load(file, weights_only=True)["state"]
        assert back.same_structure(tl)
        assert all(same_values(a, b) for a, b in zip(back, tl, strict=True))


def test_lists_are_made_from_iterators_and_from_lists() -> None:
    module = torch.nn.Linear(3, 2)
    p = st.TensorList(module.parameters())
    assert [t is q for t, q in zip(p, module.parameters(), strict=True)] == [True, True]
    assert st.TensorList({"w": p[0]}.values()).treespec == optree.tree_structure([0])
    again = st.TensorList(p)
    assert again is not p
    assert leaves_are_the_same(again.tensors, p.tensors)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2), 3.0], "[1] is of type float"),
        ({"a": [torch.ones(2), "x"]}, "['a', 1] is of type str"),
        (torch.nn.Linear(2, 2), "(root) is of type Linear; give model.parameters()"),
        ({"a": st.TensorList([torch.ones(2)])}, "['a'] is a TensorList: give its .tree()"),
    ],
)
def test_a_leaf_that_is_no_tensor_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        st.TensorList(value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": 1, "layers": [1]}, "['layers', 1]: missing on the right"),
        ({"w": 1}, "['layers']: missing on the right"),
        ({"w": 1, "layers": [1, 1], "x": 1}, "['x']: missing on the left"),
        ({"w": (1,), "layers": [1, 1]}, "['w']: a tensor against tuple of 1"),
        ({"w": 1, "layers": (1, 1)}, "['layers']: list of 2 against tuple of 2"),
        ([1, 1, 1], "(root): dict of 2 against list of 3"),
    ],
)
def test_lists_of_different_structure_are_refused_at_the_first_path(other: Any, message: str) -> None:
    tl = st.TensorList({"w": torch.ones(2), "layers": [torch.ones(3), torch.ones(3)]})
    others = st.TensorList(optree.tree_map(lambda _: torch.ones(2), other))
    assert not tl.same_structure(others)
    for call in (lambda: tl + others, lambda: tl.backward(others), lambda: torch.where(tl > 0, 1.0, others)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_positions_slices_and_ellipses_index_a_list() -> None:
    a, b, c = torch.arange(3), torch.arange(4), torch.arange(5)
    tl = st.TensorList({"a": a, "b": [b, c]})
    assert tl[0] is a
    assert tl[-1] is c
    assert tl["b", -1] is c
    assert leaves_are_the_same(tl[1:].tensors, [b, c])
    assert [t.item() for t in tl[..., -1]] == [2, 3, 4]
    assert tl[tl > 1].shape == [torch.Size([1]), torch.Size([2]), torch.Size([3])]
    with pytest.raises(IndexError):
        tl[3]
    with pytest.raises(KeyError, match=r"no \['b', 2\] in this TensorList"):
        tl["b", 2]


def test_setting_an_item_writes_into_the_elements() -> None:
    a, b = torch.zeros(3), torch.zeros(2)
    tl = st.TensorList({"a": a, "b": [b]})
    tl["a"] = 1
    tl["b"] = st.TensorList([torch.full((2,), 5.0)])
    assert (a.tolist(), b.tolist()) == ([1, 1, 1], [5, 5])
    tl[tl > 4] = 0
    assert (a.tolist(), b.tolist()) == ([1, 1, 1], [0, 0])


@pytest.mark.parametrize("convert", [bool, int, float, complex, lambda x: [0][x]])
def test_a_list_has_no_single_python_value(convert: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="a TensorList of 1 tensor has no single"):
        convert(st.TensorList([torch.ones(1)]))


def test_like_refuses_another_number_of_tensors() -> None:
    with pytest.raises(ValueError, match="2 tensors expected, one an element; got 1"):
        st.TensorList([torch.ones(1), torch.ones(1)]).like([torch.ones(1)])


def test_an_error_in_an_element_names_its_path() -> None:
    tl = st.TensorList({"good": torch.ones(2, 2), "sad": torch.ones(3)})
    with pytest.raises(IndexError) as caught:
        torch.diagonal(tl)
    assert caught.value.__notes__ == ["in element ['sad'] of a TensorList"]


def test_results_are_lists_tuples_of_lists_or_plain_values() -> None:
    tl = st.TensorList((torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0], [2.0]])))
    top = tl.max(dim=1)
    assert isinstance(top, torch.return_types.max)
    assert [t.tolist() for t in top.indices] == [[1], [0, 0]]
    assert tl.shape == [torch.Size([1, 2]), torch.Size([2, 1])]
    assert tl.numel() == [2, 2]
    assert tl.is_contiguous() == [True, True]
    assert tl.sum().tolist() == [6.0, 5.0]
    assert torch.equal(tl, tl) == [True, True]
    # Parts differ in number, so that no list an output can be made of them.
    assert [len(parts) for parts in tl.unbind(1)] == [2, 1]


def test_lists_are_matched_inside_containers_and_plain_tensors_go_to_each() -> None:
    a, b = (st.TensorList([torch.full((2,), v), torch.full((3,), v)]) for v in (1.0, 2.0))
    assert [t.tolist() for t in torch.cat([a, b])] == [[1, 1, 2, 2], [1, 1, 1, 2, 2, 2]]
    assert check_call(torch.stack, [[a, b]], {"dim": 1})
    assert check_call(torch.add, [a, torch.ones(4, 1)])
    assert check_call(torch.mul, [torch.tensor(3.0), a])


def test_in_place_ops_and_out_return_the_list_they_changed() -> None:
    tl = st.TensorList([torch.ones(2), torch.ones(3)])
    kept, elements = tl, tl.tensors
    tl += 1
    tl *= tl
    assert tl is kept
    assert tl.tensors is elements
    assert tl.add_(1) is tl
    assert torch.exp(tl, out=tl) is tl
    assert tl.requires_grad_() is tl
    assert tl.requires_grad == [True, True]


def test_gradients_are_read_and_set_as_lists() -> None:
    tl = st.TensorList([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
    assert tl.grad == [None, None]
    tl[0].sum().backward()
    assert tl.grad[0].tolist() == [1, 1]
    assert tl.grad[1] is None
    tl.grad = tl.like([torch.zeros(2), torch.zeros(3)])
    assert isinstance(tl.grad, st.TensorList)
    tl.grad = None
    assert tl.grad == [None, None]


def test_elements_that_share_a_graph_are_differentiated_in_one_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    shared = x.exp().exp()
    tl = st.TensorList([shared.sum(), (2 * shared).sum()])
    tl.backward()
    (expected,) = torch.autograd.grad(3 * x.exp().exp().sum(), x)
    torch.testing.assert_close(x.grad, expected)
    p = st.TensorList([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
    loss = (p[0].sum() * p[1].sum()).exp().log()
    (grads,) = torch.autograd.grad(loss, p)
    torch.testing.assert_close(grads.tree(), [torch.full((2,), 3.0), torch.full((3,), 2.0)])


def test_an_empty_list_maps_to_empty_lists() -> None:
    empty = st.TensorList({"layers": []})
    assert (empty + 1).tree() == {"layers": []}
    assert empty.mul_(2) is empty
    assert (empty.shape, empty.tolist(), empty.grad) == ([], [], [])
    assert empty.sum().tree() == {"layers": []}
    empty.backward()
    empty.grad = None
    assert empty.pack() is empty
    assert repr(empty) == "TensorList(0 tensors, 0 values)"


def test_explain_call_names_how_a_call_runs() -> None:
    a = st.TensorList([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    assert explain_call(torch.add, a, a) == "foreach aten._foreach_add.List (2 groups)"
    assert explain_call(torch.add, a, torch.ones(1)) == "mapped element by element"
    assert explain_call(torch.softmax, a, 0) == "mapped element by element"
    assert explain_call(torch.add, a.pack(), a) == "on the packed flats (2 groups)"
    assert a[0].tolist() == [1, 1]
    assert explain_call(torch.add, torch.ones(2), 1) == "plain torch: no argument is of a type of subtensors"


def test_transforms_of_torch_func_take_the_elements_and_name_them_when_given_the_list() -> None:
    p = st.TensorList({"w": torch.ones(2, 3), "b": torch.ones(3)})

    def loss(tree: Any) -> torch.Tensor:
        return sum((st.TensorList(tree) ** 2).sum())

    assert torch.equal(torch.func.grad(loss)(p.tree())["w"], torch.full((2, 3), 2.0))
    rows = torch.vmap(lambda tree: (st.TensorList(tree) * 2).tree())([torch.ones(4, 3), torch.ones(4)])
    assert [t.shape for t in rows] == [torch.Size([4, 3]), torch.Size([4])]
    with pytest.raises(st.RuleError, match=r"torch.func the elements, tl.tree\(\)"):
        torch.func.grad(lambda x: sum((x**2).sum()))(p)


def test_elements_may_be_tensors_of_a_subclass_and_get_gradients() -> None:
    class Marked(torch.Tensor):
        pass

    marked = torch.nn.Parameter(torch.ones(2)).as_subclass(Marked)
    plain = torch.ones(3, requires_grad=True)
    x = st.TensorList([marked, plain])
    assert x[0] is x.tensors[0] is marked
    sum((x * x).sum()).backward()
    assert torch.equal(plain.grad, torch.full((3,), 2.0))


def test_lists_of_an_fx_graph_are_lists_in_any_container() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    immutable = torch.fx.immutable_collections.immutable_list
    for tree, found in (
        (deque([immutable([a]), b]), deque([[a], b])),
        (OrderedDict(z=immutable([a]), a=b), OrderedDict(z=[a], a=b)),
        (immutable([OrderedDict(z=a, a=b)]), [OrderedDict(z=a, a=b)]),
    ):
        tl = st.TensorList(tree)
        assert tl[0] is a
        assert tl[1] is b
        assert tl.tree() == found
        assert type(tl.tree()) is type(found)
