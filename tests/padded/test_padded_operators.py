"""Python's operators on padded tensors: each is that of plain tensors, by a rule, whatever lies in the padding."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subtensors as st
from subtensors.padded import torch_function as padded_calls

SEQ = st.Dim("seq", max=8, buckets=8)
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
ORDER = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
BITS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod, operator.ipow]
NUMBERS = [(f, dtype) for f in (*ARITHMETIC, *ORDER, *IN_PLACE) for dtype in (torch.float64, torch.int64)]
OPERANDS = {
    "a number": lambda x: (x.clone(), 2),
    "of a number": lambda x: (2, x.clone()),
    "a tensor": lambda x: (x.clone(), x + 1),
    "a row": lambda x: (x.clone(), x[:1] + 1),
}


@pytest.mark.parametrize("fill", [0, -3])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(("op", "dtype"), [*NUMBERS, *((f, torch.int64) for f in BITS)])
def test_an_operator_equals_that_of_plain_tensors(
    op: Callable[[Any, Any], Any], dtype: torch.dtype, operands: str, fill: int
) -> None:
    if operands == "of a number" and op in IN_PLACE:
        pytest.skip("a number is not changed in place")
    x = torch.arange(1, 16).view(3, 5).remainder(5).to(dtype) + 1
    padded_calls.fallbacks.clear()
    out = op(*OPERANDS[operands](st.pad(x, {1: SEQ}, value=fill)))
    assert torch.equal(out.unpad(), op(*OPERANDS[operands](x)))
    assert not padded_calls.fallbacks


@pytest.mark.parametrize(
    "divided",
    [
        torch.fmod,
        torch.remainder,
        torch.floor_divide,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: a.clone().div_(b, rounding_mode="floor"),
    ],
)
def test_integers_are_not_divided_by_zeros_of_the_padding(divided: Callable[[Any, Any], Tensor]) -> None:
    x = torch.arange(1, 16).view(3, 5)
    mine = st.pad(x, {1: SEQ})
    assert torch.equal(divided(mine, mine).unpad(), divided(x, x))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divided(mine, mine - 3)
