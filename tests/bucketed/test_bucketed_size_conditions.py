"""A graph answers calls whose true sizes meet the conditions under which it was made, and no others."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.dispatch.padded.size_conditions import SizeCondition, SizeConditions
from subtensors.dispatch.sizes.expressions import size_symbol

N = st.Dim("n", max=64, buckets=[8, 16, 24])


@pytest.mark.parametrize("check", ["first", False])
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("order", [(12, 8, 7, 5, 4, 3, 4, 3, 2, 12), (3, 12, 8, 4, 7)])
def test_a_branch_of_compiled_code_counts_in_every_bucket(
    order: tuple[int, ...], grad: bool, check: Literal["first", False]
) -> None:
    weight = torch.full((), 3.0, dtype=torch.float64, requires_grad=grad)

    def program(x: Tensor) -> Tensor:
        return (x.sum(1) * 2 if x.shape[1] <= 4 else x.sum(1)) * weight

    run = st.bucketed(program, {"x": {1: N}}, check=check, compile={"backend": "eager"})
    for n in order:
        x = torch.rand(2, n, dtype=torch.float64)
        torch.testing.assert_close(run(x), program(x))
    stats = run.stats()
    assert sum(stats.fallbacks.values()) == sum(n <= 4 for n in order)
    assert all("decides a branch otherwise than its bucket" in reason for reason in stats.fallbacks)


@pytest.mark.parametrize("check", ["first", False])
def test_a_branch_on_a_float_counts_as_one_on_a_whole_number(check: Literal["first", False]) -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum(1) * 2 if 4.5 < x.shape[1] < 6.5 else x.sum(1)

    run = st.bucketed(program, {"x": {1: N}}, check=check)
    for n in (7, 8, 3, 5, 6, 4):
        x = torch.rand(2, n)
        torch.testing.assert_close(run(x), program(x))


@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
@pytest.mark.parametrize("check", ["first", False])
def test_an_op_that_needs_elements_raises_torchs_error_in_each_call_without_them(
    check: Literal["first", False], compiled: bool | dict[str, object]
) -> None:
    run = st.bucketed(lambda x: x[:, 2:].amax(1), {"x": {1: N}}, check=check, compile=compiled)
    for n in (12, 6, 2, 5, 2, 1, 3):
        x = torch.rand(2, n)
        if n > 2:
            assert torch.equal(run(x), x[:, 2:].amax(1))
        else:
            with pytest.raises(IndexError, match=r"amax\(\): Expected reduction dim 1 to have non-zero size"):
                run(x)


def test_what_an_op_needs_holds_in_each_row_and_is_never_a_branch_that_makes_no_difference() -> None:
    n = size_symbol("n")
    conditions = SizeConditions()
    conditions.note(SizeCondition(n, "__ge__", 2, is_required=True), True)
    assert conditions.unmet({n: (2, 3)}) == ""
    assert conditions.unmet({n: (2, 1)}, ignores_branches=True) == "an op needs n >= 2"


def test_a_comparison_with_both_outcomes_is_no_condition() -> None:
    n = size_symbol("n")
    conditions = SizeConditions()
    for outcome in (True, False, True):
        conditions.note(SizeCondition(n, "__eq__", 8), outcome)
    assert not conditions.found


def test_a_call_that_an_op_keeps_from_its_bucket_can_be_differentiated() -> None:
    weight = torch.ones((), requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return x.narrow(1, x.shape[1] - 2, 1).sum(1) * weight  # at a size of 1 the start counts from the end

    run = st.bucketed(program, {"x": {1: N}})
    for n in (1, 1, 5, 1, 7):
        x = torch.rand(2, n)
        found, expected = (torch.autograd.grad(call(x).sum(), weight)[0] for call in (run, program))
        torch.testing.assert_close(found, expected)
