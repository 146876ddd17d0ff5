"""Ops that only move elements: concatenation, repetition, flips, and triangles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import PaddedSize, most, sizes_with
from subtensors.dispatch.padded.padded_value import PaddedValue, prefix_size, result
from subtensors.dispatch.padded.pointwise import broadcast, gradient_safe
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import bucket_of, merged, padded_dim, static, static_dims, with_dim
from subtensors.dispatch.sizes.expressions import added, multiplied

aten = torch.ops.aten


@table.register(aten.cat, aten.concat, aten.concatenate, across=True)
def cat(call: PaddedCall, tensors: Sequence[PaddedValue], dim: int) -> PaddedValue:
    """Concatenate along a padded dim: the valid parts follow each other, and the padding comes last."""
    parts = [x for x in tensors if list(x.shape) != [0]]
    d = dim % parts[0].dim()
    # Unlike in pointwise ops, a dim of size 1 does not broadcast here.
    except_d = [PaddedValue(x.dense, (*x.dims[:d], (static(1),), *x.dims[d + 1 :]), x.sizes) for x in parts]
    dims, sizes = broadcast(except_d)
    dense = []
    for x in parts:
        target = [*dims[:d], x.dims[d], *dims[d + 1 :]]
        dense.append(gradient_safe(x, target, [bucket_of(f) for f in target], sizes))
    joined = torch.cat(dense, d)
    true_sizes = [prefix_size(x, d) for x in parts]
    if any(size.has(rows_symbol()) for size in true_sizes):
        raise UnsupportedCall("it adds rows to a ragged batch")
    total = padded_dim(joined.shape[d], added(*true_sizes))
    unpacked = result(joined, [*dims[:d], total, *dims[d + 1 :]], sizes)
    if not any(x.is_padded(d) for x in parts[:-1]):
        return unpacked
    assert sizes is not None
    position = torch.arange(joined.shape[d], device=joined.device)
    index, valid_end, bucket_end = position, None, 0
    for x, size in zip(parts[:-1], true_sizes[:-1], strict=True):
        value = sizes.of_each(size)
        valid_end = value if valid_end is None else valid_end + value
        bucket_end += x.shape[d]
        end = valid_end.unsqueeze(-1) if valid_end.dim() else valid_end
        index = torch.where(position >= end, position - end + bucket_end, index)
    return gather_along(unpacked, d, index, total)


@table.register(aten.flip, aten.roll, across=True)
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
        size = x.size(d)
        assert isinstance(size, Tensor)
        size = size.unsqueeze(-1) if size.dim() else size
        position = torch.arange(x.shape[d], device=x.dense.device)
        index = size - 1 - position if is_flip else (position - shift) % size.clamp(min=1)
        x = gather_along(x, d, index, x.dims[d])
    return x


@table.register(aten.repeat, aten.tile, across=True)
def repeat(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Repeat the tensor along its dims."""
    times = list(call.get("repeats", call.get("dims")))
    times = [1] * (x.dim() - len(times)) + times
    added_dims = len(times) - x.dim()
    dense, dims = x.dense[(None,) * added_dims], [*static_dims([1] * added_dims), *x.dims]
    value = PaddedValue(dense, tuple(dims), x.sizes, x.fill)
    for d, count in enumerate(times):
        if isinstance(count, PaddedSize):
            if value.is_padded(d):
                raise UnsupportedCall("it repeats a padded dim by a padded size")
            again = [1] * value.dim()
            again[d] = int(count)
            sizes = sizes_with(value.sizes, count)
            size = multiplied(value.shape[d], count.size)
            if most(count.size, sizes) > count:
                raise UnsupportedCall(f"no bucket is known to hold {size}")
            out = value.dense.repeat(again)
            value = result(out, with_dim(value.dims, d, padded_dim(out.shape[d], size)), sizes, value.fill_if_shifted)
            continue
        if count == 1:
            continue
        if not value.is_padded(d):
            again = [1] * value.dim()
            again[d] = count
            out = value.dense.repeat(again)
            value = result(out, with_dim(value.dims, d, (static(out.shape[d]),)), value.sizes, value.fill)
            continue
        size = prefix_size(value, d)
        if size.has(rows_symbol()):
            raise UnsupportedCall("it repeats the rows of a ragged batch")
        true = value.size(d)
        assert isinstance(true, Tensor)
        bucket = value.shape[d] * count
        index = torch.arange(bucket, device=dense.device) % (true.unsqueeze(-1) if true.dim() else true).clamp(min=1)
        value = gather_along(value, d, index, padded_dim(bucket, multiplied(size, count)))
    return value


@table.register(aten.repeat_interleave.self_int, across=True)
def repeat_interleave(call: PaddedCall, x: PaddedValue, repeats: int, dim: int | None) -> PaddedValue:
    """Repeat each position of a dim several times in a row."""
    if dim is None and x.dim() != 1:
        raise UnsupportedCall("without a dim it flattens the tensor")
    d = (dim or 0) % x.dim()
    out = call.dense({"output_size": None})
    return result(out, with_dim(x.dims, d, merged([*x.dims[d], static(repeats)])), x.sizes, x.fill)


@table.register(aten.rot90, across=True)
def rot90(call: PaddedCall, x: PaddedValue, k: int, dims: Sequence[int]) -> PaddedValue:
    """Rotate two dims by right angles."""
    a, b = (d % x.dim() for d in dims)
    turns = k % 4
    if turns % 2:
        x = apply(aten.transpose.int, x, a, b)
    flipped = [[], [a], [a, b], [b]][turns]
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
            size = prefix_size(x, d)
            if size.has(rows_symbol()):
                raise UnsupportedCall("it repeats the rows of a ragged batch")
            dims[d] = padded_dim(out.shape[d], multiplied(size, upscale_factor))
    return result(out, dims, x.sizes, x.fill_if_shifted)


@table.register(aten.tril, aten.triu, across=True)
def triangle(call: PaddedCall, x: PaddedValue) -> PaddedValue:
    """Zero above or below a diagonal: positions count from the start, where the valid ones are."""
    return x.like(call.dense(), 0 if x.fill == 0 else None)
