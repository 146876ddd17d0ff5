"""Fused math on parts of tensors, whose reductions an exchange combines with those of other processes."""

from __future__ import annotations

import pytest
import torch
from programs import Lowering, each_kernel_lowering
from torch import Tensor

import subtensors as st
from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import TensorColumn


class Doubled:
    """An exchange with one more process that has the same parts; it keeps the reductions that it was called with."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.dtype, int]] = []

    def __call__(self, results: Tensor, kind: str) -> None:
        self.asked.append((kind, results.dtype, len(results)))
        if kind == "sum":
            results.mul_(2)


def values(lowering: Lowering, *shapes: tuple[int, ...]) -> TensorColumn:
    generator = torch.Generator().manual_seed(0)
    return TensorColumn([torch.rand(s, generator=generator).add(0.5).to(lowering.device) for s in shapes])


@each_kernel_lowering
def test_math_continues_with_the_reductions_that_an_exchange_combined(lowering: Lowering) -> None:
    def function(x: Tensor) -> None:
        share = x / x.sum()
        x.copy_(share + (x > 1).sum() * x.amax() / share.norm())

    exchange, x = Doubled(), values(lowering, (7,), (3, 500), (1,))
    before = [t.clone().double() for t in x]
    with lowering.running():
        FusedFunction(function, exchange=exchange)(x)
    for t, b in zip(x, before, strict=True):
        share = b / (2 * b.sum())
        exact = share + 2 * (b > 1).sum() * b.amax() / (2 * share.square().sum()).sqrt()
        torch.testing.assert_close(t.double(), exact, rtol=16 * torch.finfo(t.dtype).eps, atol=0)
    # One round for the first sums, and one for the sum that depends on them, for all three tensors at once.
    float_sum, int_sum, extreme = ("sum", torch.float64, 3), ("sum", torch.int64, 3), ("amax", torch.float64, 3)
    assert sorted(exchange.asked, key=str) == sorted([float_sum, int_sum, extreme, float_sum], key=str)


@each_kernel_lowering
def test_strides_that_differ_between_processes_add_no_exchange(lowering: Lowering) -> None:
    exchange, p, g = Doubled(), values(lowering, (4, 6), (5, 3)), values(lowering, (4, 6), (5, 3))
    g[0] = g[0].mT.contiguous().mT
    before = [t.clone() for t in p]
    with lowering.running():
        FusedFunction(lambda p, g: p.sub_(g / g.sum()), exchange=exchange)(p, g)
    assert exchange.asked == [("sum", torch.float64, 2)]
    for t, b, own in zip(p, before, g, strict=True):
        torch.testing.assert_close(t, b - own / (2 * own.sum()))


@each_kernel_lowering
def test_a_part_without_elements_contributes_the_identity(lowering: Lowering) -> None:
    exchange, x = Doubled(), values(lowering, (0,), (3,))
    with lowering.running():
        total, largest = FusedFunction(lambda x: (x.sum(), x.amax()), exchange=exchange)(x)
    assert total[0] == 0
    assert largest[0] == float("-inf")


@each_kernel_lowering
def test_parts_that_share_memory_are_refused(lowering: Lowering) -> None:
    base = torch.ones(6, device=lowering.device)
    x = TensorColumn([base[:4], base[2:]])
    with lowering.running(), pytest.raises(st.RuleError, match="overlap others in memory"):
        FusedFunction(lambda x: x.div_(x.sum()), exchange=Doubled())(x)


def test_parts_are_refused_where_there_are_no_kernels() -> None:
    with pytest.raises(st.RuleError, match="no kernels on cpu"):
        FusedFunction(lambda x: x.div_(x.sum()), exchange=Doubled())(TensorColumn([torch.ones(3)]))


def test_math_on_the_number_of_elements_cannot_take_parts() -> None:
    x = TensorColumn([torch.ones(3)])
    assert FusedFunction(lambda x: x / x.norm()).takes_parts(x)
    assert not FusedFunction(lambda x: x / x.mean()).takes_parts(x)
