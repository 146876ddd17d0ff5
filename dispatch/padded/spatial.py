"""Spatial ops: convolution, pooling and interpolation, with the op's own border beyond the true end.

A convolution is padded with zeros, a max pooling with -inf: filled with that, a padded image of the bucket's size gives
at each position the value that the unpadded image gives. A window that starts in the padding may overlap valid
positions, so the gradient of the result is masked. An interpolation by a factor repeats the last valid position,

    out[i] = sum over j near (i + 1/2) / factor - 1/2 of weight[i, j] x[min(max(j, 0), n - 1)].

An interpolation to a size that is padded, or of one, has a quotient of true sizes as its scale. Each dim of m positions
is resized to n in turn, both true sizes on the device, so one captured graph serves all of them. An output reads a few
inputs, its taps, each with a share, as torch computes them:

    nearest    x[floor(i m / n)]
    linear     x[j] (1 - t) + x[j + 1] t      j + t = max((i + 1/2) m / n - 1/2, 0)
    cubic      four inputs around (i + 1/2) m / n - 1/2

An antialiased filter grows with m / n, so it reads any number of inputs: it is a product with a matrix of shares.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.sample_dims import CORE
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.copies import pad_dim
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, require_size, run, table
from subtensors.dispatch.padded.padded_size import dim_of, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.padded.positions import gather_along
from subtensors.dispatch.padded.reductions import unpadded_index
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, merged, padded_dim, static_dims, with_dim
from subtensors.dispatch.sizes.expressions import Size, convolved, deconvolved, floor_divided, multiplied
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype, min_value

aten = torch.ops.aten


@table.register(aten.convolution)
def convolution(call: PaddedCall, input: PaddedValue, weight: PaddedValue, transposed: bool) -> PaddedValue:
    """Convolve an input that is padded in the batch or in spatial dims."""
    x, rank = input, input.dim() - 2
    if x.is_padded(1) or weight.padded_dims:
        raise UnsupportedCall("its channels or its weight are padded")
    # Images are independent of each other, except in the gradient of the weight.
    out = call.dense({"input": x.filled(0, None if call.is_tracked else range(2, x.dim()))})
    options = [_per_dim(call[name], rank) for name in ("stride", "padding", "dilation", "output_padding")]
    sizes = []
    for i, (stride, padding, dilation, extra) in enumerate(zip(*options, strict=True)):
        window = weight.shape[i + 2], stride, padding, dilation
        size = prefix_size(x, i + 2) if x.is_padded(i + 2) else 0
        sizes.append(deconvolved(size, *window, extra) if transposed else convolved(size, *window))
    return _resized(call, x, out, [x.dims[0], *static_dims([out.shape[1]])], sizes).gradient_masked()


def _resized(
    call: PaddedCall, x: PaddedValue, out: Tensor, leading: Sequence[Factors], sizes: Sequence[Size]
) -> PaddedValue:
    """Return a result with some leading dims, and last ones that have these true sizes where the input is padded."""
    dims = list(leading)
    for d, size in enumerate(sizes, start=x.dim() - len(sizes)):
        bucket = out.shape[len(dims)]
        if x.is_padded(d):
            for needed in (prefix_size(x, d), size):
                require_size(call, x.sizes, needed, 1)
        dims.append(padded_dim(bucket, size) if x.is_padded(d) else static_dims([bucket])[0])
    return result(out, dims, x.sizes)


@table.register(aten.im2col.default, across=True)
def windows(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Unfold the windows that a convolution reads, one column per position."""
    first = x.dim() - 2
    if x.is_padded(first - 1):
        raise UnsupportedCall("its channels are padded")
    out = call.dense({"self": x.filled(0, range(first, x.dim()))})
    positions: list[Factor] = []
    for i, d in enumerate((first, first + 1)):
        kernel, *steps = (call[name][i] for name in ("kernel_size", "stride", "padding", "dilation"))
        size = prefix_size(x, d) if x.is_padded(d) else x.shape[d]
        bucket, count = int(convolved(x.shape[d], kernel, *steps)), convolved(size, kernel, *steps)
        require_size(call, x.sizes, count, 1)
        positions += padded_dim(bucket, count)
    dims = [*x.dims[: first - 1], *static_dims([out.shape[first - 1]]), merged(positions) or static_dims([1])[0]]
    return result(out, dims, x.sizes).gradient_masked()


@table.register(*[op for op in CORE if "adaptive_avg" in op.__name__], aten.adaptive_max_pool1d, across=True)
def adaptive_pool(call: PaddedCall, x: PaddedValue, output_size: Sequence[int]) -> PyTree:
    """Pool to a single position as a reduction; more windows would depend on the true size."""
    if any(size != 1 for size in output_size):
        raise UnsupportedCall("its windows depend on the true size")
    if call.op.overloadpacket is aten.adaptive_max_pool1d:
        return run(aten.max.dim, (x, x.dim() - 1, True), {})
    return apply(aten.mean.dim, x, list(_pooled_dims(call, x)), True)


@table.register(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, across=True)
def max_pool(call: PaddedCall, x: PaddedValue) -> tuple[PaddedValue, PaddedValue]:
    """The maximum of each window, and its position in the unpadded image."""
    over = _pooled_dims(call, x)
    values, positions = call.dense({"self": x.filled(min_value(x.dense.dtype), over)})
    if any(x.is_padded(d) and math.prod(x.shape[over[0] : d]) > 1 for d in over[1:]):
        positions = unpadded_index(x, over, positions)
    return _pooled(call, x, values).gradient_masked(), _pooled(call, x, positions)


@table.register(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, across=True)
def average_pool(call: PaddedCall, x: PaddedValue, padding: Sequence[int], count_include_pad: bool) -> PaddedValue:
    """The mean of each window, with or without its border, as the caller asks."""
    over = _pooled_dims(call, x)
    if call.get("divisor_override") or (count_include_pad and not call["ceil_mode"]):
        out = call.dense({"self": x.filled(0, over)})
    elif count_include_pad and any(padding):
        raise UnsupportedCall("the size of the last window of ceil_mode depends on the true size")
    else:
        dtype, mask = arithmetic_dtype(x.dense.dtype), x.mask(over)
        ones = torch.ones_like(x.dense, dtype=dtype) if mask is None else mask.expand(x.shape).to(dtype)
        sums, counts = (call.dense({"self": t, "count_include_pad": True}) for t in (x.filled(0, over).to(dtype), ones))
        out = (sums / counts).to(x.dense.dtype)
    return _pooled(call, x, out).gradient_masked()


def _pooled_dims(call: PaddedCall, x: PaddedValue) -> range:
    return range(x.dim() - CORE[call.op.overloadpacket][0], x.dim())


def _pooled(call: PaddedCall, x: PaddedValue, out: Tensor) -> PaddedValue:
    over = _pooled_dims(call, x)
    options = [call["kernel_size"], call["stride"] or call["kernel_size"], call["padding"], call.get("dilation", 1)]
    windows = zip(*[_per_dim(option, len(over)) for option in options], strict=True)
    sizes = []
    for d, (kernel, stride, padding, dilation) in zip(over, windows, strict=True):
        size = prefix_size(x, d) if x.is_padded(d) else 0
        sizes.append(convolved(size, kernel, stride, padding, dilation, call["ceil_mode"]))
    return _resized(call, x, out, x.dims[: over.start], sizes)


def _per_dim(options: int | Sequence[int], rank: int) -> list[int]:
    listed = [options] if isinstance(options, int) else list(options)
    return listed * rank if len(listed) == 1 else listed


MAX_EXACT_DENOMINATOR = 1024
"""Scale factors are multiples of 1 / this: their products with sizes are exact in float64, in which torch computes."""


@table.register(*[op.vec for op in CORE if "upsample" in op.__name__ and not op.__name__.endswith("_aa")], across=True)
def interpolate(call: PaddedCall, input: PaddedValue, scale_factors: Sequence[float] | None) -> PaddedValue:
    """Resize by scale factors; a size would make the factor depend on the true size (`resampled`)."""
    if scale_factors is None or call.get("align_corners"):
        raise UnsupportedCall("its scale factor depends on the true size")
    x = extended = input
    sizes = []
    for d, factor in enumerate(scale_factors, start=2):
        parts = factor * MAX_EXACT_DENOMINATOR
        sizes.append(floor_divided(multiplied(prefix_size(x, d), int(parts)), MAX_EXACT_DENOMINATOR))
        if x.is_padded(d):
            if parts != int(parts):
                reason = f"the factor {factor} is no multiple of 1/{MAX_EXACT_DENOMINATOR}, and sizes are rounded"
                raise UnsupportedCall(reason)
            extended = pad_dim(extended, d, "replicate", 0, x.shape[d], static_dims([x.shape[d]])[0])
    return _resized(call, x, call.dense({"input": extended.dense}), x.dims[:2], sizes).gradient_masked()


MODES = {
    **dict.fromkeys(["nearest", "nearest-exact"], (1, 2, 3)),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}
"""The modes of `torch.nn.functional.interpolate`, and of how many dims each is."""

Taps = list[tuple[Tensor, Tensor | None]]
"""Positions that the outputs of a dim read, (bucket,) int64, and their shares; None for all of it."""


def resampled(
    x: PaddedValue, target: Sequence[int], mode: str, align_corners: bool | None, antialias: bool
) -> PaddedValue:
    """Interpolate the dims after the second to some sizes.

    Args:
        x: the value, (rows, channels, ...).
        target: the size of each of these dims, padded or not.
        mode, align_corners, antialias: as `torch.nn.functional.interpolate` takes them.

    Raises:
        UnsupportedCall: the sizes differ from row to row, or torch or no rule takes these options.
    """
    dtype, rank, is_nearest = x.dense.dtype, x.dim() - 2, mode.startswith("nearest")
    if rank != len(target) or rank not in MODES.get(mode, ()) or not (is_nearest or dtype.is_floating_point):
        raise UnsupportedCall(f"no rule interpolates {rank} dims of {dtype} by {mode} to {len(target)} padded sizes")
    if (is_nearest and align_corners is not None) or (antialias and mode not in ("bilinear", "bicubic")):
        raise UnsupportedCall(f"interpolation by {mode} has no such options")
    sizes = sizes_with(x.sizes, *target)
    if sizes is None or sizes.rows is not None:
        raise UnsupportedCall("sizes differ from row to row")
    x = replace(x.like(x.dense.to(arithmetic_dtype(dtype))), sizes=sizes)
    for d, size in enumerate(target, start=2):
        before = prefix_size(x, d) if x.is_padded(d) else true_expression(x.shape[d])
        after = true_expression(size)
        if 0 in (*sizes.each_on_host(before), *sizes.each_on_host(after)):
            raise UnsupportedCall("a size is 0")
        n_in, n_out = sizes.of(before), sizes.of(after)
        scale = _scale(n_in, n_out, torch.float32 if is_nearest else x.dense.dtype, bool(align_corners))
        at = torch.arange(int(size), device=scale.device).to(scale.dtype)
        factors = dim_of(size, sizes)
        if antialias:
            shares = _antialiased(at, torch.arange(x.shape[d], device=at.device), scale, n_in, mode)
            values = torch.movedim(x.filled(0, [d]), d, -1) @ shares.t()
            x = result(torch.movedim(values, -1, d), with_dim(x.dims, d, factors), sizes).gradient_masked()
            continue
        parts = []
        for position, share in _taps(at, scale, mode, bool(align_corners)):
            read = gather_along(x, d, torch.minimum(position.clamp(min=0), n_in - 1), factors)
            parts.append(read.dense if share is None else read.dense * share.view([-1] + [1] * (x.dim() - d - 1)))
        x = result(functools.reduce(torch.add, parts), with_dim(x.dims, d, factors), sizes)
    return x.like(x.dense.to(dtype).contiguous())


def _scale(n_in: Tensor, n_out: Tensor, dtype: torch.dtype, align_corners: bool) -> Tensor:
    """Return how many inputs an output is wide; torch computes it in float32 for nearest ones of float64, too."""
    before, after = n_in.to(dtype), n_out.to(dtype)
    return (before - 1) / (after - 1).clamp(min=1) if align_corners else before / after.clamp(min=1)


def _taps(at: Tensor, scale: Tensor, mode: str, align_corners: bool) -> Taps:
    if mode.startswith("nearest"):
        return [(((at + 0.5) * scale if mode == "nearest-exact" else at * scale).floor().long(), None)]
    centre = at * scale if align_corners else (at + 0.5) * scale - 0.5
    if mode != "bicubic":
        centre = centre.clamp(min=0)
    first = centre.floor()
    rest, position = centre - first, first.long()
    if mode == "bicubic":
        return [(position + k, _cubic((rest - k).abs(), -0.75)) for k in range(-1, 3)]
    return [(position, 1 - rest), (position + 1, rest)]


def _antialiased(at: Tensor, inputs: Tensor, scale: Tensor, n_in: Tensor, mode: str) -> Tensor:
    """Return the share of each input in each output, (bucket, inputs), of a filter as wide as an output."""
    is_linear = mode == "bilinear"
    width = scale.clamp(min=1)
    support = (1 if is_linear else 2) * width
    centre = ((at + 0.5) * scale).unsqueeze(1)
    first = (centre - support + 0.5).trunc().clamp(min=0)
    last = torch.minimum((centre + support + 0.5).trunc(), n_in.to(at.dtype))
    distance = ((inputs - centre + 0.5) / width).abs()
    share = (1 - distance).clamp(min=0) if is_linear else _cubic(distance, -0.5)
    share = torch.where((inputs >= first) & (inputs < last), share, 0)
    total = share.sum(1, keepdim=True)
    return share / torch.where(total == 0, 1, total)


def _cubic(x: Tensor, a: float) -> Tensor:
    """The weight of a tap at a distance, by cubic convolution."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))
