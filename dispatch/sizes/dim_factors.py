"""Reshapes of padded dimensions: which dimensions become one, which come apart, and what is real in them.

A dimension is a product of *factors*, outermost first, each with a bucket size and a true one: index `i` of the
dimension stands for one index a factor, and is real where each of those is below its factor's true size. A dimension as
a user makes it is one factor. `flatten` puts factors side by side, since the real elements of `(batch, seq)` as one
dimension lie scattered through it; `unflatten` takes them apart again. Nothing moves: a reshape of the bucket shape is
a reshape of the padded storage.

Factors that touch merge where the real elements are a prefix still: a static factor after any other, because
`i * k + j < size * k` says the same as `i < size` for `0 <= j < k`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.sizes.expressions import Size, as_expression, divided, multiplied


@dataclass(frozen=True)
class Factor:
    """A part of a dimension.

    Args:
        bucket: how many indices it has.
        size: how many of them, from the first, are real.
    """

    bucket: int
    size: Size

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cached values: a hash differs between processes.
        return Factor, (self.bucket, self.size)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.bucket, self.size))

    @functools.cached_property
    def is_static(self) -> bool:
        """Return whether every index is valid in every run."""
        return bool(self.size == self.bucket)


def static(bucket: int) -> Factor:
    """A factor without padding."""
    return Factor(bucket, as_expression(bucket))


Factors = tuple[Factor, ...]
"""Of one dimension, outermost first; `()` has the size 1."""


def bucket_of(factors: Factors) -> int:
    """The size that a dimension reports."""
    return factors[0].bucket if len(factors) == 1 else math.prod(factor.bucket for factor in factors)


def size_of(factors: Factors) -> Size:
    """The true size of a dimension: how many of its indices are valid.

    >>> import sympy
    >>> size_of((static(4), Factor(128, sympy.Symbol("seq"))))
    4*seq
    """
    return multiplied(*(factor.size for factor in factors))


def static_dims(shape: Sequence[int]) -> tuple[Factors, ...]:
    """Dims without padding."""
    return tuple([_static_dim(int(size)) for size in shape])


@functools.cache
def _static_dim(size: int) -> Factors:
    return (static(size),)


def with_dim(dims: Sequence[Factors], at: int, factors: Factors) -> list[Factors]:
    """These dims, but another one in one place."""
    return [*dims[:at], factors, *dims[at + 1 :]]


def is_padded(factors: Factors) -> bool:
    """Return whether any factor's true size may differ from its bucket size."""
    if len(factors) == 1:
        return not factors[0].is_static
    return any(not factor.is_static for factor in factors)


def padded_dim(bucket: int, size: Size) -> Factors:
    """One dim of one factor."""
    return (Factor(bucket, as_expression(size)),)


def is_prefix(factors: Factors) -> bool:
    """Return whether a dimension's valid indices come first, without gaps.

    >>> import sympy
    >>> seq = Factor(128, sympy.Symbol("seq"))
    >>> is_prefix((seq,)), is_prefix(merged([seq, static(4)])), is_prefix((static(4), seq))
    (True, True, False)
    """
    return len(merged(factors)) <= 1


def merged(factors: Sequence[Factor]) -> Factors:
    """The same dimension in as few factors as there can be.

    >>> import sympy
    >>> merged([static(2), static(3), Factor(8, sympy.Symbol("n")), static(4)])
    (Factor(bucket=6, size=6), Factor(bucket=32, size=4*n))
    """
    result: list[Factor] = []
    for factor in factors:
        if factor.bucket == 1 and factor.is_static:
            continue
        if result and factor.is_static:
            before = result.pop()
            factor = Factor(before.bucket * factor.bucket, multiplied(before.size, factor.size))
        result.append(factor)
    return tuple(result)


def reshaped(dims: Sequence[Factors], shape: Sequence[int]) -> list[Factors]:
    """The factors of each dimension after a reshape of the padded storage.

    Args:
        dims: the dimensions before.
        shape: the sizes after, as reported; one of them may be -1.

    Returns:
        The dimensions after, each with as few factors as there can be.

    Raises:
        RuleError: the shape cuts through a padded dimension, or has another number of elements.

    Example:
        >>> import sympy
        >>> seq = Factor(128, sympy.Symbol("seq"))
        >>> flat = reshaped([(static(4),), (seq,), (static(8),)], (-1, 8))
        >>> flat
        [(Factor(bucket=4, size=4), Factor(bucket=128, size=seq)), (Factor(bucket=8, size=8),)]
        >>> reshaped(flat, (4, 128, 2, 4))[1]
        (Factor(bucket=128, size=seq),)
    """
    shape = _without_wildcard(shape, math.prod(map(bucket_of, dims)))
    if 0 in shape or 0 in map(bucket_of, dims):
        return _empty(dims, shape)
    rest = [factor for factors in dims for factor in factors if factor != static(1)]
    result = []
    for wanted in shape:
        taken: list[Factor] = []
        while (missing := wanted // bucket_of(tuple(taken))) > 1:
            factor, *rest = rest
            if missing % factor.bucket:
                factor, inner = _cut(factor, missing, dims, shape)
                rest.insert(0, inner)
            taken.append(factor)
        result.append(merged(taken))
    return result


def _cut(factor: Factor, outer: int, dims: Sequence[Factors], shape: Sequence[int]) -> tuple[Factor, Factor]:
    """A factor as one of `outer` indices around a static one."""
    inner, remainder = divmod(factor.bucket, outer)
    if not remainder and factor.is_static:
        return static(outer), static(inner)
    try:
        if not remainder:
            return Factor(outer, divided(factor.size, inner)), static(inner)
    except RuleError:
        pass
    before = tuple(map(bucket_of, dims))
    raise RuleError(
        f"a reshape of {before} to {tuple(shape)} cuts through a padded dimension of bucket {factor.bucket} and true "
        f"size {factor.size}; keep that dimension whole, or unpad first"
    )


def _without_wildcard(shape: Sequence[int], elements: int) -> list[int]:
    known = math.prod(size for size in shape if size != -1)
    filled = [elements // known if size == -1 and known else size for size in shape]
    if list(shape).count(-1) > 1 or math.prod(filled) != elements:
        raise RuleError(f"the shape {tuple(shape)} is not one of {elements} elements")
    return filled


def _empty(dims: Sequence[Factors], shape: Sequence[int]) -> list[Factors]:
    """Dimensions of a tensor without elements: nothing in them needs a mask, so all are static."""
    return [(static(size),) for size in shape]
