"""One convention of positions: an index counts the valid positions of a dim, as it does in the unpadded program.

In a dim whose valid positions come first, an index names the same element of the unpadded data and of the storage. In
one that was flattened from several dims they lie scattered, and rules convert between the two with

    rank[j] = number of valid positions up to and including j

    dim (2, n), n = 3 of bucket 4    a b c . d e f .
    position in the bucket           0 1 2 3 4 5 6 7
    rank                             1 2 3 3 4 5 6 6
    valid position                   0 1 2   3 4 5

    bucket position of i = first j with rank[j] = i + 1        valid position of j = rank[j] - 1

Ranks come from the mask, so from true sizes on the device: nothing waits, and a captured graph serves every size. An
index that a program gets from elsewhere counts valid positions too, since that is what it means without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.offset_reads import rows_dim
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.sizes.dim_factors import is_prefix, merged, static_dims
from subtensors.dispatch.torch_internals.dispatcher import is_traced


def ranks(x: PaddedValue, d: int) -> Tensor | None:
    """Count the valid positions of a dim up to and including each.

    Args:
        x: the value.
        d: the dim.

    Returns:
        (bucket,) int64; None where the valid positions come first, so that both ways of counting agree.

    Raises:
        UnsupportedCall: the positions differ from row to row.
    """
    if not x.is_padded(d) or is_prefix(x.dims[d]) or x.sizes is None:
        return None
    keeps = x.sizes.serves_one_run or not x.sizes.is_captured
    key = ("ranks", x.dims[d])
    found = x.sizes.masks.get(key) if keeps else None
    if found is None:
        mask = x.mask([d])
        if mask is None:
            return None
        if mask.numel() != x.shape[d]:
            raise UnsupportedCall("the valid positions of its flattened dim differ from row to row")
        found = mask.reshape(-1).cumsum(0)
        if keeps:
            x.sizes.masks[key] = found
    return found


def in_bucket(x: PaddedValue, d: int, index: Tensor) -> Tensor:
    """Convert valid positions of a dim to positions in the bucket; those out of range get one beyond any slot.

    Args:
        x: the value that is indexed.
        d: the dim.
        index: positions, of any integer dtype.

    Raises:
        UnsupportedCall: the positions differ from row to row.
    """
    rank = ranks(x, d)
    if rank is None:
        return index
    found = torch.searchsorted(rank, (index.long() + 1).contiguous())
    return torch.where((index < 0) | (index >= rank[-1]), x.shape[d] + 1, found)


def in_valid(x: PaddedValue, d: int, positions: Tensor) -> Tensor:
    """Convert positions in the bucket, of valid elements, to valid positions of a dim; see `in_bucket`."""
    rank = ranks(x, d)
    return positions if rank is None else rank[positions] - 1


def counted_from_start(index: Tensor, end: Tensor | int, bucket: int) -> Tensor:
    """Count negative positions from the end; those before the start get one beyond the bucket, as an error of torch."""
    index = torch.where(index < 0, index + end, index)
    return torch.where(index < 0, bucket + 1, index)


def flattened(x: PaddedValue) -> PaddedValue:
    """Return a value with all dims in one, in which an index counts the elements of the unpadded tensor."""
    factors = merged([factor for dim in x.dims for factor in dim])
    flat = x.dense.reshape(-1)
    return PaddedValue(flat, (factors,) if factors else static_dims(flat.shape), x.sizes)


_watching: list[Callable[[str], None]] = []


@contextmanager
def checked_bounds(report: Callable[[str], None]) -> Iterator[None]:
    """Report positions beyond the true size inside the context.

    Args:
        report: called with a description.
    """
    _watching.append(report)
    try:
        yield
    finally:
        _watching.pop()


def check_bounds(x: PaddedValue, d: int, index: PaddedValue, ends: Tensor | int | None = None) -> None:
    """Report positions beyond the true size of a dim, in the debug mode and where values are known.

    Args:
        x: the indexed value.
        d: the dim.
        index: the positions.
        ends: the exclusive bound of each position, broadcastable to the index; by default the true size of the dim, for
            an index with the dims of `x`.
    """
    if not _watching or not x.is_padded(d) or is_traced(index.dense):
        return
    if index.dense.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if ends is None:
        ends = x.size(d)
        if isinstance(ends, Tensor) and ends.dim():
            ends = ends.view([-1 if e == rows_dim(x) else 1 for e in range(x.dim())])
    positions = index.filled(-1)
    beyond = positions >= ends
    if bool(beyond.any()):
        worst = int(positions[beyond.expand(positions.shape)].max())
        _watching[-1](f"position {worst} of dim {d} is padding: the true size there is less; count to x.count({d})")
