"""The chunked axis of rows, and its place in each value of a lazy graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

Preparation = Callable[[Tensor], Tensor]
"""A gradient hook that runs before backward reaches chunked ops; it returns the gradient that it is called with."""


@dataclass(frozen=True)
class Policy:
    """The limits on the size of a chunk: at most one of three. Without one, shapes and free memory decide.

    Args:
        chunks: the number of chunks.
        rows: rows of the axis in a chunk.
        memory_limit: bytes that a chunk's values may take.
        exact: whether gradients of whole operands add up as if in one sum ("exact"), or in their dtype ("fast").
        compiled: whether the ops of a chunk are compiled.
    """

    chunks: int | None = None
    rows: int | None = None
    memory_limit: int | None = None
    exact: bool = True
    compiled: bool = False


class ChunkAxis:
    """Rows that are processed chunk by chunk. Axes that meet in an op become one; the stricter limits hold.

    Args:
        size: the number of rows.
        policy: how they are divided.
        elements: the number of elements of the tensor that was chunked.

    Example:
        >>> ChunkAxis(10, Policy(rows=4)).spans(lambda rows: 0)
        [(0, 4), (4, 8), (8, 10)]
    """

    def __init__(self, size: int, policy: Policy, elements: int = 0) -> None:
        self.size = size
        self._elements = elements
        self._policy = policy
        self._granule = 1
        self._parent: ChunkAxis | None = None
        self._preparations: list[Preparation] = []

    @property
    def root(self) -> ChunkAxis:
        """The axis that stands for this one and for all that it has met."""
        axis = self
        while axis._parent is not None:
            axis = axis._parent
        return axis

    @property
    def elements(self) -> int:
        """The elements of the largest tensor that was chunked, which is in memory in full anyway."""
        return self.root._elements

    @property
    def policy(self) -> Policy:
        """The limits of all the axes that became this one."""
        return self.root._policy

    @property
    def granule(self) -> int:
        """Chunks begin at multiples of this many rows."""
        return self.root._granule

    def prepare(self, preparation: Preparation) -> None:
        """Register a hook that runs before backward reaches the results of this axis."""
        if preparation not in self.root._preparations:
            self.root._preparations.append(preparation)

    def prepared(self, result: Tensor) -> Tensor:
        """A result of chunks along this axis, with the registered preparations as hooks on its gradient."""
        if result.requires_grad:
            for preparation in self.root._preparations:
                result.register_hook(preparation)
        return result

    def again(self, size: int, elements: int, policy: Policy | None = None) -> ChunkAxis:
        """A new axis for rows selected from this one, with the same preparations before backward.

        Args:
            size: the number of selected rows.
            elements: the number of elements of the tensor they were selected into.
            policy: how they are divided; None: as this axis is.
        """
        axis = ChunkAxis(size, self.policy if policy is None else policy, elements)
        axis._preparations = list(self.root._preparations)
        return axis

    def meet(self, other: ChunkAxis) -> None:
        """Make the two axes one. They have the same size."""
        one, two = self.root, other.root
        if one is two:
            return
        two._parent = one
        one._granule = math.lcm(one._granule, two._granule)
        one._elements = max(one._elements, two._elements)
        one._preparations += [p for p in two._preparations if p not in one._preparations]
        a, b = one._policy, two._policy
        one._policy = Policy(
            max((p.chunks for p in (a, b) if p.chunks), default=None),
            min((p.rows for p in (a, b) if p.rows), default=None),
            min((p.memory_limit for p in (a, b) if p.memory_limit), default=None),
            a.exact or b.exact,
            a.compiled or b.compiled,
        )

    def coarsen(self, granule: int) -> None:
        """Make chunks begin at multiples of `granule` rows from now on."""
        self.root._granule = math.lcm(self.granule, granule)

    def spans(
        self, rows_by_memory: Callable[[int | None], int], asked: tuple[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """The chunks as `(start, stop)`; the last may be short.

        Args:
            rows_by_memory: gives the rows that fit in some bytes (None: in free memory), where the policy doesn't say.
            asked: the rows that chunks have to hold; None: all.
        """
        rows, granule = self.rows(rows_by_memory), self.granule
        first, stop = asked or (0, self.size)
        first, stop = first // granule * granule, min(-(-stop // granule) * granule, self.size)
        return [(s, min(s + rows, stop)) for s in range(first, max(stop, first + 1), rows)]

    def rows(self, rows_by_memory: Callable[[int | None], int]) -> int:
        """The number of rows of every chunk but the last."""
        root = self.root
        policy, granule = root._policy, root._granule
        wanted = [math.ceil(self.size / policy.chunks)] if policy.chunks else []
        wanted += [policy.rows] if policy.rows else []
        if policy.memory_limit or not wanted:
            wanted.append(rows_by_memory(policy.memory_limit))
        return max(granule, min(wanted) // granule * granule, 1)


@dataclass(frozen=True)
class RowLayout:
    """The place of the axis in a value: dim `dim` is `outer` runs of `size` positions, `unit` a row, from `low` on.

    A run holds positions `low .. low + size` of the axis counted in units, so that `x[:, 1:]` and `x.view(B * T, V)` of
    a value chunked along T are chunked along it too.

    Args:
        axis: the rows.
        dim: the dim of the value that holds them.
        size: positions in a run.
        outer: runs in the dim, from dims merged in front.
        unit: positions a row; below one where rows were grouped.
        low: the first position of a run.
    """

    axis: ChunkAxis
    dim: int
    size: int
    outer: int = 1
    unit: Fraction = Fraction(1)
    low: int = 0

    @property
    def extent(self) -> int:
        """The size of the whole dim."""
        return self.outer * self.size

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the axis that the value covers, and the row behind the last."""
        first, behind = Fraction(self.low) / self.unit, Fraction(self.low + self.size) / self.unit
        return math.floor(first), min(math.ceil(behind), self.axis.size)

    def at(self, dim: int) -> RowLayout:
        """The same rows in another dim."""
        return replace(self, dim=dim)

    def like(self, other: RowLayout) -> bool:
        """Return whether both divide a dim alike, so that chunks of one line up with chunks of the other."""
        mine = (self.axis.size, self.size, self.outer, self.unit, self.low)
        return mine == (other.axis.size, other.size, other.outer, other.unit, other.low)

    def window(self, span: tuple[int, int]) -> tuple[int, int]:
        """The positions of a run that a chunk of rows has."""
        unit, group, low, size = self.unit.numerator, self.unit.denominator, self.low, self.size
        start, stop = span
        return min(max(start * unit // group - low, 0), size), min(max(stop * unit // group - low, 0), size)

    def local(self, span: tuple[int, int]) -> int:
        """The size of the dim in a chunk of rows."""
        start, stop = self.window(span)
        return self.outer * (stop - start)

    def cut(self, whole: Tensor, span: tuple[int, int]) -> Tensor:
        """A chunk's part of a whole tensor: a view, or a copy where runs are interleaved."""
        start, stop = self.window(span)
        if self.outer == 1:
            return whole.narrow(self.dim, start, stop - start)
        runs = whole.unflatten(self.dim, (self.outer, self.size)).narrow(self.dim + 1, start, stop - start)
        part: Tensor = runs.flatten(self.dim, self.dim + 1)
        return part

    def put(self, whole: Tensor, span: tuple[int, int], part: Tensor) -> None:
        """Write a chunk's part into the whole tensor."""
        start, stop = self.window(span)
        if self.outer == 1:
            whole.narrow(self.dim, start, stop - start).copy_(part)
        elif stop > start:
            runs = whole.unflatten(self.dim, (self.outer, self.size)).narrow(self.dim + 1, start, stop - start)
            runs.copy_(part.unflatten(self.dim, (self.outer, stop - start)))

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> RowLayout | None:
        """The layout after a reshape from `old` to `new` sizes; None where no dim holds the whole axis.

        A dim of the new shape that holds several rows' worth of an old one has a unit above one; one whose positions
        are groups of rows has a unit below one, and chunks must then begin at multiples of the group.
        """
        before = math.prod(old[: self.dim]) * self.outer
        prefix = 1
        found: list[RowLayout] = []
        for dim, size in enumerate(new):
            outer = before // prefix if prefix else 0
            if outer and before % prefix == 0 and size % outer == 0:
                run = size // outer
                # Elements that one position of the run stands for, before and after.
                old_tail, new_tail = math.prod(old[self.dim + 1 :]), math.prod(new[dim + 1 :])
                if run * new_tail == self.size * old_tail and run > 0 and self._divides(old_tail, new_tail):
                    ratio = Fraction(old_tail, new_tail)
                    low = self.low * ratio
                    if low.denominator == 1:
                        found.append(RowLayout(self.axis, dim, run, outer, self.unit * ratio, int(low)))
            prefix *= size
        # Runs in front of the rows, or a dim behind them, may hold all positions of a run, too: not one by one.
        return min(found, key=lambda layout: (layout.group, layout.unit, layout.outer), default=None)

    @staticmethod
    def _divides(old_tail: int, new_tail: int) -> bool:
        return new_tail > 0 and (old_tail % new_tail == 0 or new_tail % old_tail == 0)

    @property
    def group(self) -> int:
        """The number of rows that one position stands for: chunks must begin at multiples of it."""
        return self.unit.denominator


def meta_of(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes, strides and dtype without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
