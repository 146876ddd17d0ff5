"""The sizes that a program accepts, as sympy sets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import sympy

from subtensors.dispatch.ops.errors import SizeError
from subtensors.sizes.bucket_policies import BucketPolicy, Sizes, bucket_policy
from subtensors.sizes.dims import Dim

Integers: TypeAlias = "np.ndarray | np.int64"


@dataclass(frozen=True)
class SizeClass:
    """Sizes that take the same path through a program.

    Args:
        condition: the condition that they meet, within the range of their Dims.
        sizes: the set of them: of integers for one Dim, of tuples for several.
        example: the first of them, one size per name.
        refusal: the error that the program ends with; None where it accepts them.
    """

    condition: sympy.Basic
    sizes: sympy.Set
    example: dict[str, int]
    refusal: str | None

    @property
    def is_accepted(self) -> bool:
        """Return whether the program runs on these sizes."""
        return self.refusal is None


@dataclass(frozen=True)
class AcceptedSizes:
    """The result of `st.infer_sizes`.

    Args:
        dims: the dimensions, in the order of tuples in `sizes`.
        classes: the paths through the program, by their examples.
        condition: the condition that the accepted sizes meet, within the range of their Dims.
        sizes: the set of accepted sizes: of integers for one Dim, of tuples for several.
        is_complete: whether every size in range belongs to a class; a program that branches on each size has more
            classes than are searched for.
    """

    dims: tuple[Dim, ...]
    classes: tuple[SizeClass, ...]
    condition: sympy.Basic
    sizes: sympy.Set
    is_complete: bool
    _axes: tuple[np.ndarray, ...]
    _accepted: np.ndarray

    def __contains__(self, size: int | tuple[int, ...]) -> bool:
        return bool(self.sizes.contains(sympy.Tuple(*size) if isinstance(size, tuple) else size))

    def of(self, name: str) -> list[int]:
        """The sizes of one dimension that are accepted together with some sizes of the others.

        Raises:
            KeyError: no Dim has this name.
        """
        axis = self._axis(name)
        others = tuple(i for i in range(len(self.dims)) if i != axis)
        accepted = self._accepted.any(axis=others) if others else self._accepted
        return [int(size) for size in self._axes[axis][accepted]]

    def dim(self, name: str, max: int | None = None, buckets: BucketPolicy | int | Sequence[int] | None = None) -> Dim:
        """A Dim whose every bucket is a size that the program accepts.

        Args:
            name: of one of the dimensions.
            max: the largest size; the largest accepted one unless given.
            buckets: as for `st.Dim`; each is raised to the next accepted size.

        Returns:
            The Dim. Its true sizes may be any: a program is compiled for and run on buckets.

        Raises:
            KeyError: no Dim has this name.
            SizeError: no size up to `max` is accepted.

        Example:
            >>> import torch, subtensors as st
            >>> found = st.infer_sizes(lambda x: x.view(-1, 6), [torch.zeros(12)], [{0: st.Dim("n", max=100)}])
            >>> found.dim("n", buckets=st.Geometric(2, start=16)).buckets
            (18, 36, 66, 96)
        """
        found = self.dims[self._axis(name)]
        valid = [size for size in self.of(name) if size >= 1 and (max is None or size <= max)]
        if not valid:
            raise SizeError(f"the program accepts no size of {name} up to {max or found.max}; raise max")
        policy = found.policy if buckets is None else bucket_policy(buckets)
        raised = [next((size for size in valid if size >= b), valid[-1]) for b in policy.up_to(valid[-1])]
        return Dim(name, max=valid[-1], min=min(found.min, valid[-1]), buckets=Sizes(raised), strict=found.strict)

    def _axis(self, name: str) -> int:
        for axis, dim in enumerate(self.dims):
            if dim.name == name:
                return axis
        raise KeyError(f"no Dim is named {name!r}; there are {', '.join(dim.name for dim in self.dims)}")

    def __repr__(self) -> str:
        names = ", ".join(dim.name for dim in self.dims)
        classes = f"{len(self.classes)} classes" + ", some sizes left out" * (not self.is_complete)
        return f"AcceptedSizes({names}: {self.sizes}; {classes})"


def integer_set(values: Sequence[int]) -> sympy.Set:
    """Return increasing integers as a union of arithmetic progressions, found greedily from the left.

    >>> integer_set([1, 2, 3, 4, 8, 16, 24, 32])
    Union(Range(1, 5, 1), Range(8, 40, 8))
    >>> integer_set([3, 7])
    {3, 7}
    """
    parts: list[sympy.Set] = []
    alone: list[int] = []
    rest = list(values)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        run = next((i for i in range(1, len(rest)) if rest[i] - rest[i - 1] != step), len(rest))
        if run > 2:
            parts.append(sympy.Range(rest[0], rest[run - 1] + step, step))
            rest = rest[run:]
        else:
            alone.append(rest.pop(0))
    if alone:
        parts.append(sympy.FiniteSet(*alone))
    # Unevaluated: sympy would put the ranges back together, slowly.
    return sympy.Union(*parts, evaluate=False) if len(parts) > 1 else parts[0] if parts else sympy.S.EmptySet


def size_set(dims: Sequence[Dim], axes: Sequence[np.ndarray], condition: sympy.Basic, mask: np.ndarray) -> sympy.Set:
    """Return the sizes of a mask over a grid: by value for one dimension, by condition for several."""
    if not mask.any():
        return sympy.S.EmptySet
    if len(dims) == 1:
        return integer_set([int(size) for size in axes[0][mask]])
    ranges = [sympy.Range(int(axis[0]), int(axis[-1]) + 1) for axis in axes]
    return sympy.ConditionSet(sympy.Tuple(*(dim.symbol for dim in dims)), condition, sympy.ProductSet(*ranges))


def evaluate_on_grid(condition: sympy.Basic, dims: Sequence[Dim], axes: Sequence[np.ndarray]) -> np.ndarray:
    """Evaluate a condition on a grid of sizes, as a boolean mask."""
    grid = np.meshgrid(*axes, indexing="ij")
    symbols = [dim.symbol for dim in dims]
    return np.asarray(_evaluate(condition, symbols, np.stack([g.ravel() for g in grid])), dtype=bool).reshape(
        grid[0].shape
    )


def _evaluate(condition: sympy.Basic, symbols: Sequence[sympy.Symbol], sizes: np.ndarray) -> np.ndarray:
    """Evaluate a condition on each column of sizes, (number of symbols, points)."""
    if isinstance(condition, sympy.And | sympy.Or | sympy.Not):
        parts = [_evaluate(part, symbols, sizes) for part in condition.args]
        if isinstance(condition, sympy.Not):
            return ~parts[0]
        combine = np.logical_and if isinstance(condition, sympy.And) else np.logical_or
        return np.asarray(combine.reduce(parts), dtype=bool)
    if isinstance(condition, sympy.core.relational.Relational):
        difference, denominator = sympy.fraction(sympy.together(condition.lhs - condition.rhs))
        # In integers: in floating point floor(14/3 - 2/3) is 3. A division by zero is ignored: the program would have
        # left this path before it.
        with contextlib.suppress(KeyError), np.errstate(all="ignore"):
            if denominator.is_Integer and denominator > 0:
                value = _evaluate_integers(difference, dict(zip(symbols, sizes, strict=True)))
                return np.broadcast_to(_COMPARISONS[condition.rel_op](value, 0), sizes.shape[1:])
    with np.errstate(all="ignore"):
        found = sympy.lambdify(symbols, condition, "numpy")(*sizes)
    return np.broadcast_to(np.asarray(found, dtype=bool), sizes.shape[1:])


def _evaluate_integers(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, np.ndarray]) -> Integers:
    """Evaluate an expression of integers; raise KeyError if it contains another function."""
    if expression.is_Integer:
        return np.int64(int(expression))
    if isinstance(expression, sympy.Symbol):
        return sizes[expression]
    if isinstance(expression, sympy.floor | sympy.ceiling):
        above, below = (_evaluate_integers(part, sizes) for part in sympy.fraction(sympy.together(expression.args[0])))
        return above // below if isinstance(expression, sympy.floor) else -(-above // below)
    combine = _ARITHMETIC[type(expression)]
    return functools.reduce(combine, [_evaluate_integers(part, sizes) for part in expression.args])


_ARITHMETIC: dict[type, Callable[[Integers, Integers], Integers]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Mod: operator.mod,
    sympy.Min: np.minimum,
    sympy.Max: np.maximum,
}

_COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def simplest(
    conditions: Sequence[sympy.Basic], mask: np.ndarray, dims: Sequence[Dim], axes: Sequence[np.ndarray]
) -> sympy.Basic | None:
    """Return a small subset of the conditions that is equivalent to the mask; None if all of them together are not."""
    kept = [(c, where) for c in conditions if not (where := evaluate_on_grid(c, dims, axes)).all()]

    def conjunction(chosen: Sequence[tuple[sympy.Basic, np.ndarray]]) -> np.ndarray:
        return np.logical_and.reduce([where for _, where in chosen], axis=0) if chosen else np.ones_like(mask)

    if not np.array_equal(conjunction(kept), mask):
        return None
    for size in range(min(len(kept), 2) + 1):
        for chosen in itertools.combinations(kept, size):
            if np.array_equal(conjunction(chosen), mask):
                return sympy.And(*(c for c, _ in chosen))
    # Longest first: torch's own checks are longer than the program's.
    for pair in sorted(kept, key=lambda pair: -sympy.count_ops(pair[0])):
        fewer = [other for other in kept if other is not pair]
        if np.array_equal(conjunction(fewer), mask):
            kept = fewer
    return sympy.And(*(c for c, _ in kept))
