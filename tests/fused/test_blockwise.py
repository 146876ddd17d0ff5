"""Tensors of 8-bit codes: their error, stable round trips, and their kernels."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as h
from kernels_on_cpu import kernels_on_cpu
from torch import Tensor

from subtensors.dispatch.fused.fused_function import FusedFunction
from subtensors.dispatch.fused.tensor_columns import BlockScales, TensorColumn
from subtensors.dispatch.ops.errors import RuleError
from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.launch import Tiling

ops = torch.ops.subtensors
SHAPES = [(5,), (300,), (4, 256), (37, 71), (1,), (0,), (2, 3, 129)]


def numbers(shape: tuple[int, ...], spread: float, seed: int = 0, is_signed: bool = True) -> Tensor:
    """Magnitudes over `spread` powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (-spread * torch.rand(shape, generator=generator))
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    return magnitude * sign if is_signed else magnitude


def round_trip(x: Tensor, is_signed: bool) -> Tensor:
    scales = blockwise.absmax(x)
    return blockwise.dequantize(blockwise.quantize(x, scales, is_signed), scales, is_signed)


@pytest.mark.parametrize(("is_signed", "root", "last"), [(True, 2, 127), (False, 4, 255)])
@given(spread=h.floats(0, 12), size=h.integers(1, 700), seed=h.integers(0, 99))
def test_a_decoded_number_is_off_by_at_most_half_a_code(
    is_signed: bool, root: int, last: int, spread: float, size: int, seed: int
) -> None:
    x = numbers((size,), spread, seed, is_signed)
    scale = blockwise.absmax(x).repeat_interleave(256)[:size].double()

    def code(values: Tensor) -> Tensor:
        return last * (values.double().abs() / scale) ** (1 / root)

    back = round_trip(x, is_signed)
    assert (code(back) - code(x)).abs().max() <= 0.5 + 1e-3
    assert ((back == 0) | (back.sign() == x.sign())).all()


@pytest.mark.parametrize("is_signed", [True, False])
@given(spread=h.floats(0, 12), power=h.integers(-30, 30), seed=h.integers(0, 99))
def test_decoded_numbers_are_encoded_to_the_same_codes(is_signed: bool, spread: float, power: int, seed: int) -> None:
    once = round_trip(numbers((600,), spread, seed, is_signed) * 10.0**power, is_signed)
    assert torch.equal(round_trip(once, is_signed), once)
    assert torch.equal(blockwise.absmax(round_trip(once, is_signed)), blockwise.absmax(once))


def test_every_code_decodes_to_a_different_number_that_encodes_to_it() -> None:
    for is_signed, codes in ((True, torch.arange(-127, 128)), (False, torch.arange(256))):
        codes = codes.to(torch.int8 if is_signed else torch.uint8)
        values = blockwise.dequantize(codes, torch.tensor([3.7]), is_signed)
        assert (values.diff() > 0).all()
        assert torch.equal(blockwise.quantize(values, blockwise.absmax(values), is_signed), codes)


def test_a_block_of_tiny_numbers_is_zero_and_a_nan_stays_in_its_block() -> None:
    x = torch.ones(4 * 256)
    x[:256] = 0.0
    x[256:512] = 1e-40
    x[600] = math.nan
    back = round_trip(x, True)
    assert (back[:512] == 0).all()
    assert back[512:768].isnan().all()
    assert (back[768:] == 1).all()


def decayed(codes: Tensor, scales: Tensor, g: Tensor, is_signed: bool, rate: float) -> Tensor:
    value = ops.dequantize_blockwise(codes, scales, is_signed)
    value = value * rate + (g if is_signed else g.abs())
    largest = ops.blockwise_absmax(value)
    codes.copy_(ops.quantize_blockwise(value, largest, is_signed))
    scales.copy_(largest)
    return value


def columns(
    device: str, is_signed: bool, dtype: torch.dtype = torch.float32
) -> tuple[TensorColumn, BlockScales, TensorColumn]:
    values = [numbers(shape, 5, i, is_signed) for i, shape in enumerate(SHAPES)]
    scales = [blockwise.absmax(v) for v in values]
    codes = [blockwise.quantize(v, s, is_signed) for v, s in zip(values, scales, strict=True)]
    gradients = [numbers(shape, 3, i + 50).to(device, dtype) for i, shape in enumerate(SHAPES)]
    return TensorColumn(c.to(device) for c in codes), BlockScales(s.to(device) for s in scales), TensorColumn(gradients)


@pytest.mark.parametrize("tiling", [None, Tiling(1024, 4), Tiling(64, 2)], ids=str)
@pytest.mark.parametrize("is_signed", [True, False])
def test_kernels_on_codes_equal_torch(is_signed: bool, tiling: Tiling | None, device: str) -> None:
    codes, scales, g = columns(device, is_signed)
    expected = columns("cpu", is_signed)
    fusion = FusedFunction(decayed, tiling)
    with kernels_on_cpu():
        values = fusion(codes, scales, g, is_signed, 0.9)
    assert "kernel decayed_element_0" in fusion.explain(codes, scales, g, is_signed, 0.9) or device == "cpu"
    for i, (code, scale, gradient) in enumerate(zip(*expected, strict=True)):
        value = decayed(code, scale, gradient, is_signed, 0.9)
        torch.testing.assert_close(values[i].cpu(), value)
        torch.testing.assert_close(scales[i].cpu(), scale)
        # The last bit of a root decides between two codes that are equally near.
        assert (codes[i].cpu().int() - code.int()).abs().sum() <= 0.01 * code.numel() + (code.numel() > 0)
        assert not code.numel() or code.abs().max() > 0


def test_kernels_read_nothing_beyond_the_tensors() -> None:
    around = torch.full((3 * 512,), math.nan)
    scales = torch.full((6,), math.nan)
    codes = torch.zeros(3 * 512, dtype=torch.int8)
    around[512:812], scales[2:4] = 1.0, 0.0
    with kernels_on_cpu():
        FusedFunction(decayed)(
            TensorColumn([codes[512:812]]), BlockScales([scales[2:4]]), TensorColumn([around[512:812]]), True, 0.5
        )
    assert codes[512:812].unique().tolist() == [127]
    assert (codes[:512] == 0).all()
    assert (codes[812:] == 0).all()
    assert scales[2:4].tolist() == [1.0, 1.0]
    assert scales[[0, 1, 4, 5]].isnan().all()


@pytest.mark.parametrize("context", [nullcontext, kernels_on_cpu])
def test_codes_keep_their_order_when_gradients_have_other_strides(context: Any) -> None:
    (code, *_), (scale, *_), _ = [c[3:4] for c in columns("cpu", True)]
    g = numbers((37, 71), 3, 9)
    expected = decayed(code.clone(), scale.clone(), g, True, 0.9)
    with context():
        (value,) = FusedFunction(decayed)(
            TensorColumn([code]), BlockScales([scale]), TensorColumn([g.mT.contiguous().mT]), True, 0.9
        )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(scale, blockwise.absmax(expected))


@pytest.mark.parametrize(
    "function",
    [
        lambda codes, scales: codes.float() * scales,
        lambda codes, scales: scales.mul_(2),
        lambda codes, scales: torch.zeros_like(scales),
        lambda codes, scales: scales.sum(),
        lambda codes, scales: ops.blockwise_absmax(codes.float()),
    ],
)
def test_numbers_per_block_are_refused_outside_of_quantization(function: Any) -> None:
    codes, scales, _ = columns("cpu", True)
    with pytest.raises(RuleError):
        FusedFunction(function)(codes, scales)


def test_a_program_of_codes_has_a_warp_for_each_block_unless_it_was_tuned() -> None:
    codes, scales, g = columns("cpu", True)
    assert [*FusedFunction(decayed).tune(codes, scales, g, True, 0.9).values()] == [Tiling(256, 1)]
