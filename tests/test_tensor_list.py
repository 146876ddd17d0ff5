"""TensorList: structures, indexing, errors, serialisation, packing, and torch.compile."""

from __future__ import annotations

import collections
import copy
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from conformance import check_call
from hypothesis import given
from hypothesis import strategies as some

import subtensors as st
from subtensors.lists.list_calls import explain_call


class Pair(NamedTuple):
    left: Any
    right: Any


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t[..., ::2],
    lambda t: t[:1].expand(3, *t.shape[1:]) if t.numel() else t,
]


@some.composite
def tensors(draw: some.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    shape = draw(some.sampled_from([(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (5, 1, 3)]))
    seed = draw(some.integers(0, 99))
    wide = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    values = wide.to(draw(some.sampled_from(dtypes)))
    return values if not shape else draw(some.sampled_from(LAYOUTS))(values)


def trees(leaves: some.SearchStrategy[torch.Tensor]) -> some.SearchStrategy[Any]:
    return some.recursive(
        leaves,
        lambda part: (
            some.lists(part, max_size=3)
            | some.lists(part, max_size=3).map(tuple)
            | some.dictionaries(some.sampled_from(["w", "b", "layers"]), part, max_size=3)
            | some.dictionaries(some.sampled_from([1, 2]), part, max_size=2).map(collections.OrderedDict)
            | some.builds(Pair, part, part | some.none())
        ),
        max_leaves=6,
    )


def leaves_are_the_same(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


@given(trees(tensors()))
def test_the_tree_comes_back_as_it_went_in(tree: Any) -> None:
    tl = st.TensorList(tree)
    assert optree.tree_structure(tl.tree()) == optree.tree_structure(tree) == tl.treespec
    assert leaves_are_the_same(tl.tree(), tree)
    assert len(tl) == len(list(tl)) == len(tl.tensors)


@given(trees(tensors()))
def test_every_path_leads_to_its_leaf_or_its_part(tree: Any) -> None:
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


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


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
        ([torch.ones(2), 3.0], "[1] is a float"),
        ({"a": [torch.ones(2), "x"]}, "['a', 1] is a str"),
        (torch.nn.Linear(2, 2), "(root) is a Linear; give model.parameters()"),
        ({"a": st.TensorList([torch.ones(2)])}, "['a'] is a TensorList: give its .tree()"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_path(value: Any, message: str) -> None:
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
    with pytest.raises(TypeError, match="a TensorList of 1 tensors has no single"):
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


def test_the_way_a_call_runs_is_told() -> None:
    a = st.TensorList([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    assert explain_call(torch.add, a, a) == "foreach aten._foreach_add.List (2 groups)"
    assert explain_call(torch.add, a, torch.ones(1)) == "mapped element by element"
    assert explain_call(torch.softmax, a, 0) == "mapped element by element"
    assert explain_call(torch.add, a.pack(), a) == "on the packed flats (2 groups)"
    assert a[0].tolist() == [1, 1]
    with pytest.raises(TypeError, match="expects a TensorList among the arguments"):
        explain_call(torch.add, torch.ones(2), 1)


# Packing


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


def test_results_of_pointwise_maths_on_packed_lists_stay_packed() -> None:
    with torch.no_grad():
        p = model().pack()
        q = torch.where(p > 0, p, 0.0).to(torch.bfloat16)
        assert q.arena is p.arena
        assert {f.dtype for f in q.flats} == {torch.bfloat16}
        assert explain_call(torch.mul, p, q) == "on the packed flats (2 groups)"
        assert [t.shape for t in q] == p.shape


def test_an_element_that_was_moved_away_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
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


def test_what_has_no_strides_is_not_packed() -> None:
    with pytest.raises(ValueError, match=re.escape("[0] is a torch.sparse_coo")):
        st.TensorList([torch.eye(2).to_sparse()]).pack()


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


def test_whole_numbers_are_not_divided_by_what_lies_between_elements() -> None:
    x, y = (st.TensorList([torch.full((3,), v), torch.full((2,), v)]) for v in (7, 2))
    for func in (torch.floor_divide, torch.remainder, torch.fmod):
        assert check_call(func, [x, y], packed=True)
    assert check_call(torch.div, [x, y], {"rounding_mode": "floor"}, packed=True)


# torch.compile


class Counted:
    """A backend that runs the traced graph as it is, and remembers its size."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.placeholders: list[int] = []
        self.nodes: list[int] = []
        self.backend = aot_autograd(fw_compiler=self._record)

    def _record(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        self.placeholders.append(sum(n.op == "placeholder" for n in graph.graph.nodes))
        self.nodes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)


def update(p: Any, g: Any, lr: float) -> tuple[Any, Any]:
    p.mul_(0.9)
    m = torch.where(g > 0, g, -g).sqrt()
    p -= m * lr
    return m + 1, torch.maximum(p, g).clamp(-1, 1)


def many(count: int) -> list[torch.Tensor]:
    return [torch.randn(3, i % 5 + 1) for i in range(count)]


def updated(p: list[torch.Tensor], g: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    p = [t.clone() for t in p]
    results = [update(a, b, 0.1) for a, b in zip(p, g, strict=True)]
    return [[a for a, _ in results], [b for _, b in results], p]


@pytest.mark.parametrize(
    ("backend", "packed"),
    [
        ("aot_eager", True),
        ("aot_eager", False),
        pytest.param("inductor", True, marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_compiled_maths_on_lists_is_the_map(backend: str, packed: bool) -> None:
    compiled = torch.compile(update, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            p, g = many(4), many(4)
            expected = updated(p, g)
            ps, gs = st.TensorList(map(torch.nn.Parameter, p)), st.TensorList(g)
            if packed:
                ps.pack(), gs.pack()
            first, second = compiled(ps, gs, 0.1)
            for actual, wanted in zip((first, second, ps), expected, strict=True):
                torch.testing.assert_close([t.detach() for t in actual], wanted)
            assert (first.arena is not None) == packed


def test_compile_work_does_not_grow_with_the_number_of_packed_tensors() -> None:
    counted = Counted()
    with torch.no_grad():
        for count in (4, 400):
            torch._dynamo.reset()
            p, g = many(count), many(count)
            expected = updated(p, g)
            ps, gs = st.TensorList(map(torch.nn.Parameter, p)).pack(), st.TensorList(g).pack()
            compiled = torch.compile(update, fullgraph=True, backend=counted.backend)
            results = compiled(ps, gs, 0.1)
            for actual, wanted in zip((*results, ps), expected, strict=True):
                torch.testing.assert_close([t.detach() for t in actual], wanted)
            compiled(gs.clone(), gs, 0.1)
    assert counted.placeholders == [2, 2]
    assert counted.nodes[0] == counted.nodes[1]


def test_a_moved_element_is_noticed_by_compiled_code() -> None:
    compiled = torch.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")
    p = st.TensorList(many(3)).pack()
    compiled(p)
    p[0].data = torch.full((3, 1), 9.0)
    torch.testing.assert_close(compiled(p).tree(), [t + 1 for t in p])


@pytest.mark.parametrize("packed", [True, False])
def test_reductions_len_iteration_and_indexing_compile(packed: bool) -> None:
    def f(x: Any) -> Any:
        return x.sum(dim=-1), x.amax(0).mean(), [t * len(x) for t in x], x[1] + x["b", 0], x + torch.ones(3, 1)

    tl = st.TensorList({"a": torch.randn(3, 2), "b": [torch.randn(3, 2), torch.randn(3, 4)]})
    tl = tl.pack() if packed else tl
    actual, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(tl), f(tl)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(list(a), list(e))


def test_a_packed_list_is_packed_again_when_it_is_unpickled() -> None:
    tl = st.TensorList([torch.ones(2), torch.arange(3.0)]).pack()
    loaded = pickle.loads(pickle.dumps(tl))
    assert loaded.arena is not None
    assert all(torch.equal(a, b) for a, b in zip(tl.tensors, loaded.tensors, strict=True))


@pytest.mark.parametrize(
    "f", [lambda x: x @ x, lambda x: x.view(-1), lambda x: x.softmax(0), lambda x: x.detach(), lambda x: x.normal_()]
)
def test_what_has_no_rule_under_compile_is_refused(f: Callable[[Any], Any]) -> None:
    for tl in (st.TensorList([torch.ones(2, 2)]), st.TensorList([torch.ones(2, 2)]).pack()):
        with pytest.raises(Exception, match="has no rule"):
            torch.compile(f, fullgraph=True, backend="aot_eager")(tl)


def test_differentiating_through_compiled_lists_is_refused() -> None:
    p = model().pack()
    with pytest.raises(Exception, match="can't differentiate through a TensorList"):
        torch.compile(lambda x: x * 2, fullgraph=True, backend="aot_eager")(p)
