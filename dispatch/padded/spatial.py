"""Spatial ops: convolution, pooling and interpolation, with the op's own border beyond the true end.

A convolution is padded with zeros, a max pooling with -inf: filled with that, a padded image of the bucket's size gives
at each position the value that the unpadded image gives. A window that starts in the padding may overlap valid
positions, so the gradient of the result is masked. An interpolation repeats the last valid position,

    out[i] = sum over j near (i + 1/2) / factor - 1/2 of weight[i, j] x[min(max(j, 0), n - 1)].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops.reduction_dims import min_value
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.offset_reads import rows_dim
from subtensors.dispatch.padded.pad_ops import pad_dim
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, merged, padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import convolved, deconvolved, floor_divided, multiplied
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

aten = torch.ops.aten


@table.register(aten.convolution)
def convolution(call: PaddedCall) -> PaddedValue:
    """Convolve an input that is padded in the batch or in spatial dims."""
    x: PaddedValue = call["input"]
    weight: PaddedValue = call["weight"]
    if x.is_padded(1) or weight.padded_dims:
        raise refuse(call, "its channels or its weight are padded")
    # Images are independent of each other, except in the gradient of the weight.
    is_tracked = torch.is_grad_enabled() and any(value.dense.requires_grad for value in call.values)
    out = call.dense({"input": x.filled(0, None if is_tracked else range(2, x.dim()))})
    dims: list[Factors] = [x.dims[0], *static_dims([out.shape[1]])]
    rank = x.dim() - 2
    options = [_per_dim(call[name], rank) for name in ("stride", "padding", "dilation", "output_padding")]
    for i, (stride, padding, dilation, extra) in enumerate(zip(*options, strict=True)):
        d = i + 2
        if not x.is_padded(d):
            dims += static_dims([out.shape[d]])
            continue
        kernel = weight.shape[d]
        size = prefix_size(x, d)
        if call["transposed"]:
            size = deconvolved(size, kernel, stride, padding, dilation, extra)
        else:
            size = convolved(size, kernel, stride, padding, dilation)
        dims.append(padded_dim(out.shape[d], size))
    return result(out, dims, x.sizes).gradient_masked()


@table.register(aten.im2col.default, across=True)
def windows(call: PaddedCall) -> PaddedValue:
    """Unfold the windows that a convolution reads, one column per position."""
    x: PaddedValue = call["self"]
    first = x.dim() - 2
    if x.is_padded(first - 1):
        raise refuse(call, "its channels are padded")
    out = call.dense({"self": x.filled(0, range(first, x.dim()))})
    positions: list[Factor] = []
    for i, d in enumerate((first, first + 1)):
        kernel, *steps = (call[name][i] for name in ("kernel_size", "stride", "padding", "dilation"))
        size = prefix_size(x, d) if x.is_padded(d) else x.shape[d]
        bucket = int(convolved(x.shape[d], kernel, *steps))
        positions += padded_dim(bucket, convolved(size, kernel, *steps))
    dims = [*x.dims[: first - 1], *static_dims([out.shape[first - 1]]), merged(positions) or static_dims([1])[0]]
    return result(out, dims, x.sizes).gradient_masked()


@table.register(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, across=True)
def max_pool(call: PaddedCall) -> tuple[PaddedValue, PaddedValue]:
    """The maximum of each window, and its position in the unpadded image."""
    x: PaddedValue = call["self"]
    rank = 2 if call.op.overloadpacket is aten.max_pool2d_with_indices else 3
    values, positions = call.dense({"self": x.filled(min_value(x.dense.dtype), range(x.dim() - rank, x.dim()))})
    dims = _pooled(call, x, values, rank, ceil=call["ceil_mode"])
    positions = _true_positions(call, x, positions, rank)
    return result(values, dims, x.sizes).gradient_masked(), result(positions, dims, x.sizes)


@table.register(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, across=True)
def average_pool(call: PaddedCall) -> PaddedValue:
    """The mean of each window, with or without its border, as the caller asks."""
    x: PaddedValue = call["self"]
    rank = {aten.avg_pool1d: 1, aten.avg_pool2d: 2, aten.avg_pool3d: 3}[call.op.overloadpacket]
    over = range(x.dim() - rank, x.dim())
    ceil, counts_border = call["ceil_mode"], call["count_include_pad"]
    if call.get("divisor_override") or (counts_border and not ceil):
        out = call.dense({"self": x.filled(0, over)})
    elif counts_border and any(_per_dim(call["padding"], rank)):
        raise refuse(call, "the size of the last window of ceil_mode depends on the true size")
    else:
        dtype = arithmetic_dtype(x.dense.dtype)
        mask = x.mask(over)
        ones = (
            torch.ones(x.shape, dtype=dtype, device=x.dense.device) if mask is None else mask.expand(x.shape).to(dtype)
        )
        sums, counts = (call.dense({"self": t, "count_include_pad": True}) for t in (x.filled(0, over).to(dtype), ones))
        out = (sums / counts).to(x.dense.dtype)
    return result(out, _pooled(call, x, out, rank, ceil), x.sizes).gradient_masked()


def _pooled(call: PaddedCall, x: PaddedValue, out: Tensor, rank: int, ceil: bool) -> list[Factors]:
    dims = list(x.dims[: x.dim() - rank])
    kernel = _per_dim(call["kernel_size"], rank)
    stride = _per_dim(call["stride"], rank) if call["stride"] else kernel
    padding, dilation = _per_dim(call["padding"], rank), _per_dim(call.get("dilation", 1), rank)
    for i in range(rank):
        d = x.dim() - rank + i
        if not x.is_padded(d):
            dims += static_dims([out.shape[d]])
            continue
        size = convolved(prefix_size(x, d), kernel[i], stride[i], padding[i], dilation[i], ceil)
        dims.append(padded_dim(out.shape[d], size))
    return dims


def _true_positions(call: PaddedCall, x: PaddedValue, positions: Tensor, rank: int) -> Tensor:
    """Convert positions in a flattened bucket image to positions in the unpadded one."""
    first = x.dim() - rank
    if not any(x.is_padded(d) and math.prod(x.shape[first:d]) > 1 for d in range(first + 1, x.dim())):
        return positions
    valid = torch.zeros_like(positions)
    scale: Tensor | int = 1
    for d in reversed(range(first, x.dim())):
        index, positions = positions % x.shape[d], positions // x.shape[d]
        valid = valid + index * scale
        scale = scale * _per_image(x, x.size(d))
    return valid


def _per_image(x: PaddedValue, size: Tensor | int) -> Tensor | int:
    """A true size, shaped to broadcast against the images of a ragged batch."""
    if isinstance(size, int) or not size.dim():
        return size
    return size.view([-1 if d == rows_dim(x) else 1 for d in range(x.dim())])


def _per_dim(options: int | Sequence[int], rank: int) -> list[int]:
    listed = [options] if isinstance(options, int) else list(options)
    return listed * rank if len(listed) == 1 else listed


_INTERPOLATIONS = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d"""
MAX_EXACT_DENOMINATOR = 1024
"""Scale factors are multiples of 1 / this: their products with sizes are exact in float64, in which torch computes."""


@table.register(*(getattr(aten, name).vec for name in _INTERPOLATIONS.split()), across=True)
def interpolate(call: PaddedCall) -> PaddedValue:
    """Resize by scale factors; a size would make the factor depend on the true size (`resampling.py`)."""
    x: PaddedValue = call["input"]
    over = range(2, x.dim())
    factors = call["scale_factors"]
    if factors is None or call.get("align_corners"):
        raise refuse(call, "its scale factor depends on the true size")
    extended = x
    for d, factor in zip(over, factors, strict=True):
        if x.is_padded(d):
            if factor * MAX_EXACT_DENOMINATOR != int(factor * MAX_EXACT_DENOMINATOR):
                raise refuse(
                    call, f"the factor {factor} is no multiple of 1/{MAX_EXACT_DENOMINATOR}, and sizes are rounded"
                )
            extended = pad_dim(extended, d, "replicate", 0, x.shape[d], static_dims([x.shape[d]])[0])
    out = call.dense({"input": extended.dense})
    dims = [*x.dims[:2], *static_dims(out.shape[2:])]
    for d, factor in zip(over, factors, strict=True):
        if x.is_padded(d):
            size = floor_divided(
                multiplied(prefix_size(x, d), int(factor * MAX_EXACT_DENOMINATOR)), MAX_EXACT_DENOMINATOR
            )
            dims[d] = padded_dim(out.shape[d], size)
    return result(out, dims, x.sizes).gradient_masked()
