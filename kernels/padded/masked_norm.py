"""Layer norm and rms norm of a padded tensor, forward and backward.

Over the `n` valid elements of a row of the normalized dimensions,

    layer norm: h = (x - mean) / sqrt(sum (x - mean)^2 / n + eps),   rms norm: h = x / sqrt(sum x^2 / n + eps),
    y = h * weight + bias,

and `fill` in padding. The contents of the padding never enter a result: neither a row whose normalized dimensions are
padded, nor the gradients of weight and bias, which are sums over the valid rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.padded.masked_layout import plan
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.kernels.runtime.launcher import cached_launcher, launching_on, multiprocessors
from subtensors.kernels.runtime.valid_lengths import ValidLength, valid_mask

MAX_ROW_LENGTH = 16384
"""The longest row that a program holds; the reference handles longer ones."""

WARPS_PER_MULTIPROCESSOR = 8
"""Warps of the backward for each multiprocessor; each program adds up the parameters' gradients of its rows."""


class Normed(NamedTuple):
    """A normalized tensor, and what its gradient needs.

    Args:
        y: the result, in the shape of the input.
        mean: the mean of each row, float32 (float64 for float64); zeros for rms norm and in padding.
        scale: the reciprocal of each row's divisor; zero in padding.
    """

    y: Tensor
    mean: Tensor
    scale: Tensor


def masked_norm_reference(
    x: Tensor, normalized: int, weight: Tensor | None, bias: Tensor | None, eps: float, lengths: Sequence[ValidLength],
    fill: float = 0.0, is_rms: bool = False,
) -> Normed:  # fmt: skip
    """Compute `masked_norm` in torch ops: the readable definition."""
    dims = range(x.dim() - normalized, x.dim())
    valid = valid_mask(x.shape, lengths, x.device).expand(x.shape)
    count = valid.sum(tuple(dims), keepdim=True).clamp(min=1)
    value = torch.where(valid, x.to(arithmetic_dtype(x.dtype)), 0)
    mean = torch.zeros_like(count, dtype=value.dtype) if is_rms else value.sum(tuple(dims), keepdim=True) / count
    centered = torch.where(valid, value - mean, 0)
    scale = (centered.square().sum(tuple(dims), keepdim=True) / count + eps).rsqrt()
    y = torch.where(valid, centered * scale, 0)  # in padding, the scale may be infinite
    y = y * weight if weight is not None else y
    y = y + bias if bias is not None else y
    row_lengths = [e for e in lengths if e.dim % x.dim() not in dims]
    in_rows = valid_mask(x.shape, row_lengths, x.device)
    shape = x.shape[: dims[0]]
    kept = [torch.where(in_rows, t, 0).reshape(shape) for t in (mean, scale)]
    return Normed(torch.where(valid, y, fill).to(x.dtype), *kept)


def masked_norm_backward_reference(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, normalized: int,
    lengths: Sequence[ValidLength], is_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `masked_norm_backward` in torch ops."""
    dims = tuple(range(x.dim() - normalized, x.dim()))
    valid = valid_mask(x.shape, lengths, x.device).expand(x.shape)
    count = valid.sum(dims, keepdim=True).clamp(min=1)
    mean, scale = (t.view(*t.shape, *[1] * normalized) for t in (mean, scale))
    unit = torch.where(valid, (x.to(mean.dtype) - mean) * scale, 0)
    g = torch.where(valid, gradient.to(mean.dtype), 0)
    u = g * weight.to(g.dtype) if weight is not None else g
    gx = u - unit * (u * unit).sum(dims, keepdim=True) / count
    gx = gx if is_rms else gx - u.sum(dims, keepdim=True) / count
    rows = tuple(range(dims[0]))
    weight_gradient, bias_gradient = ((g * unit).sum(rows), g.sum(rows)) if rows else (g * unit, g)
    return torch.where(valid, gx * scale, 0).to(x.dtype), weight_gradient, bias_gradient


def masked_norm_forward(
    x: Tensor, normalized: int, weight: Tensor | None, bias: Tensor | None, eps: float, lengths: Sequence[ValidLength],
    fill: float = 0.0, is_rms: bool = False,
) -> Normed:  # fmt: skip
    """Compute `masked_norm` with its kernel; raises CompilePending as `launcher` does."""
    dims = range(x.dim() - normalized, x.dim())
    if math.prod(x.shape[d] for d in dims) > MAX_ROW_LENGTH:
        return masked_norm_reference(x, normalized, weight, bias, eps, lengths, fill, is_rms)
    x, layout = plan(x.contiguous(), dims, lengths, whole_columns=True)
    y = torch.empty_like(x)
    means, scales = (x.new_empty(layout.row_shape, dtype=arithmetic_dtype(x.dtype)) for _ in range(2))
    if not x.numel():
        return Normed(y, means.zero_(), scales.zero_())
    block_rows, block_columns, num_warps = layout.whole_rows()
    cached_launcher("padded.masked_norm_kernel", "norm_kernel", has_reference=True)(
        layout.rows[0] * -(-layout.rows[1] // block_rows),
        (x, _contiguous_or(weight, x), _contiguous_or(bias, x), y, means, scales),
        layout.slot_arguments(lengths), layout.rows[1], layout.columns[1],
        STATICS=layout.statics, ROW_SLOTS=layout.row_slots, EPS=float(eps), FILL=float(fill), RMS=is_rms,
        WEIGHTED=weight is not None, BIASED=bias is not None, BM=block_rows, BN=block_columns, num_warps=num_warps,
    )  # fmt: skip
    return Normed(y, means, scales)


def masked_norm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, normalized: int,
    lengths: Sequence[ValidLength], is_rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `masked_norm` with its kernel.

    Args:
        gradient: the gradient of the result; its padding has no effect.
        x, weight, normalized, lengths, is_rms: as in the forward.
        mean, scale: results of the forward.

    Returns:
        The gradients of `x`, zero in padding, and in the dtype of the arithmetic those of weight and bias; the latter
        two are sums over the valid rows, of the normalized shape.
    """
    if math.prod(x.shape[x.dim() - normalized :]) > MAX_ROW_LENGTH:
        return masked_norm_backward_reference(gradient, x, mean, scale, weight, normalized, lengths, is_rms)
    x, layout = plan(x.contiguous(), range(x.dim() - normalized, x.dim()), lengths, whole_columns=True)
    gx = torch.empty_like(x)
    shape = x.shape[x.dim() - normalized :]
    block_rows, block_columns, num_warps = layout.whole_rows()
    tiles = layout.rows[0] * -(-layout.rows[1] // block_rows)
    programs = min(tiles, multiprocessors(x.device) * max(WARPS_PER_MULTIPROCESSOR // num_warps, 1))
    parts = [x.new_empty((programs, *shape), dtype=mean.dtype) for _ in range(2)]
    if not x.numel():
        return gx, parts[0].zero_().sum(0), parts[1].zero_().sum(0)
    from subtensors.kernels.padded.masked_norm_kernel import norm_backward_kernel

    # Without a weight, the parts are those for a weight of ones.
    with launching_on(x.device):
        norm_backward_kernel[(programs,)](
            gradient.contiguous(), x, x.new_ones(shape) if weight is None else weight.contiguous(), mean.contiguous(),
            scale.contiguous(), gx, *parts, layout.slot_arguments(lengths), tiles, layout.rows[1], layout.columns[1],
            layout.statics, layout.row_slots, is_rms, block_rows, block_columns, num_warps=num_warps,
        )  # fmt: skip
    return gx, parts[0].sum(0), parts[1].sum(0)


def _contiguous_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, contiguous; for None, a placeholder that the kernel does not read."""
    return other if tensor is None else tensor.contiguous()
