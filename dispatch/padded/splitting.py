"""Splits of a dim: at positions, into parts of a size, or into a number of parts.

Parts of a padded dim are slices, whose sizes are expressions. If their number depends on the true size, the host has to
know it, and in a ragged batch it has to be the same for every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from subtensors.dispatch.graphs.host_reads import needs_host
from subtensors.dispatch.padded.errors import DataDependentCall
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, refuse, table
from subtensors.dispatch.padded.offset_reads import take_range
from subtensors.dispatch.padded.padded_value import PaddedValue, host_sizes, prefix_size
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.padded.views import select_row
from subtensors.dispatch.sizes.dim_factors import padded_dim
from subtensors.dispatch.sizes.expressions import Size, floor_divided, largest, smallest
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


@table.register(aten.split_with_sizes, aten.split_with_sizes_copy, aten.unsafe_split_with_sizes, aten.split.sizes,
                aten.split.default, across=True)  # fmt: skip
def split_into(call: PaddedCall, x: PaddedValue, dim: int) -> list[PaddedValue]:
    """Split into sizes that add up to the bucket's; the last part ends at the true end."""
    sizes: Sequence[int] = call.get("split_sizes", call.get("split_size"))
    if sum(sizes) != x.shape[dim]:
        raise refuse(call, f"the sizes {list(sizes)} do not add up to the bucket's {x.shape[dim]}")
    return split_at(call, x, dim, list(itertools.accumulate(sizes))[:-1])


@table.register(aten.tensor_split.indices, across=True)
def split_at(call: PaddedCall, x: PaddedValue, dim: int, indices: Sequence[int]) -> list[PaddedValue]:
    """Split at positions; parts end at the true end."""
    bounds = [0, *indices, None]
    return [apply(aten.slice.Tensor, x, dim, start, end) for start, end in itertools.pairwise(bounds)]


@table.register(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor, across=True)
def split(call: PaddedCall, x: PaddedValue, dim: int, split_size: int) -> list[PaddedValue]:
    """Split into parts of one size, and a rest."""
    _refuse_rows(call, x, dim)
    counts = [max(-(-n // split_size), 1) if split_size else 1 for n in _known(call, x, dim)]
    starts = [i * split_size for i in range(_same_for_all(call, counts))]
    return [apply(aten.slice.Tensor, x, dim, start, start + split_size) for start in starts]


@table.register(aten.chunk, aten.unsafe_chunk, across=True)
def chunk(call: PaddedCall, x: PaddedValue, dim: int, chunks: int) -> list[PaddedValue]:
    """Split into at most this many parts of one size; the last may be smaller."""
    _refuse_rows(call, x, dim)
    counts = [-(-n // -(-n // chunks)) if n else chunks for n in _known(call, x, dim)]
    true_size = prefix_size(x, dim)
    size = floor_divided(true_size + chunks - 1, chunks)
    parts = range(_same_for_all(call, counts))
    return [_part(x, dim, i * size, smallest(size, largest(0, true_size - i * size)), chunks) for i in parts]


@table.register(aten.tensor_split.sections, across=True)
def sections(call: PaddedCall, x: PaddedValue, dim: int, sections: int) -> list[PaddedValue]:
    """Split into this many parts, of which the first ones may be one longer."""
    _refuse_rows(call, x, dim)
    true_size = prefix_size(x, dim)
    min_size = floor_divided(true_size, sections)
    starts = [i * min_size + smallest(i, true_size - sections * min_size) for i in range(sections)]
    sizes = [floor_divided(true_size + sections - 1 - i, sections) for i in range(sections)]
    return [_part(x, dim, start, size, sections) for start, size in zip(starts, sizes, strict=True)]


@table.register(aten.unbind, aten.unbind_copy, across=True)
def unbind(call: PaddedCall, x: PaddedValue, dim: int) -> list[PaddedValue]:
    """Select each index of a dim."""
    if prefix_size(x, dim) == rows_symbol():
        return [select_row(x, dim % x.dim(), index) for index in range(x.shape[dim])]
    return [apply(aten.select.int, x, dim, i) for i in range(_same_for_all(call, _known(call, x, dim)))]


def _part(x: PaddedValue, dim: int, start: Size, size: Size, parts: int) -> PaddedValue:
    """Return one of `parts` parts of a dim, from the index `start` on."""
    assert x.sizes is not None
    d = dim % x.dim()
    longest = -(-x.shape[d] // parts)
    return take_range(x, d, x.sizes.of_each(start), longest, padded_dim(longest, size))


def _known(call: PaddedCall, x: PaddedValue, d: int) -> list[int]:
    """Return the true sizes of a dim; raise DataDependentCall if the host doesn't know them."""
    sizes = None if is_traced(x.dense) or needs_host(x.dense, call.op.name()) else host_sizes(x, d)
    if sizes is None:
        raise refuse(call, "the number of parts would depend on the true size", DataDependentCall)
    return sizes


def _same_for_all(call: PaddedCall, counts: Sequence[int]) -> int:
    if len(set(counts)) > 1:
        raise refuse(call, "the number of parts differs from row to row")
    return counts[0]


def _refuse_rows(call: PaddedCall, x: PaddedValue, d: int) -> None:
    if prefix_size(x, d).has(rows_symbol()):
        raise refuse(call, "it splits the rows of a ragged batch")
