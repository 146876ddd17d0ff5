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
from subtensors.dispatch.padded.padded_value import PaddedValue, host_sizes, prefix_size, result
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.padded.views import select_row
from subtensors.dispatch.sizes.dim_factors import padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import Size, floor_divided, largest, smallest
from subtensors.dispatch.torch_internals.dispatcher import is_traced

aten = torch.ops.aten


@table.register(aten.split_with_sizes, aten.split_with_sizes_copy, aten.unsafe_split_with_sizes, aten.split.sizes,
                aten.split.default, aten.tensor_split.indices)  # fmt: skip
def split_at(call: PaddedCall) -> list[PaddedValue]:
    """Split at positions, or into sizes that add up to the bucket's; parts end at the true end."""
    x: PaddedValue = call["self"]
    d = call["dim"] % x.dim()
    part_sizes = call.get("split_sizes", call.get("split_size"))
    if not x.is_padded(d):
        return _static_parts(call, x, d)
    if part_sizes is not None and sum(part_sizes) != x.shape[d]:
        raise refuse(call, f"the sizes {list(part_sizes)} do not add up to the bucket's {x.shape[d]}")
    ends = list(itertools.accumulate(part_sizes))[:-1] if part_sizes is not None else list(call["indices"])
    bounds = [0, *ends, None]
    return [apply(aten.slice.Tensor, x, d, start, end) for start, end in itertools.pairwise(bounds)]


@table.register(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(call: PaddedCall) -> list[PaddedValue]:
    """Split into parts of one size, and a rest."""
    x: PaddedValue = call["self"]
    d, size = call["dim"] % x.dim(), call["split_size"]
    if not x.is_padded(d):
        return _static_parts(call, x, d)
    _refuse_rows(call, x, d)
    count = _same_for_all(call, x, d, [max(-(-n // size), 1) if size else 1 for n in _known(call, x, d)])
    return [apply(aten.slice.Tensor, x, d, i * size, (i + 1) * size) for i in range(count)]


@table.register(aten.chunk, aten.unsafe_chunk)
def chunk(call: PaddedCall) -> list[PaddedValue]:
    """Split into at most this many parts of one size; the last may be smaller."""
    x: PaddedValue = call["self"]
    d, chunks = call["dim"] % x.dim(), call["chunks"]
    if not x.is_padded(d):
        return _static_parts(call, x, d)
    _refuse_rows(call, x, d)
    counts = [-(-n // -(-n // chunks)) if n else chunks for n in _known(call, x, d)]
    true_size = prefix_size(x, d)
    size = floor_divided(true_size + chunks - 1, chunks)
    parts = range(_same_for_all(call, x, d, counts))
    return [_part(x, d, i * size, smallest(size, largest(0, true_size - i * size)), chunks) for i in parts]


@table.register(aten.tensor_split.sections)
def sections(call: PaddedCall) -> list[PaddedValue]:
    """Split into this many parts, of which the first ones may be one longer."""
    x: PaddedValue = call["self"]
    d, count = call["dim"] % x.dim(), call["sections"]
    if not x.is_padded(d):
        return _static_parts(call, x, d)
    _refuse_rows(call, x, d)
    true_size = prefix_size(x, d)
    min_size = floor_divided(true_size, count)
    starts = [i * min_size + smallest(i, true_size - count * min_size) for i in range(count)]
    return [
        _part(x, d, start, floor_divided(true_size + count - 1 - i, count), count) for i, start in enumerate(starts)
    ]


@table.register(aten.unbind, aten.unbind_copy)
def unbind(call: PaddedCall) -> list[PaddedValue]:
    """Select each index of a dim."""
    x: PaddedValue = call["self"]
    d = call["dim"] % x.dim()
    if not x.is_padded(d):
        dims = [factors for i, factors in enumerate(x.dims) if i != d]
        return [result(part, dims, x.sizes, x.fill) for part in call.dense()]
    if prefix_size(x, d) == rows_symbol():
        return [select_row(x, d, index) for index in range(x.shape[d])]
    return [apply(aten.select.int, x, d, i) for i in range(_same_for_all(call, x, d, _known(call, x, d)))]


def _static_parts(call: PaddedCall, x: PaddedValue, d: int) -> list[PaddedValue]:
    return [
        result(part, [*x.dims[:d], *static_dims([part.shape[d]]), *x.dims[d + 1 :]], x.sizes, x.fill)
        for part in call.dense()
    ]


def _part(x: PaddedValue, d: int, start: Size, size: Size, parts: int) -> PaddedValue:
    """Return one of `parts` parts of a dim, from the index `start` on."""
    assert x.sizes is not None
    longest = -(-x.shape[d] // parts)
    return take_range(x, d, x.sizes.of_each(start), longest, padded_dim(longest, size))


def _known(call: PaddedCall, x: PaddedValue, d: int) -> list[int]:
    """Return the true sizes of a dim; raise DataDependentCall if the host doesn't know them."""
    sizes = None if is_traced(x.dense) or needs_host(x.dense, call.op.name()) else host_sizes(x, d)
    if sizes is None:
        raise refuse(call, "the number of parts would depend on the true size", DataDependentCall)
    return sizes


def _same_for_all(call: PaddedCall, x: PaddedValue, d: int, counts: Sequence[int]) -> int:
    if len(set(counts)) > 1:
        raise refuse(call, "the number of parts differs from row to row")
    return counts[0]


def _refuse_rows(call: PaddedCall, x: PaddedValue, d: int) -> None:
    if prefix_size(x, d).has(rows_symbol()):
        raise refuse(call, "it splits the rows of a ragged batch")
