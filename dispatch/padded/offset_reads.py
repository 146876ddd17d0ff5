"""Reads of a dim at offsets that depend on the true size, as shifts, flips and concatenations need."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of


def take_range(
    x: PaddedValue, dim: int, first: Tensor | int, count: int, factors: Factors, step: int = 1
) -> PaddedValue:
    """Copy `count` positions of a dim from `first` on, a step apart; the result is marked as a copied view.

    Args:
        x: the value.
        dim: the dim.
        first: () or (rows,) int64, the position of the first.
        count: the number of positions; those beyond the end are padding.
        factors: the dim of the result.
    """
    steps = torch.arange(count, device=x.dense.device) * step
    start = torch.as_tensor(first, device=x.dense.device)
    found = gather_along(x, dim, start.unsqueeze(-1) + steps if start.dim() else start + steps, factors)
    return replace(found, view="copy")


def gather_along(x: PaddedValue, dim: int, index: Tensor, factors: Factors) -> PaddedValue:
    """Read the positions of a dim that an index gives; positions out of range read padding.

    Args:
        x: the value.
        dim: the dim.
        index: (count,) or, for a ragged batch, (rows, count) int64.
        factors: the dim of the result.
    """
    index = index.clamp(0, x.shape[dim] - 1)
    if index.dim() == 1:
        out = x.dense.index_select(dim, index)
    else:
        rows, outer, inner = _rows_position(x)
        # A dim flattened with heads, say, has each row once a head.
        index = index.repeat_interleave(inner, 0).repeat(outer, 1)
        shape = [1] * x.dim()
        shape[rows], shape[dim] = index.shape
        if dim < rows:
            index = index.t()
        target = list(x.shape)
        target[dim] = shape[dim]
        out = x.dense.gather(dim, index.reshape(shape).expand(target))
    dims = [*x.dims[:dim], factors, *x.dims[dim + 1 :]]
    # Several padded positions may read one valid position, and would add their gradients to it.
    return result(out, dims, x.sizes).gradient_masked()


def rows_dim(x: PaddedValue) -> int:
    """The dim of a ragged batch's rows."""
    for d, factors in enumerate(x.dims):
        if len(factors) == 1 and factors[0].size == rows_symbol():
            return d
    raise UnsupportedCall("the rows of this ragged batch are part of a flattened dim")


def _rows_position(x: PaddedValue) -> tuple[int, int, int]:
    """Return the dim of a ragged batch's rows, and the number of indices outside of the rows and within each."""
    for d, factors in enumerate(x.dims):
        at = next((i for i, factor in enumerate(factors) if factor.size == rows_symbol()), None)
        if at is not None and all(factor.is_static for factor in factors if factor.size != rows_symbol()):
            return d, bucket_of(factors[:at]), bucket_of(factors[at + 1 :])
    raise UnsupportedCall("the rows of this ragged batch are part of a flattened dim")


def along(x: PaddedValue, dim: int, size: Tensor) -> Tensor:
    """A size, () or (rows,), shaped to broadcast against (rows, positions) or (positions,)."""
    return size.unsqueeze(-1) if size.dim() else size
