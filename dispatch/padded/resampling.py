"""Interpolation to a size that is padded, or of one, where the scale is a quotient of true sizes.

Each dim of m positions is resized to n in turn. Both are true sizes on the device, so one captured graph serves all of
them. An output reads a few inputs, its taps, each with a share, as torch computes them:

    nearest    x[floor(i m / n)]
    linear     x[j] (1 - t) + x[j + 1] t      j + t = max((i + 1/2) m / n - 1/2, 0)
    cubic      four inputs around (i + 1/2) m / n - 1/2

An antialiased filter grows with m / n, so it reads any number of inputs: it is a product with a matrix of shares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import dim_of, sizes_with, true_expression, value_at
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.sizes.dim_factors import with_dim
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

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
        if sizes.known_on_host and 0 in (value_at(n, sizes.assignment()) for n in (before, after)):
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
