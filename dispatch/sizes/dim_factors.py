"""Dims of padded tensors as products of factors, so that views and reshapes keep their true sizes.

A dim of a padded storage has a bucket size, which torch sees, and a true size, an int or an expression such as `seq`.
A reshape of the storage can merge a padded dim with others. The valid elements of the result are then no longer its
first ones, and one true size cannot say where they are:

    (batch 2, seq 3 of bucket 4)   a b c .      flatten(0, 1)      a b c . d e f .     valid: a b c d e f
                                   d e f .     ------------->      bucket 8

So a dim is a tuple of *factors*, outermost first, each with a bucket size and a true size:

    before:  (Factor(2, 2),) , (Factor(4, seq),)          two dims of one factor each
    after:   (Factor(2, 2), Factor(4, seq))               one dim of two factors, of bucket 2 * 4, true size 2 * seq

Index `i` of the dim is one index per factor (as in `divmod(i, 4)`), and is valid where each of these is below its
factor's true size. `flatten` concatenates factors and `unflatten` splits them; the storage is reshaped as any tensor.

Adjacent factors merge into one where the valid elements still come first: a static factor after any other, because
`i * k + j < size * k` is equivalent to `i < size` for `0 <= j < k`. A factor is cut in two if its true size is
divisible by the inner size for every value of its symbols; otherwise the reshape is an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.sizes.expressions import Size, as_expression, divided, multiplied


@dataclass(frozen=True)
class Factor:
    """One factor of a dim.

    Args:
        bucket: the number of indices.
        size: the number of valid ones, which come first.
    """

    bucket: int
    size: Size

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Factor], tuple[int, Size]]:
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
"""The factors of one dim, outermost first; `()` has the size 1."""


def bucket_of(factors: Factors) -> int:
    """The bucket size of a dim, which torch sees."""
    return factors[0].bucket if len(factors) == 1 else math.prod(factor.bucket for factor in factors)


def size_of(factors: Factors) -> Size:
    """The true size of a dim, the number of its valid indices.

    >>> import sympy
    >>> size_of((static(4), Factor(128, sympy.Symbol("seq"))))
    4*seq
    """
    return multiplied(*(factor.size for factor in factors))


def static_dims(shape: Sequence[int]) -> tuple[Factors, ...]:
    """The dims of a shape without padding."""
    return tuple([_static_dim(int(size)) for size in shape])


@functools.cache
def _static_dim(size: int) -> Factors:
    return (static(size),)


def with_dim(dims: Sequence[Factors], at: int, factors: Factors) -> list[Factors]:
    """Return the dims with one of them replaced."""
    return [*dims[:at], factors, *dims[at + 1 :]]


def is_padded(factors: Factors) -> bool:
    """Return whether any factor's true size may differ from its bucket size."""
    if len(factors) == 1:
        return not factors[0].is_static
    return any(not factor.is_static for factor in factors)


def padded_dim(bucket: int, size: Size) -> Factors:
    """A dim of one factor."""
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
    """Return the same dim in as few factors as possible.

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


@functools.lru_cache(4096)
def reshaped(dims: tuple[Factors, ...], shape: tuple[int, ...]) -> tuple[Factors, ...]:
    """Return the dims after a reshape of the padded storage.

    Sizes don't determine the place of a padded factor of bucket 1, such as a batch of one row: it goes to the first
    free dim of size 1.

    Args:
        dims: the dimensions before.
        shape: the sizes after, as reported; one of them may be -1.

    Returns:
        The dims after, each with as few factors as possible.

    Raises:
        RuleError: the shape cuts through a padded dimension, or has another number of elements.

    Example:
        >>> import sympy
        >>> seq = Factor(128, sympy.Symbol("seq"))
        >>> flat = reshaped(((static(4),), (seq,), (static(8),)), (-1, 8))
        >>> flat
        ((Factor(bucket=4, size=4), Factor(bucket=128, size=seq)), (Factor(bucket=8, size=8),))
        >>> reshaped(flat, (4, 128, 2, 4))[1]
        (Factor(bucket=128, size=seq),)
    """
    before = tuple(map(bucket_of, dims))
    elements, known = math.prod(before), math.prod(size for size in shape if size != -1)
    shape = tuple([elements // known if size == -1 and known else size for size in shape])
    if math.prod(shape) != elements:
        raise RuleError(f"the shape {shape} is not one of {elements} elements")
    if 0 in shape:
        return static_dims(shape)  # nothing in them needs a mask
    factors = [factor for own in dims for factor in own]
    remaining = [factor for factor in reversed(factors) if factor.bucket > 1]
    after = []
    for size in shape:
        own: list[Factor] = []
        while size > 1:
            factor = remaining.pop()
            if size % factor.bucket:
                found = _cut(factor, size)
                if found is None:
                    raise RuleError(
                        f"a reshape of {before} to {shape} cuts through a padded dimension of bucket {factor.bucket} "
                        f"and true size {factor.size}; keep that dimension in one piece, or unpad first"
                    )
                factor, inner = found
                remaining.append(inner)
            own.append(factor)
            size //= factor.bucket
        after.append(merged(own))
    for factor in factors:
        if factor.bucket == 1 and not factor.is_static and after:
            at = next((d for d, own in enumerate(after) if not own), 0)
            after[at] = (factor, *after[at])
    return tuple(own or _static_dim(1) for own in after)


def _cut(factor: Factor, outer: int) -> tuple[Factor, Factor] | None:
    """Return a factor as one of `outer` indices and a static one inside of it; None if no expression says so."""
    inner, remainder = divmod(factor.bucket, outer)
    try:
        return None if remainder else (Factor(outer, divided(factor.size, inner)), static(inner))
    except RuleError:
        return None
