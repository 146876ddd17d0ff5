"""Tensors kept in 8 bits: a code an element, and the largest magnitude of each block of 256 elements.

    absmax[b]  = max |x[i]|                             over the block's elements i, in row-major order
    signed     : code = sign(x) round(127 (|x| / absmax)^(1/2))      x ~ sign(code) (code / 127)^2 absmax
    unsigned   : code = round(255 (x / absmax)^(1/4))                x ~ (code / 255)^4 absmax

The roots give more codes to small numbers, as most of an optimizer's state are: the smallest signed magnitude above
zero is 6e-5 of the largest, the smallest unsigned one 2e-10. A second moment rounded to zero would make a step of
unbounded size; with linear codes training ends in NaN.

The largest element of a block has the last code and is kept exactly, so that decoded numbers are encoded to the same
codes again. Blocks whose largest magnitude is below 1e-37 are zero; a NaN or infinity makes its whole block NaN.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), for blocks and their scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.kernels.runtime.custom_ops import define

SIZE = 256
"""Elements a block."""

SMALLEST = 1e-37
"""The smallest scale of a block: below it the reciprocal overflows float32."""


def block_count(elements: int) -> int:
    """Return the number of blocks for a number of elements; the last block may be shorter."""
    return -(-elements // SIZE)


def _blocks(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % SIZE)).view(-1, SIZE)


def _per_element(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(SIZE)[: like.numel()].view(like.shape)


def absmax(x: Tensor) -> Tensor:
    """The scale of each block.

    Args:
        x: any shape.

    Returns:
        (block_count(x.numel()),) float32.

    Example:
        >>> absmax(torch.arange(300.0))
        tensor([255., 299.])
    """
    if not x.numel():
        return x.new_zeros(0, dtype=torch.float32)
    largest = _blocks(x.float()).abs().amax(1)
    return torch.where(largest < SMALLEST, 0, largest)


def quantize(x: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """The code of each element.

    Args:
        x: any shape; not negative where codes are unsigned.
        scales: `absmax(x)`.
        is_signed: True for the signed code.

    Returns:
        int8 or uint8, of the shape of `x`, contiguous.

    Example:
        >>> x = torch.tensor([1.0, -0.25, 0.001])
        >>> quantize(x, absmax(x), is_signed=True)
        tensor([127, -64,   4], dtype=torch.int8)
    """
    inverse = torch.where(scales > 0, 1 / scales, 0)
    ratio = x.float().abs() * _per_element(inverse, x)
    ratio = torch.where(ratio > 0, ratio, 0).sqrt()
    if is_signed:
        codes = (127 * ratio).round().to(torch.int8)
        return torch.where(x < 0, -codes, codes).contiguous()
    return (255 * ratio.sqrt()).round().to(torch.uint8).contiguous()


def dequantize(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """Decode codes to numbers.

    Args:
        codes: int8 where they are signed, else uint8; any shape.
        scales: (block_count(codes.numel()),) float32.
        is_signed: True for the signed code.

    Returns:
        float32, of the shape of `codes`.

    Example:
        >>> dequantize(torch.tensor([255, 128, 0], dtype=torch.uint8), torch.tensor([2.0]), is_signed=False)
        tensor([2.0000, 0.1270, 0.0000])
    """
    scale = _per_element(scales, codes)
    if is_signed:
        ratio = codes.float() * (1 / 127)
        return ratio * ratio.abs() * scale
    ratio = codes.float() * (1 / 255)
    return (ratio * ratio) * (ratio * ratio) * scale


# The same as custom ops, which a trace records; their Triton functions are in `blockwise_kernel`.
define(
    "blockwise_absmax", "Tensor x", "Tensor", absmax,
    lambda x: x.new_empty(block_count(x.numel()), dtype=torch.float32),
)  # fmt: skip
define(
    "quantize_blockwise", "Tensor x, Tensor scales, bool is_signed", "Tensor", quantize,
    lambda x, _, is_signed: x.new_empty(x.shape, dtype=torch.int8 if is_signed else torch.uint8),
)  # fmt: skip
define(
    "dequantize_blockwise", "Tensor codes, Tensor scales, bool is_signed", "Tensor", dequantize,
    lambda codes, *_: codes.new_empty(codes.shape, dtype=torch.float32),
)  # fmt: skip
OPS = frozenset({"blockwise_absmax", "quantize_blockwise", "dequantize_blockwise"})
"""The ops on numbers per block, other than copies."""
