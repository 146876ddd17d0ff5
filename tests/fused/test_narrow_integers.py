"""Comparisons of narrow integers with numbers that their dtype can't hold: as torch decides them."""

from contextlib import nullcontext

import pytest
import torch
from kernels_on_cpu import kernels_on_cpu

import subtensors as st

COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
NUMBERS = (-2, 1000, 2**31, 1.5, float("nan"))


@pytest.mark.parametrize("shape", [(5,), ()], ids=["elements", "0-d"])
@pytest.mark.parametrize("way", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.bool], ids=str)
def test_a_narrow_integer_compares_with_any_number_as_in_torch(dtype, way, shape):
    x = torch.tensor([0, 1, 44, 100, 254])[: shape[0] if shape else 1].to(dtype).reshape(shape)
    zero_d = [torch.tensor(number) for number in NUMBERS]

    def math(p, tensors, numbers):
        return [f(p, k) for f in COMPARISONS for k in (*NUMBERS, *tensors, *numbers)]

    with kernels_on_cpu() if way == "kernels" else nullcontext():
        got = st.fused(math)(st.TensorList([x]), zero_d, NUMBERS)
    for ours, want in zip(got, math(x, zero_d, NUMBERS), strict=True):
        assert torch.equal(ours[0], want)
