"""The formulas of `blockwise` on tiles, as Triton functions the generated kernels call.

A tile holds whole blocks, so that a block's scale is a reduction within the tile: codes are read and written where the
maths is done, and nothing of a tensor's size is kept between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subtensors.kernels import blockwise

SIZE = tl.constexpr(blockwise.SIZE)
SMALLEST = tl.constexpr(blockwise.SMALLEST)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _per_element(scales, BLOCK: tl.constexpr):
    return tl.reshape(tl.broadcast_to(scales[:, None], [BLOCK // SIZE, SIZE]), [BLOCK])


@triton.jit
def blockwise_absmax(x, inside, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of each block of a tile: `blockwise.absmax`."""
    x = tl.abs(x)
    if not WHOLE:
        x = tl.where(inside, x, 0)
    largest = tl.reduce(tl.reshape(x, [BLOCK // SIZE, SIZE]), 1, _largest)
    return tl.where(largest < SMALLEST, 0, largest)


@triton.jit
def quantize_blockwise(x, scales, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The code of each element, still as float32: `blockwise.quantize`."""
    inverse = tl.where(scales > 0, 1 / tl.where(scales > 0, scales, 1), 0)
    ratio = tl.abs(x) * _per_element(inverse, BLOCK)
    # A NaN becomes 0: its block's scale is NaN.
    ratio = tl.sqrt(tl.maximum(ratio, 0, propagate_nan=tl.PropagateNan.NONE))
    if SIGNED:
        code = 127 * ratio + 0.5
        return tl.where(x < 0, -code, code).to(tl.int32)
    else:
        return (255 * tl.sqrt(ratio) + 0.5).to(tl.int32)


@triton.jit
def dequantize_blockwise(codes, scales, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """What the codes stand for: `blockwise.dequantize`."""
    scale = _per_element(scales, BLOCK)
    if SIGNED:
        ratio = codes * (1 / 127)
        return ratio * tl.abs(ratio) * scale
    else:
        ratio = codes * (1 / 255)
        return (ratio * ratio) * (ratio * ratio) * scale


@triton.jit
def load_blocks(pointer, left, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of a tile's blocks; `left` elements of the tensor are in this tile and after it."""
    block = tl.arange(0, BLOCK // SIZE)
    if WHOLE:
        return tl.load(pointer + block)
    else:
        return tl.load(pointer + block, mask=block * SIZE < left, other=0)


@triton.jit
def store_blocks(pointer, left, value, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the scales of a tile's blocks, as `load_blocks` reads them."""
    block = tl.arange(0, BLOCK // SIZE)
    if WHOLE:
        tl.store(pointer + block, value)
    else:
        tl.store(pointer + block, value, mask=block * SIZE < left)
