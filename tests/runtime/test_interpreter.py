"""Triton's interpreter, as the tests have it, refuses addresses that no operand of a kernel has."""

from __future__ import annotations

import pytest
import torch

from subtensors.kernels.runtime.triton_compat import tl, triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")


@triton.jit
def copy_kernel(source, result, shift, count, BLOCK: tl.constexpr):
    """Copy `count` elements, of which the first is `shift` after the source's first."""
    place = tl.arange(0, BLOCK)
    tl.store(result + place, tl.load(source + shift + place, mask=place < count, other=0.0), mask=place < count)


def copied(shift: int, count: int, room: int = 4) -> torch.Tensor:
    result = torch.zeros(room)
    copy_kernel[(1,)](torch.arange(4.0), result, shift, count, BLOCK=8)
    return result


def test_a_mask_keeps_a_kernel_in_its_operands() -> None:
    assert copied(1, 3).tolist() == [1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("shift", "count", "room"), [(-1, 4, 4), (1, 4, 4), (0, 4, 3)], ids=["before", "after", "store"]
)
def test_an_address_outside_of_all_operands_is_an_error(shift: int, count: int, room: int) -> None:
    with pytest.raises(Exception, match="in none of the operands"):
        copied(shift, count, room)
