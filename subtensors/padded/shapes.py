"""The shape that a PaddedTensor reports: bucket sizes that know their true ones."""

from __future__ import annotations

import functools

import torch

from subtensors.dispatch.padded.padded_size import PaddedSize, text_of
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import Size, multiplied
from subtensors.padded import size_debug
from subtensors.padded.padded_tensor import PaddedTensor


def shape_of(x: PaddedTensor) -> torch.Size:
    """The bucket shape; see `PaddedSize`."""
    known = x._known_shape
    if known is not None and known[0] is x._dims and known[1] is x._sizes:
        return known[2]
    shape, sizes = x._dense.shape, x._sizes
    padded = _padded_sizes(x._dims) if sizes is not None else ()
    if sizes is None or not padded:
        return shape
    numbers: list[int] = [*shape]
    for d, size, text in padded:
        if type(shape[d]) is not int:
            return shape
        if size_debug.active_modes:
            numbers[d] = size_debug.WatchedSize.of(shape[d], size, sizes, f"dim {d} (true size {text})")
        else:
            # As its constructor does, without the call: models read many shapes.
            number = int.__new__(PaddedSize, shape[d])
            number.size, number.sizes, number.text = size, sizes, text
            numbers[d] = number
    shape = torch.Size(numbers)
    if not size_debug.active_modes:
        x._known_shape = x._dims, sizes, shape
    return shape


def numel_of(x: PaddedTensor, bucket: int) -> int:
    """The number of elements of the bucket, given; see `PaddedSize`."""
    sizes = x._sizes
    if sizes is None or type(bucket) is not int or sizes.rows is not None or not _padded_sizes(x._dims):
        return bucket
    size = multiplied(*map(size_of, x._dims))
    if size_debug.active_modes:
        return size_debug.WatchedSize.of(bucket, size, sizes, "all dims")
    return PaddedSize(bucket, size, sizes)


@functools.lru_cache(4096)
def _padded_sizes(dims: tuple[Factors, ...]) -> list[tuple[int, Size, str]]:
    """The padded dims with their true sizes, also as text; the rows of a ragged batch are all valid."""
    sizes = [(d, size_of(factors)) for d, factors in enumerate(dims) if is_padded(factors)]
    return [(d, size, text_of(size)) for d, size in sizes if size != rows_symbol()]
