"""The formulas of `blockwise` on tiles, as Triton functions that generated kernels call.

A tile holds whole blocks, so that a block's scale is a reduction within the tile: codes are read and written inside the
kernel that computes with the numbers, and no decoded tensor is stored.
"""

from __future__ import annotations

from subtensors.kernels.fused import blockwise
from subtensors.kernels.runtime.tile_math_kernel import larger
from subtensors.kernels.runtime.triton_compat import tl, triton

SIZE = tl.constexpr(blockwise.SIZE)
SMALLEST = tl.constexpr(blockwise.SMALLEST)


@triton.jit
def _per_element(scales, BLOCK: tl.constexpr):
    return tl.reshape(tl.broadcast_to(scales[:, None], [BLOCK // SIZE, SIZE]), [BLOCK])


@triton.jit
def blockwise_absmax(x, inside, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of each block of a tile: `blockwise.absmax`."""
    x = tl.abs(x)
    if not FULL:
        x = tl.where(inside, x, 0)
    scale = tl.reduce(tl.reshape(x, [BLOCK // SIZE, SIZE]), 1, larger)
    return tl.where(scale < SMALLEST, 0, scale)


if triton.knobs.runtime.interpret:

    @triton.jit
    def _root(x):
        return tl.sqrt(x)

    @triton.jit
    def _reciprocal(x):
        return 1 / tl.where(x == 0, 1, x)

else:

    @triton.jit
    def _root(x):
        """The square root in one instruction; 0 for a denormal number."""
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _reciprocal(x):
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def approximate_sqrt(x):
    """The square root within two units in the last place."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return _root(x)


@triton.jit
def approximate_div(a, b):
    """a / b within two units in the last place; a denormal divisor counts as 0."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return a * _reciprocal(b)


@triton.jit
def quantize_blockwise(x, scales, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The code of each element, in the low byte of an int32: `blockwise.quantize`.

    The scale goes under the root, and the root of an unsigned number is also the divisor of Adam. Adding 1.5 * 2^23 to
    a small number rounds it to the nearest integer, which is then in the last bits of the sum.
    """
    if SIGNED:
        unit = tl.where(scales > 0, 127 * 127 * _reciprocal(scales), 0)
        root = _root(tl.abs(x) * _per_element(unit, BLOCK)).to(tl.int32, bitcast=True)
        sign = x.to(tl.int32, bitcast=True) & -2147483648
        code = (root | sign).to(tl.float32, bitcast=True) + 12582912.0
    else:
        unit = tl.where(scales > 0, 255 * 255 * _reciprocal(_root(scales)), 0)
        code = _root(_root(x) * _per_element(unit, BLOCK)) + 12582912.0
    return code.to(tl.int32, bitcast=True)


@triton.jit
def dequantize_blockwise(codes, scales, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Decode the codes, as `blockwise.dequantize` does."""
    scale = _per_element(scales, BLOCK)
    if SIGNED:
        ratio = codes * (1 / 127)
        return ratio * tl.abs(ratio) * scale
    else:
        ratio = codes * (1 / 255)
        return (ratio * ratio) * (ratio * ratio) * scale


@triton.jit
def load_blocks(pointer, left, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of a tile's blocks; `left` elements of the tensor are in this tile and after it."""
    block = tl.arange(0, BLOCK // SIZE)
    if FULL:
        return tl.load(pointer + block)
    else:
        return tl.load(pointer + block, mask=block * SIZE < left, other=0)


@triton.jit
def store_blocks(pointer, left, value, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the scales of a tile's blocks, as `load_blocks` reads them."""
    block = tl.arange(0, BLOCK // SIZE)
    if FULL:
        tl.store(pointer + block, value)
    else:
        tl.store(pointer + block, value, mask=block * SIZE < left)
