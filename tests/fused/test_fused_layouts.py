"""Fused calls on every layout, on memory that overlaps, and under autograd: each equals the map."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_lists import groups, lists
from programs import SMALL_TILES, Lowering, check, each_kernel_lowering, each_lowering, interpreted
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn


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
def test_every_layout_gives_the_same_result(first: str, second: str, lowering: Lowering) -> None:
    def function(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        p.sub_(g * 0.5)
        return p * g, g.sum()

    p, g = (TensorColumn(LAYOUTS[n](t) for t in lists((9, 12), (3, 4), seed=i)) for i, n in enumerate((first, second)))
    if p[0].dim() != g[0].dim():
        p, g = (
            TensorColumn(t if t.dim() == 4 else t[None, None].expand(2, 3, -1, -1).clone() for t in x) for x in (p, g)
        )
    assert check(lowering, function, p, g) is not None


@each_lowering
def test_a_broadcast_tensor_can_be_read(lowering: Lowering) -> None:
    g = TensorColumn([torch.tensor(2.0).expand(70), torch.arange(3.0)[:, None].expand(3, 5)])
    assert check(lowering, lambda p, g: p.sub_(g), lists((70,), (3, 5)), g) is not None


@each_lowering
def test_a_broadcast_tensor_cannot_be_written(lowering: Lowering) -> None:
    p = TensorColumn([torch.tensor(2.0, device=lowering.device).expand(70)])
    with lowering.running(), pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        FusedFunction(lambda p: p.add_(1))(p)


def test_results_have_the_strides_that_torch_gives() -> None:
    p = TensorColumn(transposed(t) for t in lists((3, 5), (4, 6)))
    with Lowering.INTERPRETER.running():
        result = FusedFunction(lambda p: p + 1)(p)
    assert [t.stride() for t in result] == [(t + 1).stride() for t in p]


@interpreted
def test_the_reason_for_a_slower_path_is_explained_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "subtensors.fused")
    strided = TensorColumn([torch.ones(4, 2)[:, 0]])
    with Lowering.INTERPRETER.running():
        assert "strides of their own are copied" in FusedFunction(lambda p: p.add_(1)).explain(strided)
        assert "no Triton formula for prims.digamma" in FusedFunction(torch.digamma).explain(lists((3,)))
        assert "several shapes" in FusedFunction(lambda p, g: p + g).explain(lists((3, 1)), lists((1, 3)))
        explained = FusedFunction(torch.exp).explain(lists((3,)))
        assert "exp: 1 elements, traced 1 times" in explained
        assert "1 tensors, 3 elements" in explained
    assert sum("1 of 1 elements run as" in r.message for r in caplog.records) == 3


@interpreted
def test_explain_reports_misaligned_addresses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "subtensors.fused")
    memory = torch.zeros(9)
    with Lowering.INTERPRETER.running():
        double = FusedFunction(lambda p: p.mul_(2))
        assert "1 of them not at multiples of 16 bytes" in double.explain(
            TensorColumn([torch.ones(4), misaligned(memory)])
        )
        assert "multiples" not in double.explain(TensorColumn([torch.ones(4), torch.ones(9)]))
        assert "overlap others in memory" in double.explain(TensorColumn([memory[:5], memory[4:]]))
        assert not caplog.records
        double(TensorColumn([memory[:5], memory[4:]]))
    assert ["overlap others in memory" in r.message for r in caplog.records] == [True]


@interpreted
def test_explain_reports_groups_that_overlap_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "subtensors.fused")
    memory = torch.zeros(9)
    elements = TensorColumn([memory[:4], memory.view(3, 3)[:, 0]])
    with Lowering.INTERPRETER.running():
        double = FusedFunction(lambda p: p.mul_(2))
        assert "groups of elements overlap" in double.explain(elements)
        double(elements)
        double(elements)
    assert sum("groups of elements overlap" in r.message for r in caplog.records) == 1


def assert_like_the_map(
    lowering: Lowering, function: Callable[..., Any], make: Callable[[], list[list[Tensor]]]
) -> None:
    """The fused call on lists that share memory equals the calls on their elements, in order."""
    mapped, fused = make(), make()
    for row in zip(*mapped, strict=True):
        function(*row)
    fusion = FusedFunction(function, SMALL_TILES)
    with lowering.running():
        fusion(*map(TensorColumn, fused))
    for fused_column, mapped_column in zip(fused, mapped, strict=True):
        for a, e in zip(fused_column, mapped_column, strict=True):
            assert torch.equal(*[t.to_dense() if t.is_sparse else t for t in (a, e)])


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
        # The second has other strides: on a GPU it is a separate group, and copied.
        base = torch.arange(100.0, device=lowering.device)
        return [[base[:20], base[:40:2], base[10:30]], list(lists((20,), (20,), (20,), device=lowering.device))]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_overlap_between_elements_with_strides_of_their_own_equals_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        base = torch.arange(100.0, device=lowering.device)
        return [[base[:40:2], base[10:50:2]], list(lists((20,), (20,), device=lowering.device))]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_overlap_with_an_element_that_runs_the_function_itself_equals_the_map(lowering: Lowering) -> None:
    def make() -> list[list[Tensor]]:
        # The second is broadcast; the last is sparse, and its memory is unknown.
        p, g = torch.ones(4, device=lowering.device), lists((4,), (1,), (4,), (4,), device=lowering.device)
        return [[p, p, p, torch.ones_like(p).to_sparse()], [*g[:3], g[3].to_sparse()]]

    assert_like_the_map(lowering, add_and_scale, make)


@each_lowering
def test_elements_in_several_groups_return_nothing(lowering: Lowering) -> None:
    p, g = lists((4,), (4,), device=lowering.device), lists((1,), (4,), device=lowering.device)
    with lowering.running():
        assert FusedFunction(add_and_scale)(p, g) is None


def test_elements_that_return_other_structures_are_refused() -> None:
    function = FusedFunction(lambda x: {"a": x + 1} if x.dtype == torch.float32 else {"b": x + 1})
    with pytest.raises(ValueError, match="for some elements, and"):
        function(TensorColumn([torch.ones(2), torch.ones(2, dtype=torch.float64)]))


def test_elements_may_return_nothing_where_others_return_a_tensor() -> None:
    function = FusedFunction(lambda x: None if x.dtype == torch.float32 else x + 1)
    first, second = function(TensorColumn([torch.ones(2), torch.ones(2, dtype=torch.float64)]))
    assert first is None
    assert second.tolist() == [2.0, 2.0]


@each_lowering
def test_what_torch_writes_to_a_broadcast_tensor_is_written(lowering: Lowering) -> None:
    vector = torch.ones(1, device=lowering.device).expand(5)
    with lowering.running():
        FusedFunction(lambda x: x.zero_())(TensorColumn([vector]))
    assert not vector.any()


@each_lowering
@pytest.mark.parametrize("view", [torch._neg_view, torch.conj], ids=["negated", "conjugated"])
def test_elements_that_are_negated_or_conjugated_views_equal_the_map(
    view: Callable[[Tensor], Tensor], lowering: Lowering
) -> None:
    def make() -> list[list[Tensor]]:
        x = torch.tensor([1 + 2j, 3j, 1j], device=lowering.device)
        x = x.imag.clone() if view is torch._neg_view else x
        return [[torch.zeros_like(x), view(x.clone()), view(x[0].clone())], [view(x.clone()), x.clone(), x[1].clone()]]

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
    fusion = FusedFunction(add_and_scale)
    columns = TensorColumn([base[:20], base[20:40]]), TensorColumn([base[40:60], base[60:80]])
    with lowering.running():
        fusion(*columns)
        assert "overlap" not in fusion.explain(*columns)
    (group,) = groups(fusion)
    assert group.tables_built == 1


@each_lowering
def test_gradients_flow_as_through_the_map(lowering: Lowering) -> None:
    def function(p: Tensor, g: Tensor, n: float) -> tuple[Tensor, Tensor]:
        return torch.tanh(p * g) ** 2 * n, (p - g).norm()

    p, g = (
        TensorColumn(t.requires_grad_() for t in lists((3,), (70,), seed=i, device=lowering.device)) for i in range(2)
    )
    with lowering.running():
        first, second = FusedFunction(function)(p, g, 0.5)
    loss = sum(t.sum() for t in (*first, *second))
    expected = sum(t.sum() for row in zip(p, g, strict=True) for t in function(*row, 0.5))
    inputs = [*p, *g]
    for a, e in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.equal(a, e)


@each_lowering
def test_a_tensor_that_starts_to_require_grad_is_tracked(lowering: Lowering) -> None:
    fusion, p = FusedFunction(lambda p: p * 2), lists((3,), device=lowering.device)
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
        FusedFunction(lambda p: p.add_(1))(TensorColumn([other]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_lowering
def test_results_are_saved_by_autograd_one_by_one(lowering: Lowering) -> None:
    weight = torch.ones(3, device=lowering.device, requires_grad=True)
    with lowering.running(), torch.no_grad():
        first, second = FusedFunction(lambda p: p + 1)(lists((3,), (3,), device=lowering.device))
    loss = (weight * first).sum()
    second.add_(1)
    loss.backward()
    assert torch.equal(weight.grad, first)


@each_lowering
def test_writing_to_a_leaf_in_grad_mode_is_refused(lowering: Lowering) -> None:
    p = TensorColumn([torch.ones(3, device=lowering.device, requires_grad=True)])
    with lowering.running(), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        FusedFunction(lambda p: p.add_(1))(p)
