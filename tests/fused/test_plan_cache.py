"""The caches of fused calls: traces, plans and pointer tables, but no tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fused_lists import groups, lists, sgd, tables
from programs import Lowering, each_kernel_lowering, each_lowering
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn
from subtensors.dispatch.fused.triton_executor import TritonExecutor


@each_lowering
def test_a_thousand_calls_with_new_numbers_trace_once(lowering: Lowering) -> None:
    def function(p: Tensor, g: Tensor, *, lr: float, betas: tuple[float, float], step: int) -> None:
        p.sub_(lr * g * (1 - betas[0] ** step) + betas[1])

    p, g = lists((3,), device=lowering.device), lists((3,), seed=1, device=lowering.device)
    fusion = FusedFunction(function)
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
    fusion = FusedFunction(sgd)
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
    fusion = FusedFunction(lambda p: p * 2)
    for tensor in (first, second, first, second):
        assert torch.equal(fusion(TensorColumn([tensor]))[0], tensor * 2)
    assert fusion.traces == 2


@pytest.mark.parametrize("values", [(True, False), ("a", "b"), (None, True), (0.5, 1), (torch.float32, torch.int32)])
def test_a_new_static_value_or_kind_of_number_is_traced(values: tuple[Any, Any]) -> None:
    fusion = FusedFunction(lambda p, x: p * (1 if x is None or not isinstance(x, bool | str | torch.dtype) else 2))
    for value in (*values, *values):
        fusion(TensorColumn([torch.ones(2)]), value)
    assert fusion.traces == 2


def test_modes_of_torch_that_change_the_math_are_traced_separately() -> None:
    fusion = FusedFunction(lambda p: p + torch.tensor(0.5))
    p = TensorColumn([torch.ones(2, dtype=torch.int64)])
    assert fusion(p)[0].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fusion(p)[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fusion(p)[0].dtype == torch.float32


@each_kernel_lowering
def test_minus_zero_and_zero_are_different_numbers(lowering: Lowering) -> None:
    p = TensorColumn([torch.ones(2, device=lowering.device)])
    live = FusedFunction(lambda p, x: torch.copysign(p, torch.full_like(p, x)))
    literal = FusedFunction(lambda p, negative: torch.copysign(p, -0.0 if negative else 0.0))
    with lowering.running():
        assert [live(p, x)[0].tolist() for x in (0.0, -0.0, 0.0)] == [[1, 1], [-1, -1], [1, 1]]
        assert [literal(p, n)[0].tolist() for n in (False, True)] == [[1, 1], [-1, -1]]


@each_kernel_lowering
def test_only_a_tensor_at_a_new_address_gets_a_new_pointer_table(lowering: Lowering) -> None:
    p, g = lists((3,), (70,), device=lowering.device), lists((3,), (70,), seed=1, device=lowering.device)
    fusion, left = FusedFunction(sgd), list[Tensor]()
    with lowering.running():
        for moves in range(1, 4):
            for _ in range(3):
                expected = [a - 0.5 * b for a, b in zip(p, g, strict=True)]
                fusion(TensorColumn(p), TensorColumn(g), 0.5)
                assert all(torch.allclose(a, e) for a, e in zip(p, expected, strict=True))
            assert tables(fusion) == moves
            left.append(p[1].data)  # kept, or the next tensor could reuse the memory of a cached table
            p[1].data = p[1].data.clone()
    assert len(groups(fusion)) == 1


@pytest.mark.parametrize("is_same_list", [True, False])
@each_lowering
def test_new_data_of_a_tensor_is_noticed(is_same_list: bool, lowering: Lowering) -> None:
    tensors = [torch.zeros(3, device=lowering.device), torch.zeros(4, device=lowering.device)]
    fusion, kept = FusedFunction(lambda p: p.add_(1)), TensorColumn(tensors)
    with lowering.running():
        for data in (torch.zeros(3), torch.zeros(5), torch.zeros(5, dtype=torch.float64), torch.zeros(2, 3).t()):
            tensors[0].data = data.to(lowering.device)
            for _ in range(3):
                fusion(kept if is_same_list else TensorColumn(tensors))
            assert (tensors[0] == 3).all()
    assert (tensors[1] == 12).all()


@each_lowering
def test_gradients_that_are_reallocated_each_step_are_noticed(lowering: Lowering) -> None:
    p = [torch.nn.Parameter(torch.ones(70, device=lowering.device)) for _ in range(3)]
    fusion = FusedFunction(sgd)
    with lowering.running(), torch.no_grad():
        for step in range(12):
            for t in p:
                t.grad = torch.full_like(t, float(step))
            fusion(TensorColumn(p), TensorColumn(t.grad for t in p if t.grad is not None), 1.0)
            for t in p:
                t.grad = None
            torch.ones(step * 50, device=lowering.device)
    assert all((t == 1 - sum(range(12))).all() for t in p)
    assert fusion.traces == 1


@each_lowering
def test_no_tensor_of_a_call_is_kept_alive(lowering: Lowering) -> None:
    fusion = FusedFunction(lambda p, g, t: p.sub_(g * t).sum())
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
    fusion = FusedFunction(sgd)
    p = TensorColumn(lists((3,), (70,), device=lowering.device), is_fixed=True)
    expected = [t.clone() for t in p]
    with lowering.running():
        for step in range(1, 4):
            g = lists((3,), (70,), seed=step, device=lowering.device)
            fusion(p, g, 0.5)
            for e, t in zip(expected, g, strict=True):
                e.sub_(0.5 * t)
        assert all(torch.equal(a, e) for a, e in zip(p, expected, strict=True))
        # The same tensors in another list object are planned again.
        fusion(TensorColumn(p, is_fixed=True), g, 0.5)
        assert all(torch.equal(a, e.sub_(0.5 * t)) for a, e, t in zip(p, expected, g, strict=True))
    known = [weakref.ref(p), weakref.ref(p[0])]
    del p
    gc.collect()
    assert not any(r() is not None for r in known)


@each_kernel_lowering
def test_the_number_of_cached_tables_and_plans_is_limited(lowering: Lowering) -> None:
    fusion = FusedFunction(sgd)
    with lowering.running():
        for size in range(1, FusedFunction.MAX_PLANS + 5):
            fusion(lists((size,), device=lowering.device), lists((size,), device=lowering.device), 0.5)
        kept = [[torch.ones(2, device=lowering.device)] for _ in range(TritonExecutor.MAX_TABLES + 4)]
        for p in kept:
            fusion(TensorColumn(p), TensorColumn([torch.ones(2, device=lowering.device)]), 0.5)
    assert len(groups(fusion)) <= FusedFunction.MAX_PLANS
    assert max(len(g.tables) for g in groups(fusion)) <= TritonExecutor.MAX_TABLES
    assert all((p[0] == 0.5).all() for p in kept)


@each_lowering
def test_tied_tensors_are_planned_once(lowering: Lowering) -> None:
    x = torch.ones(3, device=lowering.device)
    fusion = FusedFunction(lambda p: p * 2)
    with lowering.running():
        for _ in range(3):
            fusion(TensorColumn([x, x]))
        fusion(TensorColumn([x, x.clone()]))
    assert len(groups(fusion)) == 2
