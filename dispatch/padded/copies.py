"""Ops that only move elements: concatenation, repetition, flips, triangles, and borders around the valid part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.ops import view_dims
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.tree import tree_has
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, require_size, table
from subtensors.dispatch.padded.padded_size import PaddedSize, least, most, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result, size_in_rows
from subtensors.dispatch.padded.pointwise import broadcast, gradient_safe
from subtensors.dispatch.padded.positions import gather_along
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import (
    Factors,
    merged,
    padded_dim,
    size_of,
    static,
    static_dims,
    with_dim,
)  # fmt: skip
from subtensors.dispatch.sizes.expressions import added, largest, multiplied

aten = torch.ops.aten


def _true_end(x: PaddedValue, d: int) -> Tensor | int:
    """Return the true size of a dim: an int, () or, to broadcast against positions, (rows, 1)."""
    size = x.size(d)
    return size.unsqueeze(-1) if isinstance(size, Tensor) and size.dim() else size


@table.register(aten.cat, aten.concat, aten.concatenate, across=True)
def cat(call: PaddedCall, tensors: Sequence[PaddedValue], dim: int) -> PaddedValue:
    """Concatenate along a padded dim: the valid parts follow each other, and the padding comes last."""
    parts = [x for x in tensors if list(x.shape) != [0]]
    d = dim % parts[0].dim()
    # Unlike in pointwise ops, a dim of size 1 does not broadcast here.
    except_d = [PaddedValue(x.dense, tuple(with_dim(x.dims, d, (static(1),))), x.sizes) for x in parts]
    dims, sizes = broadcast(except_d)
    targets = [with_dim(dims, d, x.dims[d]) for x in parts]
    dense = [gradient_safe(x, t, sizes) for x, t in zip(parts, targets, strict=True)]
    joined = torch.cat(dense, d)
    total = padded_dim(joined.shape[d], added(*(size_in_rows(x, d) for x in parts)))
    unpacked = result(joined, with_dim(dims, d, total), sizes)
    if not any(x.is_padded(d) for x in parts[:-1]):
        return unpacked
    position = torch.arange(joined.shape[d], device=joined.device)
    index, valid_end, bucket_end = position, None, 0
    for x in parts[:-1]:
        end = _true_end(x, d)
        valid_end = end if valid_end is None else valid_end + end
        bucket_end += x.shape[d]
        index = torch.where(position >= valid_end, position - valid_end + bucket_end, index)
    return gather_along(unpacked, d, index, total)


@table.register(view_dims.reorder, across=True)
def flip_or_roll(call: PaddedCall, x: PaddedValue, dims: Sequence[int], shifts: Sequence[int] = ()) -> PaddedValue:
    """Reorder the valid positions of a padded dim, and all of any other."""
    is_flip = call.op is aten.flip.default
    if not dims:
        raise UnsupportedCall("without dims it rolls the flattened tensor")
    for d, shift in zip([d % x.dim() for d in dims], shifts or [0] * len(dims), strict=True):
        if not x.is_padded(d):
            x = x.like(x.dense.flip(d) if is_flip else x.dense.roll(shift, d), x.fill)
            continue
        prefix_size(x, d)
        size = torch.as_tensor(_true_end(x, d))
        position = torch.arange(x.shape[d], device=x.dense.device)
        x = gather_along(x, d, size - 1 - position if is_flip else (position - shift) % size.clamp(min=1), x.dims[d])
    return x


@table.register(view_dims.repeat, across=True)
def repeat(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Repeat the tensor along its dims."""
    times = list(call.get("repeats", call.get("dims")))
    times = [1] * (x.dim() - len(times)) + times
    new = len(times) - x.dim()
    value = PaddedValue(x.dense[(None,) * new], (*static_dims([1] * new), *x.dims), x.sizes, x.fill)
    for d, count in enumerate(times):
        if not isinstance(count, PaddedSize) and count == 1:
            continue
        sizes, size, own = sizes_with(value.sizes, count), true_expression(count), value.dims[d]
        if size_of(own).has(rows_symbol()):
            raise UnsupportedCall("it repeats the rows of a ragged batch")
        if most(size, sizes) > count:
            raise UnsupportedCall(f"no bucket is known to hold {multiplied(size, size_of(own))}")
        out = value.dense.repeat([int(count) if e == d else 1 for e in range(value.dim())])
        # The padding of a padded number of copies holds values.
        fill = value.fill if size.is_Integer else None
        value = result(out, with_dim(value.dims, d, merged([*padded_dim(int(count), size), *own])), sizes, fill)
    return value


@table.register(aten.rot90, across=True)
def rot90(call: PaddedCall, x: PaddedValue, k: int, dims: Sequence[int]) -> PaddedValue:
    """Rotate two dims by right angles."""
    a, b = (d % x.dim() for d in dims)
    if k % 2:
        x = apply(aten.transpose.int, x, a, b)
    flipped = [[], [a], [a, b], [b]][k % 4]
    return apply(aten.flip.default, x, flipped)


@table.register(aten.diag_embed, across=True)
def diag_embed(call: PaddedCall, x: PaddedValue, offset: int, dim1: int, dim2: int) -> PaddedValue:
    """Put the last dim on a diagonal of two new last dims, with zeros around it."""
    if [dim1 % (x.dim() + 1), dim2 % (x.dim() + 1)] != [x.dim() - 1, x.dim()]:
        raise UnsupportedCall("its diagonal is not of the last dims")
    out = call.dense()
    side = padded_dim(out.shape[-1], prefix_size(x, x.dim() - 1) + abs(offset))
    return result(out, [*x.dims[:-1], side, side], x.sizes).gradient_masked()


@table.register(aten.pixel_shuffle.default, across=True)
def pixel_shuffle(call: PaddedCall, x: PaddedValue, upscale_factor: int) -> PaddedValue:
    """Lay channels side by side in an image that is `upscale_factor` times as high and wide."""
    channels = x.dim() - 3
    if x.is_padded(channels):
        raise UnsupportedCall("the channels are padded")
    out = call.dense()
    dims = [*x.dims[:channels], *static_dims(out.shape[channels:])]
    for d in (channels + 1, channels + 2):
        if x.is_padded(d):
            dims[d] = padded_dim(out.shape[d], multiplied(size_in_rows(x, d), upscale_factor))
    return result(out, dims, x.sizes, x.fill_if_shifted)


@table.register(view_dims.triangle, across=True)
def triangle(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Zero above or below a diagonal: positions count from the start, where the valid ones are."""
    return x.like(call.dense(), 0 if x.fill == 0 else None)


@table.register(aten.constant_pad_nd, aten.pad)
def bordered(
    call: PaddedCall, x: PaddedValue, padding: Sequence[int], value: float | None, mode: str = "constant"
) -> PaddedValue:
    """Pad the valid part; a constant fills the padding too, so that the border follows the true end."""
    widths = list(padding)
    if mode != "constant":
        if tree_has(PaddedSize, widths):
            raise UnsupportedCall("a border of values is as wide as a padded size")
        return _bordered_by_values(call, x, mode, widths)
    value = 0 if value is None else value  # -0.0 is another number than 0
    dims, sizes, touched = list(x.dims), sizes_with(x.sizes, *widths), []
    for i, (left, right) in enumerate(zip(padding[::2], padding[1::2], strict=False)):
        d = x.dim() - 1 - i
        bucket = x.shape[d] + int(left) + int(right)
        if isinstance(left, PaddedSize):
            raise UnsupportedCall("where the first valid position lies depends on a padded size")
        if isinstance(right, PaddedSize):
            size = size_in_rows(x, d) + left + right.size
            if left < 0 or least(right.size, sizes) < 0:
                raise UnsupportedCall("it cuts positions off")
            bucket = max(most(size, sizes), x.shape[d] + left)
            widths[2 * i + 1] = bucket - x.shape[d] - left
        elif not x.is_padded(d):
            dims[d] = (static(bucket),)
            continue
        elif left or right:
            size = size_in_rows(x, d) + left + right
            if cut := max(-left, 0) + max(-right, 0):
                require_size(call, sizes, size_in_rows(x, d), cut)
                size = largest(0, size)
        else:
            continue
        touched.append(d)
        dims[d] = padded_dim(bucket, size)
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


def _bordered_by_values(call: PaddedCall, x: PaddedValue, mode: str, widths: Sequence[int]) -> PaddedValue:
    """Pad with values of the valid part, one dim after the other."""
    if mode != "circular" and x.dense.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # Autocast runs these modes in float32 on a CPU.
        x = x.like(x.dense.float()) if x.dense.dtype in (torch.float16, torch.bfloat16) else x
    for i, (left, right) in enumerate(zip(widths[::2], widths[1::2], strict=False)):
        d = x.dim() - 1 - i
        if mode == "circular" and min(left, right) < 0:
            # Positions that are cut off do not wrap around.
            x = apply(aten.slice.Tensor, x, d, max(-left, 0), min(right, 0) or None)
            left, right = max(left, 0), max(right, 0)
        if not (left or right):
            continue
        size = size_in_rows(x, d)
        if mode in _MAX_EXCESS:
            require_size(call, x.sizes, size, max(left, right) - _MAX_EXCESS[mode])
        bucket = x.shape[d] + left + right
        dims: Factors = padded_dim(bucket, size + left + right) if x.is_padded(d) else static_dims([bucket])[0]
        x = pad_dim(x, d, mode, left, bucket, dims)
    return x


def pad_dim(x: PaddedValue, d: int, mode: str, left: int, bucket: int, factors: Factors) -> PaddedValue:
    """Pad one dim with values of its valid part, `left` positions before the first and up to `bucket` in all.

    The factors are the dim of the result, whose valid positions may be more than the true size.
    """
    position = torch.arange(bucket, device=x.dense.device) - left
    return gather_along(x, d, _SOURCE_POSITION[mode](position, _true_end(x, d)), factors)
