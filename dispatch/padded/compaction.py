"""Reshapes that true sizes decide: elements are read at the positions that they have in the unpadded tensor.

The valid positions of a dim that was flattened from several lie scattered, and a dim whose valid positions come first
may be cut into several padded ones. Either is a copy. Positions are computed on the device, from true sizes:

    flat (h of H, w of W)       a b . c d . . . .       valid positions of h = w = 2, H = W = 3
    compacted, of H * W         a b c d . . . . .       position p is read at (p // w) * W + p % w
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.offset_reads import gather_along
from subtensors.dispatch.padded.padded_size import is_same, sizes_with, true_expression
from subtensors.dispatch.padded.padded_value import PaddedValue, result
from subtensors.dispatch.padded.true_sizes import TrueSizes, rows_symbol
from subtensors.dispatch.sizes.dim_factors import Factor, Factors, bucket_of, merged, padded_dim, size_of
from subtensors.dispatch.sizes.expressions import divided, multiplied


def compacted(x: PaddedValue, d: int) -> PaddedValue:
    """Return a value whose valid positions of a dim come first.

    Args:
        x: the value.
        d: a dim that was flattened from several.

    Raises:
        UnsupportedCall: the rows of a ragged batch are part of it.
    """
    factors = merged(x.dims[d])
    if x.sizes is None or any(factor.size.has(rows_symbol()) for factor in factors):
        raise UnsupportedCall("the rows of this ragged batch are part of a flattened dim")
    bucket = bucket_of(factors)
    to = padded_dim(bucket, size_of(factors))
    return replace(gather_along(x, d, _sources(x.sizes, to, factors), to), view="copy")


def reshaped_by_position(x: PaddedValue, shape: Sequence[int]) -> PaddedValue:
    """Return a copy of another shape, with the elements in the order of the unpadded tensor.

    Args:
        x: the value.
        shape: the sizes, padded ones among them; one may be -1.

    Raises:
        UnsupportedCall: the tensor is a ragged batch, or the sizes are not known to have as many elements.
    """
    sizes = sizes_with(x.sizes, *shape)
    if sizes is None or sizes.rows is not None:
        raise UnsupportedCall("the rows of a ragged batch are cut")
    to = _dims(x, shape)
    first = _alike(x.dims, to)
    last = _alike(x.dims[first:][::-1], to[first:][::-1])
    source, target = ([f for dim in dims[first : len(dims) - last] for f in dim] for dims in (x.dims, to))
    if not is_same(size_of(tuple(source)), size_of(tuple(target)), sizes):
        raise UnsupportedCall(f"{size_of(tuple(source))} elements are not known to be {size_of(tuple(target))}")
    outer, inner = x.shape[:first], x.shape[x.dim() - last :]
    index = _sources(sizes, tuple(target), tuple(source))
    dense = x.dense.reshape(*outer, bucket_of(tuple(source)), *inner)
    out = dense.index_select(first, index.clamp(max=max(dense.shape[first] - 1, 0)))
    copied = result(out.reshape([*map(bucket_of, to)]), to, sizes).gradient_masked()
    return replace(copied, view="copy")


def _dims(x: PaddedValue, shape: Sequence[int]) -> list[Factors]:
    """Return the dims that are asked for."""
    known = [n for n in shape if int(n) != -1]
    dims = []
    for n in shape:
        if int(n) != -1:
            dims.append(padded_dim(int(n), true_expression(n)))
            continue
        bucket, remainder = divmod(math.prod(x.shape), math.prod(map(int, known)) or 1)
        if remainder:
            raise UnsupportedCall(f"no bucket of the size -1 is known in {tuple(map(int, shape))}")
        try:
            size = divided(multiplied(*map(size_of, x.dims)), multiplied(*map(true_expression, known)))
        except RuleError as error:
            raise UnsupportedCall(str(error)) from error
        dims.append(padded_dim(bucket, size))
    return dims


def _alike(a: Sequence[Factors], b: Sequence[Factors]) -> int:
    """Return how many of the first dims are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _sources(sizes: TrueSizes, to: Factors, of: Factors) -> Tensor:
    """Return for each position in the buckets of some factors where the same element lies in those of others."""
    key: Hashable = ("sources", to, of)
    keeps = sizes.serves_one_run or not sizes.is_captured
    if keeps and key in sizes.masks:
        return sizes.masks[key]
    position: Tensor = torch.arange(bucket_of(to), device=sizes.values.device)
    # Digits in the base of buckets become a number in the base of true sizes, and that digits in the other base.
    number = _rebased(position, [f.bucket for f in to], [_true(sizes, f) for f in to])
    found = _rebased(number, [_true(sizes, f) for f in of], [f.bucket for f in of])
    if keeps:
        sizes.masks[key] = found
    return found


def _true(sizes: TrueSizes, factor: Factor) -> Tensor | int:
    """A factor's true size, at least 1, which broadcasts against positions."""
    if factor.is_static:
        return max(factor.bucket, 1)
    value = sizes.of_each(factor.size).clamp(min=1)
    return value.unsqueeze(-1) if value.dim() else value


def _rebased(number: Tensor, base: Sequence[Tensor | int], other: Sequence[Tensor | int]) -> Tensor:
    """Read the digits of numbers in one mixed base as a number in another."""
    found: Tensor | int = 0
    scale: Tensor | int = 1
    for size, place in zip(reversed(base), reversed(other), strict=True):
        found = found + number % size * scale
        number, scale = number // size, scale * place
    return torch.as_tensor(found)
