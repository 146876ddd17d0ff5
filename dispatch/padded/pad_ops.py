"""The pad ops: a border around the valid part, of a constant or of values next to the border."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subtensors.dispatch.ops.tree import tree_has
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import PaddedSize, least, most, sizes_with
from subtensors.dispatch.padded.padded_value import PaddedValue, host_sizes, prefix_size, result
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, padded_dim, static, static_dims
from subtensors.dispatch.sizes.expressions import largest

aten = torch.ops.aten


@table.register(aten.constant_pad_nd, aten.pad)
def bordered(call: PaddedCall) -> PaddedValue:
    """Pad the valid part; a constant fills the padding too, so that the border follows the true end."""
    x: PaddedValue = call["self"]
    widths = list(call["pad"])
    if call.get("mode", "constant") != "constant":
        if tree_has(PaddedSize, widths):
            raise UnsupportedCall("a border of values is as wide as a padded size")
        return _pad_from_values(call, x)
    value = call["value"] or 0
    dims = list(x.dims)
    sizes = sizes_with(x.sizes, *widths)
    touched = []
    for i in range(len(widths) // 2):
        d = x.dim() - 1 - i
        left, right = widths[2 * i], widths[2 * i + 1]
        if isinstance(left, PaddedSize):
            raise UnsupportedCall("where the first valid position lies depends on a padded size")
        if isinstance(right, PaddedSize):
            size = prefix_size(x, d) + left + right.size
            if size.has(rows_symbol()) or left < 0 or least(right.size, sizes) < 0:
                raise UnsupportedCall("it cuts positions off, or adds rows to a ragged batch")
            touched.append(d)
            dims[d] = padded_dim(max(most(size, sizes), x.shape[d] + left), size)
            widths[2 * i + 1] = bucket_of(dims[d]) - x.shape[d] - left
            continue
        bucket = x.shape[d] + left + right
        if not x.is_padded(d):
            dims[d] = (static(bucket),)
        elif left or right:
            size = prefix_size(x, d)
            if size.has(rows_symbol()):
                raise UnsupportedCall("it adds rows to a ragged batch")
            touched.append(d)
            dims[d] = padded_dim(
                bucket, largest(0, size + left + right) if min(left, right) < 0 else size + left + right
            )
    dense = x.filled(value, touched) if touched else x.dense
    out = torch.constant_pad_nd(dense, widths, value)
    padded = result(out, dims, sizes, x.fill if x.fill == value and not touched else None)
    # With a negative width, valid positions of the input become padding of the result, without a gradient.
    return padded.gradient_masked() if touched else padded


# The source of position p of a border, for a true size of n.
_SOURCE_POSITION: dict[str, Callable[[Tensor, Tensor | int], Tensor]] = {
    "replicate": lambda p, n: p.clamp(min=0).minimum(torch.as_tensor(n - 1, device=p.device)),
    "reflect": lambda p, n: (n - 1) - ((n - 1) - p.abs()).abs(),
    "circular": lambda p, n: p % n,
}
# The most that a border may exceed the dim's size by.
_MAX_EXCESS = {"reflect": -1, "circular": 0}


def _pad_from_values(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Pad with values of the valid part, one dim after the other."""
    mode, widths = call["mode"], list(call["pad"])
    if mode != "circular" and x.dense.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # Autocast runs these modes in float32 on a CPU.
        x = x.like(x.dense.float()) if x.dense.dtype in (torch.float16, torch.bfloat16) else x
    for i in range(len(widths) // 2):
        d = x.dim() - 1 - i
        left, right = widths[2 * i], widths[2 * i + 1]
        if mode == "circular" and min(left, right) < 0:
            # Positions that are cut off do not wrap around.
            x = apply(aten.slice.Tensor, x, d, max(-left, 0), min(right, 0) or None)
            left, right = max(left, 0), max(right, 0)
        if not (left or right):
            continue
        size = prefix_size(x, d)
        if size.has(rows_symbol()):
            raise UnsupportedCall("it adds rows to a ragged batch")
        for n in host_sizes(x, d) or [x.shape[d]]:
            if mode in _MAX_EXCESS and max(left, right) > n + _MAX_EXCESS[mode]:
                raise RuntimeError(f"a border of {max(left, right)} by {mode} is wider than a dim of {n} allows")
        bucket = x.shape[d] + left + right
        dims: Factors = padded_dim(bucket, size + left + right) if x.is_padded(d) else static_dims([bucket])[0]
        x = pad_dim(x, d, mode, left, bucket, dims)
    return x


def pad_dim(x: PaddedValue, d: int, mode: str, left: int, bucket: int, factors: Factors) -> PaddedValue:
    """Pad one dim with values of its valid part.

    Args:
        x: the value.
        d: the dim.
        mode: "replicate", "reflect" or "circular".
        left: how many positions come before the first.
        bucket: how many there are in all.
        factors: the dim of the result, whose valid positions may be more than the true size.
    """
    n = x.size(d)
    position = torch.arange(bucket, device=x.dense.device) - left
    if isinstance(n, Tensor) and n.dim():
        n = n.unsqueeze(-1)
    return gather_along(x, d, _SOURCE_POSITION[mode](position, n), factors)
