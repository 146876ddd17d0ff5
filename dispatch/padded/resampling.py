"""Interpolation to a size that is padded, or of one, where the scale is a quotient of true sizes.

Each dim is a product with a matrix of weights, of which a row has torch's own taps:

    out[i] = sum over j of weight[i, j] x[j]        centre of i = (i + 1/2) n_in / n_out - 1/2

The matrix is made on the device, from true sizes, so one captured graph serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.padded_size import PaddedSize, dim_of, sizes_with
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.sizes.dim_factors import with_dim
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

LINEAR = ("linear", "bilinear", "trilinear")
NEAREST = ("nearest", "nearest-exact")


def resampled(x: PaddedValue, size: Sequence[int], mode: str, align_corners: bool, antialias: bool) -> PaddedValue:
    """Interpolate the dims after the second to some sizes.

    Args:
        x: the value, (rows, channels, ...).
        size: one a dim, padded or not.
        mode, align_corners, antialias: as `torch.nn.functional.interpolate` takes them.

    Raises:
        UnsupportedCall: the sizes differ from row to row, or the mode has no rule.
    """
    if mode not in (*LINEAR, *NEAREST, "bicubic") or len(size) != x.dim() - 2:
        raise UnsupportedCall(f"no rule interpolates by {mode} to padded sizes")
    dtype = x.dense.dtype
    wide = arithmetic_dtype(dtype)
    for i, n in enumerate(size):
        d = i + 2
        sizes = sizes_with(x.sizes, n)
        if sizes is None or sizes.rows is not None:
            raise UnsupportedCall("sizes differ from row to row")
        if x.is_padded(d):
            prefix_size(x, d)
        out_size = n.on_device() if isinstance(n, PaddedSize) else torch.full((), n, device=x.dense.device)
        in_size = torch.as_tensor(x.size(d), device=x.dense.device)
        positions = torch.arange(x.shape[d], device=x.dense.device)
        weight = _weights(int(n), positions, out_size, in_size, wide, mode, align_corners, antialias)
        values = torch.movedim(x.filled(0, [d]).to(wide), d, -1) @ weight.t()
        dims = with_dim(x.dims, d, dim_of(n, sizes))
        x = result(torch.movedim(values, -1, d), dims, sizes).gradient_masked()
    return x.like(x.dense.to(dtype).contiguous())


def _weights(
    bucket: int,
    inputs: Tensor,
    out_size: Tensor,
    in_size: Tensor,
    dtype: torch.dtype,
    mode: str,
    align_corners: bool,
    antialias: bool,
) -> Tensor:
    """The weight of each input, (bucket, inputs), in each output."""
    at = torch.arange(bucket, device=inputs.device).to(dtype)
    n_in, n_out = in_size.to(dtype), out_size.to(dtype).clamp(min=1)
    scale = (n_in - 1) / (n_out - 1).clamp(min=1) if align_corners else n_in / n_out
    if mode in NEAREST:
        nearest = ((at + 0.5) * scale if mode == "nearest-exact" else at * scale).floor().long()
        return (nearest.minimum(in_size - 1).unsqueeze(1) == inputs).to(dtype)
    if antialias:
        return _antialiased(at, inputs.to(dtype), scale, n_in, mode)
    centre = at * scale if align_corners else (at + 0.5) * scale - 0.5
    if mode in LINEAR:
        centre = centre.clamp(min=0)
    first = centre.floor()
    rest = centre - first
    taps = {0: 1 - rest, 1: rest} if mode in LINEAR else {k: _cubic((rest - k).abs(), -0.75) for k in range(-1, 3)}
    weight = torch.zeros(bucket, inputs.numel(), dtype=dtype, device=inputs.device)
    for k, share in taps.items():
        tap = (first.long() + k).clamp(min=0).minimum(in_size - 1)
        weight = weight + torch.where(tap.unsqueeze(1) == inputs, share.unsqueeze(1), 0)
    return weight


def _antialiased(at: Tensor, inputs: Tensor, scale: Tensor, n_in: Tensor, mode: str) -> Tensor:
    """Weights of a filter that is as wide as an output is in inputs."""
    width = scale.clamp(min=1)
    support = (1 if mode in LINEAR else 2) * width
    centre = ((at + 0.5) * scale).unsqueeze(1)
    first = (centre - support + 0.5).trunc().clamp(min=0)
    last = (centre + support + 0.5).trunc().minimum(n_in)
    distance = ((inputs - centre + 0.5) / width).abs()
    share = (1 - distance).clamp(min=0) if mode in LINEAR else _cubic(distance, -0.5)
    share = torch.where((inputs >= first) & (inputs < last), share, 0)
    total = share.sum(1, keepdim=True)
    return share / torch.where(total == 0, 1, total)


def _cubic(x: Tensor, a: float) -> Tensor:
    """The weight of a tap at a distance, by cubic convolution."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))
