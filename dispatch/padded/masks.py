"""Masks of the valid positions of a bucket: those below the true size of each factor of each dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factor, Factors


def real_positions(dims: tuple[Factors, ...], wanted: tuple[int, ...], sizes: TrueSizes) -> Tensor | None:
    """The mask of some dims.

    Args:
        dims: the factors of each dim.
        wanted: the dims whose padding counts.
        sizes: the true sizes that the factors speak of.

    Returns:
        bool, True where data is real, of size 1 along dims it doesn't vary on; None when everything is real.

    Raises:
        Inexpressible: a length differs from row to row, and no dim holds the rows.
    """
    flat = [factor for factors in dims for factor in factors]
    rows_at = next((i for i, factor in enumerate(flat) if factor.size == rows_symbol()), None)
    found: Tensor | None = None
    position = 0
    for d, factors in enumerate(dims):
        for factor in factors:
            if d in wanted and not factor.is_static and not _covers(factor, sizes):
                real = _below(factor, sizes, position, rows_at, len(flat))
                found = real if found is None else found & real
            position += 1
    return None if found is None else _unfactored(found, dims)


def _covers(factor: Factor, sizes: TrueSizes) -> bool:
    """Return whether a factor is the rows of a ragged batch, all of them valid."""
    rows = rows_symbol()
    return bool(factor.size.free_symbols == {rows} and factor.size.subs(rows, sizes.rows) == factor.bucket)


def _below(factor: Factor, sizes: TrueSizes, position: int, rows_at: int | None, rank: int) -> Tensor:
    index = torch.arange(factor.bucket, device=sizes.values.device)
    size = sizes.of(factor.size)
    shape = [1] * rank
    shape[position] = factor.bucket
    index = index.view(shape)
    if size.dim() == 0:
        return index < size
    if not sizes.differs_by_row(factor.size):
        return index < size[0]
    if rows_at is None:
        raise UnsupportedCall("the rows of a ragged batch are gone, and its lengths with them")
    shape = [1] * rank
    shape[rows_at] = size.shape[0]
    return index < size.view(shape)


def _unfactored(mask: Tensor, dims: tuple[Factors, ...]) -> Tensor:
    """A mask of one dim a factor as one of one dim a dim; it keeps size 1 along dims it doesn't vary on."""
    if all(len(factors) == 1 for factors in dims):
        return mask
    expanded, shape = [], []
    position = 0
    for factors in dims:
        sizes = list(mask.shape[position : position + len(factors)])
        if any(size != 1 for size in sizes):
            sizes = [factor.bucket for factor in factors]
        expanded += sizes
        shape.append(math.prod(sizes))
        position += len(factors)
    return mask.expand(expanded).reshape(shape)
