"""Fused calls: arguments and errors, what is kept between calls, layouts, overlap, and autograd."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from programs import SMALL_TILES, Lowering, check, each_kernel_lowering, each_lowering, interpreted
from torch import Tensor

import subtensors as st
from subtensors.dispatch.columns import Elements
from subtensors.dispatch.fusion import Fusion
from subtensors.dispatch.groups import MappedGroup, TorchGroup
from subtensors.dispatch.kernel_group import KernelGroup


def lists(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Elements:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return Elements(t.to(dtype).to(device) for t in wide)


def sgd(p: Tensor, g: Tensor, lr: float) -> None:
    p.sub_(lr * g)


def groups(fusion: Fusion) -> list[Any]:
    return [group for plans in fusion._plans.values() for plan in plans for _, group in plan.groups]


def tables(fusion: Fusion) -> int:
    return sum(g.tables for g in groups(fusion) if isinstance(g, KernelGroup))


# --- st.fused ---------------------------------------------------------------------------------------------------------


@each_lowering
def test_results_are_lists_of_the_same_structure(lowering: Lowering) -> None:
    @st.fused
    def maths(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return p + g, p.sum(), None

    tree = {"w": torch.ones(2, 3, device=lowering.device), "b": [torch.zeros(70, device=lowering.device)]}
    p = st.TensorList(tree)
    with lowering.running():
        total, size, nothing = maths(p, p)
    assert nothing is None
    assert isinstance(total, st.TensorList)
    assert total.treespec == size.treespec == p.treespec
    assert torch.equal(total["w"].cpu(), torch.full((2, 3), 2.0))
    assert size["w"] == 6
    assert size["w"].shape == ()


def test_an_argument_that_is_returned_is_the_list_itself() -> None:
    p = st.TensorList([torch.ones(2)])
    assert st.fused(lambda p: p.add_(1))(p) is p


def test_plain_tensors_alone_give_plain_tensors() -> None:
    p = torch.ones(3)
    assert st.fused(lambda p, lr: p.sub_(lr))(p, 0.5) is p
    result = st.fused(lambda p: (p * 2, p.sum()))(p)
    assert torch.equal(result[0], torch.ones(3))
    assert result[1] == 1.5


@each_lowering
def test_a_list_of_one_and_of_two_thousand_tensors(lowering: Lowering) -> None:
    for count in (1, 2000 if lowering is not Lowering.INTERPRETER else 150):
        p = [torch.full((i % 5 + 1,), float(i), device=lowering.device) for i in range(count)]
        with lowering.running():
            Fusion(sgd)(Elements(p), Elements(torch.ones_like(t) for t in p), 0.5)
        assert all((t == i - 0.5).all() for i, t in enumerate(p))


@each_lowering
def test_an_empty_list_is_no_work(lowering: Lowering) -> None:
    fusion = Fusion(sgd)
    with lowering.running():
        assert fusion(Elements([]), Elements([]), 0.5) is None
    assert fusion.traces == 0


def test_structures_that_differ_are_refused_with_the_first_path() -> None:
    p = st.TensorList({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": torch.ones(2)}})
    g = st.TensorList({"a": torch.ones(2), "b": {"c": torch.ones(2), "e": torch.ones(2)}})
    before = [t.clone() for t in p.tensors]
    with pytest.raises(ValueError, match=r"sgd.*different structure.*'b'"):
        st.fused(sgd)(p, g, lr=0.5)
    assert all(torch.equal(a, b) for a, b in zip(p.tensors, before, strict=True))


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="sgd: lists of 2 and of 1 tensors do not match"):
        Fusion(sgd)(lists((2,), (2,)), lists((2,)), 0.5)


@pytest.mark.parametrize("bad", [object(), 1j, np.ones(2), b"x", {1, 2}])
def test_an_argument_that_is_no_tensor_or_number_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"an argument of fused maths is .* got {type(bad).__name__}"):
        Fusion(lambda p, x: p)(lists((2,)), bad)


def test_a_call_without_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="sgd needs a tensor or a list of tensors"):
        Fusion(sgd)(1.0, 2.0, 3.0)


@each_lowering
def test_a_shared_tensor_is_read_but_not_written(lowering: Lowering) -> None:
    shared = torch.tensor(2.0, device=lowering.device)
    p = lists((3,), (70,), device=lowering.device)
    with lowering.running():
        with pytest.raises(st.RuleError, match=r"writes to a tensor that all elements share.*pass a list"):
            Fusion(lambda p, t: t.add_(p.sum()))(p, shared)
        assert shared == 2
        check(lowering, lambda p, t: p.mul_(t), p, shared)


@interpreted
def test_the_largest_of_an_empty_tensor_is_refused_before_anything_is_written() -> None:
    def maths(p: Tensor) -> None:
        p.add_(p.amax())

    for lowering in (Lowering.TORCH, Lowering.INTERPRETER):
        with lowering.running(), pytest.raises(RuntimeError, match="amax"):
            Fusion(maths)(Elements([torch.ones(0)]))
    p = Elements([torch.ones(3), torch.ones(0)])
    with Lowering.INTERPRETER.running(), pytest.raises(RuntimeError, match="amax of an empty tensor"):
        Fusion(maths)(p)
    assert torch.equal(p[0], torch.ones(3))


def test_keyword_and_nested_arguments_are_told_apart() -> None:
    fusion = Fusion(lambda p, *, a=1.0, b=(1.0, 2.0): p * a + b[0] - b[1])
    p = Elements([torch.ones(2)])
    assert torch.equal(fusion(p, a=2.0, b=(3.0, 1.0))[0], torch.full((2,), 4.0))
    assert torch.equal(fusion(p)[0], torch.zeros(2))


def test_a_number_of_numpy_is_a_number() -> None:
    assert torch.equal(Fusion(lambda p, x: p * x)(Elements([torch.ones(2)]), np.float64(0.5))[0], torch.full((2,), 0.5))


@each_lowering
def test_sparse_and_subclass_elements_go_through_the_function_itself(lowering: Lowering) -> None:
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]], device=lowering.device).to_sparse()
    fusion = Fusion(lambda x: x * 2)
    with lowering.running():
        for _ in range(2):
            (result,) = fusion(Elements([sparse]))
    assert torch.equal(result.to_dense(), sparse.to_dense() * 2)
    assert isinstance(groups(fusion)[0], MappedGroup)


# --- what is kept between calls -----------------------------------------------------------------------------------


@each_lowering
def test_a_thousand_calls_with_new_numbers_trace_once(lowering: Lowering) -> None:
    def maths(p: Tensor, g: Tensor, *, lr: float, betas: tuple[float, float], step: int) -> None:
        p.sub_(lr * g * (1 - betas[0] ** step) + betas[1])

    p, g = lists((3,), device=lowering.device), lists((3,), seed=1, device=lowering.device)
    fusion = Fusion(maths)
    with lowering.running():
        for step in range(1, 1001 if lowering is not Lowering.INTERPRETER else 101):
            before = p[0].double()
            fusion(p, g, lr=1 / step, betas=(0.9 - 1e-4 * step, 1e-3 * step), step=step)
            expected = before - g[0].double() / step * (1 - (0.9 - 1e-4 * step) ** step) - 1e-3 * step
            size = before.abs() + g[0].double().abs() / step + 1e-3 * step
            assert ((p[0].double() - expected).abs() <= 4 * torch.finfo(torch.float32).eps * size).all()
    assert fusion.traces == 1
    assert len(groups(fusion)) == 1
    assert len(fusion._kernels) == (lowering is not Lowering.TORCH)
    assert tables(fusion) == (lowering is not Lowering.TORCH)


@each_lowering
def test_new_shapes_are_planned_but_neither_traced_nor_compiled(lowering: Lowering) -> None:
    fusion = Fusion(sgd)
    with lowering.running():
        for size in (1, 5, 70, 5, 1):
            p, g = lists((size,), device=lowering.device), lists((size,), seed=1, device=lowering.device)
            expected = p[0] - 0.5 * g[0]
            fusion(p, g, 0.5)
            torch.testing.assert_close(p[0], expected)
    assert fusion.traces == 1
    assert len(fusion._kernels) == (lowering is not Lowering.TORCH)
    assert len(groups(fusion)) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(2), torch.tensor(1.0)),
        (torch.tensor(1.0), torch.tensor(1)),
    ],
)
def test_a_new_dtype_or_dimension_is_traced(first: Tensor, second: Tensor) -> None:
    fusion = Fusion(lambda p: p * 2)
    for tensor in (first, second, first, second):
        assert torch.equal(fusion(Elements([tensor]))[0], tensor * 2)
    assert fusion.traces == 2


@pytest.mark.parametrize("values", [(True, False), ("a", "b"), (None, True), (0.5, 1), (torch.float32, torch.int32)])
def test_a_new_static_value_or_kind_of_number_is_traced(values: tuple[Any, Any]) -> None:
    fusion = Fusion(lambda p, x: p * (1 if x is None or not isinstance(x, bool | str | torch.dtype) else 2))
    for value in (*values, *values):
        fusion(Elements([torch.ones(2)]), value)
    assert fusion.traces == 2


def test_the_modes_of_torch_that_change_the_maths_are_traced_apart() -> None:
    fusion = Fusion(lambda p: p + torch.tensor(0.5))
    p = Elements([torch.ones(2, dtype=torch.int64)])
    assert fusion(p)[0].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fusion(p)[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fusion(p)[0].dtype == torch.float32


@each_kernel_lowering
def test_minus_zero_is_another_number_than_zero(lowering: Lowering) -> None:
    p = Elements([torch.ones(2, device=lowering.device)])
    live = Fusion(lambda p, x: torch.copysign(p, torch.full_like(p, x)))
    literal = Fusion(lambda p, negative: torch.copysign(p, -0.0 if negative else 0.0))
    with lowering.running():
        assert [live(p, x)[0].tolist() for x in (0.0, -0.0, 0.0)] == [[1, 1], [-1, -1], [1, 1]]
        assert [literal(p, n)[0].tolist() for n in (False, True)] == [[1, 1], [-1, -1]]


@each_kernel_lowering
def test_a_moved_tensor_gets_a_new_table_and_an_unmoved_one_none(lowering: Lowering) -> None:
    p, g = lists((3,), (70,), device=lowering.device), lists((3,), (70,), seed=1, device=lowering.device)
    fusion = Fusion(sgd)
    with lowering.running():
        for moves in range(1, 4):
            for _ in range(3):
                expected = [a - 0.5 * b for a, b in zip(p, g, strict=True)]
                fusion(Elements(p), Elements(g), 0.5)
                assert all(torch.allclose(a, e) for a, e in zip(p, expected, strict=True))
            assert tables(fusion) == moves
            p[1].data = p[1].data.clone()
    assert len(groups(fusion)) == 1


@pytest.mark.parametrize("is_same_list", [True, False])
@each_lowering
def test_a_tensor_that_is_given_other_data_is_seen_as_it_is(is_same_list: bool, lowering: Lowering) -> None:
    tensors = [torch.zeros(3, device=lowering.device), torch.zeros(4, device=lowering.device)]
    fusion, kept = Fusion(lambda p: p.add_(1)), Elements(tensors)
    with lowering.running():
        for data in (torch.zeros(3), torch.zeros(5), torch.zeros(5, dtype=torch.float64), torch.zeros(2, 3).t()):
            tensors[0].data = data.to(lowering.device)
            for _ in range(3):
                fusion(kept if is_same_list else Elements(tensors))
            assert (tensors[0] == 3).all()
    assert (tensors[1] == 12).all()


@each_lowering
def test_gradients_that_are_freed_and_made_again_each_step_are_found(lowering: Lowering) -> None:
    p = [torch.nn.Parameter(torch.ones(70, device=lowering.device)) for _ in range(3)]
    fusion = Fusion(sgd)
    with lowering.running(), torch.no_grad():
        for step in range(12):
            for t in p:
                t.grad = torch.full_like(t, float(step))
            fusion(Elements(p), Elements(t.grad for t in p if t.grad is not None), 1.0)
            for t in p:
                t.grad = None
            torch.ones(step * 50, device=lowering.device)
    assert all((t == 1 - sum(range(12))).all() for t in p)
    assert fusion.traces == 1


@each_lowering
def test_no_tensor_of_a_call_is_kept_alive(lowering: Lowering) -> None:
    fusion = Fusion(lambda p, g, t: p.sub_(g * t).sum())
    p, g = lists((3,), (70,), device=lowering.device), lists((3,), (70,), device=lowering.device)
    shared = torch.tensor(2.0, device=lowering.device)
    with lowering.running():
        result = fusion(p, g, shared)
    known = [weakref.ref(t) for t in (*p, *g, shared, *result)]
    del p, g, shared, result
    gc.collect()
    assert not any(r() is not None for r in known)


@each_kernel_lowering
def test_a_fixed_list_is_known_by_identity_and_not_kept_alive(lowering: Lowering) -> None:
    fusion = Fusion(sgd)
    p = Elements(lists((3,), (70,), device=lowering.device), is_fixed=True)
    expected = [t.clone() for t in p]
    with lowering.running():
        for step in range(1, 4):
            g = lists((3,), (70,), seed=step, device=lowering.device)
            fusion(p, g, 0.5)
            for e, t in zip(expected, g, strict=True):
                e.sub_(0.5 * t)
        assert all(torch.equal(a, e) for a, e in zip(p, expected, strict=True))
        # The same tensors in another list are another list.
        fusion(Elements(p, is_fixed=True), g, 0.5)
        assert all(torch.equal(a, e.sub_(0.5 * t)) for a, e, t in zip(p, expected, g, strict=True))
    known = [weakref.ref(p), weakref.ref(p[0])]
    del p
    gc.collect()
    assert not any(r() is not None for r in known)


@each_kernel_lowering
def test_only_so_many_tables_and_plans_are_kept(lowering: Lowering) -> None:
    fusion = Fusion(sgd)
    with lowering.running():
        for size in range(1, Fusion.PLANS + 5):
            fusion(lists((size,), device=lowering.device), lists((size,), device=lowering.device), 0.5)
        kept = [[torch.ones(2, device=lowering.device)] for _ in range(KernelGroup.BINDINGS + 4)]
        for p in kept:
            fusion(Elements(p), Elements([torch.ones(2, device=lowering.device)]), 0.5)
    assert len(groups(fusion)) <= Fusion.PLANS
    assert max(len(g.bindings) for g in groups(fusion)) <= KernelGroup.BINDINGS
    assert all((p[0] == 0.5).all() for p in kept)


@each_lowering
def test_tied_tensors_are_planned_once(lowering: Lowering) -> None:
    x = torch.ones(3, device=lowering.device)
    fusion = Fusion(lambda p: p * 2)
    with lowering.running():
        for _ in range(3):
            fusion(Elements([x, x]))
        fusion(Elements([x, x.clone()]))
    assert len(groups(fusion)) == 2


# --- layouts ------------------------------------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def misaligned(t: Tensor) -> Tensor:
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": transposed,
    "channels last": lambda t: t[None, None].expand(2, 3, -1, -1).contiguous(memory_format=torch.channels_last),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "misaligned": misaligned,
    "a part of a larger one": lambda t: torch.nn.functional.pad(t, (3, 5, 2, 1))[2:-1, 3:-5],
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
@each_lowering
def test_every_layout_gives_the_same(first: str, second: str, lowering: Lowering) -> None:
    def maths(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        p.sub_(g * 0.5)
        return p * g, g.sum()

    p, g = (Elements(LAYOUTS[n](t) for t in lists((9, 12), (3, 4), seed=i)) for i, n in enumerate((first, second)))
    if p[0].dim() != g[0].dim():
        p, g = (Elements(t if t.dim() == 4 else t[None, None].expand(2, 3, -1, -1).clone() for t in x) for x in (p, g))
    assert check(lowering, maths, p, g) is not None


@each_lowering
def test_a_broadcast_tensor_is_read(lowering: Lowering) -> None:
    g = Elements([torch.tensor(2.0).expand(70), torch.arange(3.0)[:, None].expand(3, 5)])
    assert check(lowering, lambda p, g: p.sub_(g), lists((70,), (3, 5)), g) is not None


@each_lowering
def test_a_broadcast_tensor_cannot_be_written(lowering: Lowering) -> None:
    p = Elements([torch.tensor(2.0, device=lowering.device).expand(70)])
    with lowering.running(), pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        Fusion(lambda p: p.add_(1))(p)


def test_results_are_laid_out_as_torch_lays_them_out() -> None:
    p = Elements(transposed(t) for t in lists((3, 5), (4, 6)))
    with Lowering.INTERPRETER.running():
        result = Fusion(lambda p: p + 1)(p)
    assert [t.stride() for t in result] == [(t + 1).stride() for t in p]


@interpreted
def test_why_elements_run_slower_is_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "subtensors.fused")
    strided = Elements([torch.ones(4, 2)[:, 0]])
    with Lowering.INTERPRETER.running():
        assert "strides of their own are copied" in Fusion(lambda p: p.add_(1)).explain(strided)
        assert "no Triton formula for prims.digamma" in Fusion(torch.digamma).explain(lists((3,)))
        assert "several shapes" in Fusion(lambda p, g: p + g).explain(lists((3, 1)), lists((1, 3)))
        explained = Fusion(torch.exp).explain(lists((3,)))
        assert "exp: 1 elements, traced 1 times" in explained
        assert "1 tensors, 3 elements" in explained
    assert sum("1 of 1 elements run as" in r.message for r in caplog.records) == 3


# --- overlap ------------------------------------------------------------------------------------------------------


def assert_like_the_map(lowering: Lowering, maths: Callable[..., Any], make: Callable[[], list[list[Tensor]]]) -> None:
    """The fused call on lists that share memory equals the calls on their elements, in order."""
    mapped, fused = make(), make()
    for row in zip(*mapped, strict=True):
        maths(*row)
    fusion = Fusion(maths, SMALL_TILES)
    with lowering.running():
        fusion(*map(Elements, fused))
    for fused_column, mapped_column in zip(fused, mapped, strict=True):
        for a, e in zip(fused_column, mapped_column, strict=True):
            assert torch.equal(a, e)


def add_and_scale(p: Tensor, q: Tensor) -> None:
    p.add_(q)
    q.mul_(2)


@each_lowering
def test_the_same_list_twice_equals_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        p = list(lists((3,), (70,), device=lowering.device))
        return [p, p]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_overlapping_views_equal_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        base = torch.arange(100.0, device=lowering.device)
        return [[base[:60], base[30:90], base[50:60]], list(lists((60,), (60,), (10,), device=lowering.device))]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_overlap_between_elements_that_run_in_different_ways_equals_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        # The second has strides of its own: on a GPU it is copied, in a group apart from the others.
        base = torch.arange(100.0, device=lowering.device)
        return [[base[:20], base[:40:2], base[10:30]], list(lists((20,), (20,), (20,), device=lowering.device))]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_one_tensor_in_several_places_equals_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        p, q = torch.ones(3, device=lowering.device), torch.ones(3, device=lowering.device)
        return [[p, p, q], [torch.ones_like(p), q, p]]

    assert_like_the_map(lowering, add_and_scale, make)


@each_kernel_lowering
def test_tensors_side_by_side_in_one_memory_do_not_overlap(lowering: Lowering) -> None:
    base = torch.zeros(100, device=lowering.device)
    fusion = Fusion(add_and_scale)
    with lowering.running():
        fusion(Elements([base[:20], base[20:40]]), Elements([base[40:60], base[60:80]]))
    (group,) = groups(fusion)
    assert not any(b.overlaps for b in group.bindings)


# --- autograd -----------------------------------------------------------------------------------------------------


@each_lowering
def test_gradients_flow_as_through_the_map(lowering: Lowering) -> None:
    def maths(p: Tensor, g: Tensor, n: float) -> tuple[Tensor, Tensor]:
        return torch.tanh(p * g) ** 2 * n, (p - g).norm()

    p, g = (Elements(t.requires_grad_() for t in lists((3,), (70,), seed=i, device=lowering.device)) for i in range(2))
    with lowering.running():
        first, second = Fusion(maths)(p, g, 0.5)
    loss = sum(t.sum() for t in (*first, *second))
    expected = sum(t.sum() for row in zip(p, g, strict=True) for t in maths(*row, 0.5))
    inputs = [*p, *g]
    for a, e in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.equal(a, e)


@each_lowering
def test_a_tensor_that_starts_to_require_grad_is_recorded(lowering: Lowering) -> None:
    fusion, p = Fusion(lambda p: p * 2), lists((3,), device=lowering.device)
    with lowering.running():
        for _ in range(3):
            assert not fusion(p)[0].requires_grad
        p[0].requires_grad_()
        assert fusion(p)[0].requires_grad
        with torch.no_grad():
            assert not fusion(p)[0].requires_grad


@pytest.mark.parametrize("watched", [True, False])
@each_lowering
def test_backward_refuses_a_saved_tensor_that_a_fused_call_has_written(watched: bool, lowering: Lowering) -> None:
    weight = torch.ones(3, device=lowering.device, requires_grad=True)
    other = torch.ones(3, device=lowering.device, requires_grad=watched)
    loss = (weight * other).sum()
    with lowering.running(), torch.no_grad():
        Fusion(lambda p: p.add_(1))(Elements([other]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_lowering
def test_results_are_saved_by_autograd_one_by_one(lowering: Lowering) -> None:
    weight = torch.ones(3, device=lowering.device, requires_grad=True)
    with lowering.running(), torch.no_grad():
        first, second = Fusion(lambda p: p + 1)(lists((3,), (3,), device=lowering.device))
    loss = (weight * first).sum()
    second.add_(1)
    loss.backward()
    assert torch.equal(weight.grad, first)


@each_lowering
def test_a_leaf_is_not_written_where_autograd_records(lowering: Lowering) -> None:
    p = Elements([torch.ones(3, device=lowering.device, requires_grad=True)])
    with lowering.running(), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        Fusion(lambda p: p.add_(1))(p)


# --- programs that run in one way or another --------------------------------------------------------------------------


def test_elements_that_differ_run_in_groups_of_their_own() -> None:
    x = Elements([torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1.0), torch.ones(5)])
    fusion = Fusion(lambda x: x * 2)
    with Lowering.INTERPRETER.running():
        result = fusion(x)
    assert all(torch.equal(r, t * 2) for r, t in zip(result, x, strict=True))
    assert [r.dtype for r in result] == [t.dtype for t in x]
    assert len(groups(fusion)) == 3


def test_an_op_without_a_formula_runs_through_torch_in_one_program() -> None:
    fusion, x = Fusion(lambda x: torch.digamma(x) * 2), lists((3,))
    with Lowering.INTERPRETER.running():
        assert torch.equal(fusion(x)[0], torch.digamma(x[0]) * 2)
    assert isinstance(groups(fusion)[0], TorchGroup)


@each_lowering
def test_complex_elements_run_through_torch(lowering: Lowering) -> None:
    x = Elements([torch.tensor([1 + 2j, 3j], device=lowering.device)])
    with lowering.running():
        result = Fusion(lambda x, n: (x * n).abs())(x, 2.0)
    assert torch.allclose(result[0], (x[0] * 2).abs())
