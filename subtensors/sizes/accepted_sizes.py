"""The sizes that a program accepts, as sympy sets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import sympy

from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.sizes.grid_evaluation import NotEvaluated, SizeGrid
from subtensors.dispatch.sizes.symbolic_sizes import SymbolicSizes
from subtensors.sizes.bucket_policies import BucketPolicy, Sizes, bucket_policy
from subtensors.sizes.dims import Dim

logger = logging.getLogger("subtensors.sizes")


@dataclass(frozen=True)
class SizeClass:
    """Sizes that take the same path through a program.

    Args:
        condition: the condition that they meet, within the range of their Dims.
        sizes: the set of them: of integers for one Dim, of tuples for several.
        example: the first of them, one size per name.
        refusal: the error that the program ends with; None where it accepts them.
        is_decided: whether sizes alone decide that. Where the program depends on a tensor's values, they don't; its
            sizes are then not counted as accepted, and `refusal` says what it needs.
    """

    condition: sympy.Basic
    sizes: sympy.Set
    example: dict[str, int]
    refusal: str | None
    is_decided: bool = True


@dataclass(frozen=True)
class AcceptedSizes:
    """The result of `st.infer_sizes`.

    Args:
        dims: the dimensions, in the order of tuples in `sizes`.
        classes: the paths through the program, by their examples.
        condition: the condition that the accepted sizes meet, within the range of their Dims.
        sizes: the set of accepted sizes: of integers for one Dim, of tuples for several.
        is_complete: whether it is decided of every size in range; else there may be more accepted ones. A program
            that branches on each size has more classes than are searched for, one that branches on values has classes
            that sizes don't decide, and several Dims can have more combinations than are looked at.
    """

    dims: tuple[Dim, ...]
    classes: tuple[SizeClass, ...]
    condition: sympy.Basic
    sizes: sympy.Set
    is_complete: bool
    _axes: tuple[np.ndarray, ...]
    _accepted: np.ndarray

    def __contains__(self, size: int | tuple[int, ...]) -> bool:
        """Return whether the program is known to accept a size, or one for each Dim."""
        sizes = size if isinstance(size, tuple) else (size,)
        if len(sizes) != len(self.dims):
            raise SizeError(f"{len(sizes)} sizes were asked for, and there are {len(self.dims)} Dims")
        index = tuple(int(np.searchsorted(axis, each)) for axis, each in zip(self._axes, sizes, strict=True))
        found = all(i < len(axis) and axis[i] == n for i, axis, n in zip(index, self._axes, sizes, strict=True))
        return found and bool(self._accepted[index])

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


@dataclass(frozen=True)
class ConsideredSizes:
    """The combinations of sizes that are considered.

    Args:
        dims: the dimensions.
        axes: the sizes of each, increasing.
    """

    dims: tuple[Dim, ...]
    axes: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of sizes of each dimension."""
        return tuple(len(axis) for axis in self.axes)

    def at(self, point: Sequence[SupportsIndex]) -> dict[str, int]:
        """Return the sizes at a point of the grid, by name."""
        return {dim.name: int(axis[i]) for dim, axis, i in zip(self.dims, self.axes, point, strict=True)}

    @functools.cached_property
    def _points(self) -> SizeGrid:
        return SizeGrid(dict(zip([dim.symbol for dim in self.dims], np.ix_(*self.axes), strict=True)))

    def where(self, condition: sympy.Basic) -> np.ndarray:
        """Return where a condition in the symbols of the dims holds, as a mask over the grid.

        Raises:
            NotEvaluated: the condition contains an unknown function.
        """
        return self._points.holds(condition)[0]

    def where_all(self, conditions: Sequence[sympy.Basic]) -> np.ndarray:
        """Return where all of a path's conditions certainly hold; nowhere if one of them is beyond evaluation."""
        found = np.ones(self.shape, dtype=bool)
        try:
            for condition in conditions:
                holds, doubtful = self._points.holds(condition)
                found &= holds & ~doubtful
        except NotEvaluated as unknown:
            logger.info("the condition %s is not evaluated; its sizes are tried one by one", unknown)
            return np.zeros(self.shape, dtype=bool)
        return found

    def condition(self, candidates: Sequence[sympy.Basic], mask: np.ndarray) -> sympy.Basic:
        """Return a condition that is met by the points of a mask alone, made of the candidates where they suffice."""
        found = simplest(candidates, mask, self)
        if found is not None:
            return SymbolicSizes.plain(found)
        if len(self.dims) == 1:
            return self._set(mask).as_relational(self.dims[0].symbol)
        points = np.argwhere(mask)
        symbols = [dim.symbol for dim in self.dims]
        sizes = [[int(axis[i]) for axis, i in zip(self.axes, point, strict=True)] for point in points]
        return sympy.Or(*(sympy.And(*map(sympy.Eq, symbols, each)) for each in sizes))

    def size_set(self, condition: sympy.Basic, mask: np.ndarray) -> sympy.Set:
        """Return the sizes of a mask: by value for one dimension, by condition for several."""
        if not mask.any():
            return sympy.S.EmptySet
        if len(self.dims) == 1:
            return self._set(mask)
        axes = [integer_set([int(size) for size in axis]) for axis in self.axes]
        return sympy.ConditionSet(sympy.Tuple(*(dim.symbol for dim in self.dims)), condition, sympy.ProductSet(*axes))

    def _set(self, mask: np.ndarray) -> sympy.Set:
        return integer_set([int(size) for size in self.axes[0][mask]])


def simplest(conditions: Sequence[sympy.Basic], mask: np.ndarray, grid: ConsideredSizes) -> sympy.Basic | None:
    """Return a small subset of the conditions that is equivalent to the mask; None if all of them together are not."""
    kept = []
    for condition in conditions:
        with contextlib.suppress(NotEvaluated):
            where = grid.where(condition)
            # One that cuts off a part of the mask, which a doubtful point may be, is of no use.
            if not where.all() and where[mask].all():
                kept.append((condition, where))

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
