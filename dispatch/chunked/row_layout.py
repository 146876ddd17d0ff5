"""The chunked axis of rows, and the position of its rows in each value of a lazy graph."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BoolArray = npt.NDArray[np.bool_]

BackwardHook = Callable[[Tensor], Tensor]
"""A gradient hook that runs before backward reaches chunked ops; it returns its gradient unchanged."""


class Policy(NamedTuple):
    """The limits on the size of a chunk: at most one of three. Without one, shapes and free memory decide.

    Args:
        chunks: the number of chunks.
        rows: rows of the axis in a chunk.
        memory_limit: bytes at the peak beyond the inputs, with the gradients.
        exact: whether gradients of replicated operands add up as in one sum ("exact"), or in their dtype ("fast").
        compiled: whether the ops of a chunk are compiled.
    """

    chunks: int | None = None
    rows: int | None = None
    memory_limit: int | None = None
    exact: bool = True
    compiled: bool = False


class LimitError(ValueError):
    """A limit of memory that can't be met.

    Args:
        limit: bytes at the peak beyond the inputs.
        least: the fewest bytes that are needed.
        advice: what else would do, after "give more".
    """

    def __init__(self, limit: int, least: int, advice: str) -> None:
        self.limit, self.least, self.advice = limit, least, advice
        super().__init__(
            f"memory_limit={limit} can't be met: {least} bytes are needed at least beyond the inputs, gradients "
            f"included; give more{advice}, or leave the limit out"
        )


def check_limit(limit: int | None, least: int, advice: str = "") -> None:
    """Raise LimitError for a limit that can't be met.

    Args:
        limit: bytes at the peak beyond the inputs; None: no limit.
        least: the fewest bytes that are needed.
        advice: what else would do, after "give more".
    """
    if limit is not None and least > limit:
        raise LimitError(limit, least, advice)


class ChunkAxis:
    """Rows that are processed chunk by chunk. Axes of the operands of an op become one; the stricter limits hold.

    Args:
        size: the number of rows.
        policy: how they are divided.
        elements: the number of elements of the tensor that was chunked.
        is_valid: (size,), False for rows that are padding alone, whose chunks are skipped; None: no such row is known.

    Example:
        >>> ChunkAxis(10, Policy(rows=4)).spans(lambda rows: 0)
        [(0, 4), (4, 8), (8, 10)]
    """

    def __init__(self, size: int, policy: Policy, elements: int = 0, is_valid: BoolArray | None = None) -> None:
        self.size = size
        self._elements = elements
        self._is_valid = is_valid
        self._policy = policy
        self._granule = 1
        self._parent: ChunkAxis | None = None
        self._backward_hooks: list[BackwardHook] = []
        self.holders: dict[weakref.ref[object], None] = {}
        """The holders of numbers and rows that wait for passes along a root, see `shared_pass.py`."""

    @property
    def root(self) -> ChunkAxis:
        """The axis that this one and all that were merged with it are represented by."""
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
        """The limits of all axes that were merged into this one."""
        return self.root._policy

    @property
    def granule(self) -> int:
        """Chunks begin at multiples of this many rows."""
        return self.root._granule

    @property
    def is_valid(self) -> BoolArray | None:
        """The rows that are more than padding; None where all may be."""
        return self.root._is_valid

    def add_backward_hook(self, hook: BackwardHook) -> None:
        """Register a hook that runs before backward reaches the results of this axis."""
        if hook not in self.root._backward_hooks:
            self.root._backward_hooks.append(hook)

    def with_backward_hooks(self, result: Tensor) -> Tensor:
        """Register the backward hooks on a result of chunks along this axis, and return it."""
        if result.requires_grad:
            for hook in self.root._backward_hooks:
                result.register_hook(hook)
        return result

    def selection(self, selected: Tensor, dim: int, per_row: Fraction = Fraction(1)) -> ChunkAxis:
        """Return a new axis for rows selected from this one, with the same backward hooks.

        Args:
            selected: the tensor that holds them.
            dim: the dim of it that holds them.
            per_row: how many rows of a chunk there are for one of this axis, before they are selected.
        """
        policy = self.policy
        if policy.rows is not None:
            policy = policy._replace(rows=max(1, int(policy.rows * per_row)))
        axis = ChunkAxis(selected.shape[dim], policy, selected.numel())
        axis._backward_hooks = list(self.root._backward_hooks)
        return axis

    def merge(self, other: ChunkAxis) -> None:
        """Merge two axes of the same size."""
        one, two = self.root, other.root
        if one is two:
            return
        two._parent = one
        one.holders |= two.holders
        one._granule = math.lcm(one._granule, two._granule)
        one._elements = max(one._elements, two._elements)
        if one._is_valid is None or two._is_valid is None or not np.array_equal(one._is_valid, two._is_valid):
            one._is_valid = None
        one._backward_hooks += [p for p in two._backward_hooks if p not in one._backward_hooks]
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
        self, rows_by_memory: Callable[[int | None], int], requested: tuple[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """Return the chunks as `(start, stop)`; the last may be short.

        Args:
            rows_by_memory: returns the rows that fit in some bytes (None: in free memory), where the policy sets none.
            requested: the rows that are needed; None: all.
        """
        rows, granule = self.rows(rows_by_memory), self.granule
        first, stop = requested or (0, self.size)
        first, stop = first // granule * granule, min(-(-stop // granule) * granule, self.size)
        spans = [(s, min(s + rows, stop)) for s in range(first, max(stop, first + 1), rows)]
        is_valid = self.is_valid
        return spans if is_valid is None else [s for s in spans if is_valid[slice(*s)].any()] or spans[:1]

    def rows(self, rows_by_memory: Callable[[int | None], int]) -> int:
        """Return the number of rows of every chunk but the last."""
        root = self.root
        policy, granule = root._policy, root._granule
        limits = [math.ceil(self.size / policy.chunks)] if policy.chunks else []
        limits += [policy.rows] if policy.rows else []
        if policy.memory_limit or not limits:
            limits.append(rows_by_memory(policy.memory_limit))
        return max(granule, min(limits) // granule * granule, 1)


@dataclass(frozen=True)
class RowLayout:
    """The position of the rows in a value: dim `dim` is `runs` runs of `size` positions, `unit` a row, from `start` on.

    A run holds positions `start .. start + size` of the axis counted in units, so that `x[:, 1:]` and
    `x.view(B * T, V)` of a value chunked along T are chunked along it too.

    Args:
        axis: the rows.
        dim: the dim of the value that holds them.
        size: positions in a run.
        runs: runs in the dim, from dims merged in front.
        unit: positions a row; below one where rows were grouped.
        start: the first position of a run.
    """

    axis: ChunkAxis
    dim: int
    size: int
    runs: int = 1
    unit: Fraction = Fraction(1)
    start: int = 0

    @property
    def dim_size(self) -> int:
        """The size of the dim in the full value."""
        return self.runs * self.size

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the axis that the value covers, and the row behind the last."""
        first, behind = Fraction(self.start) / self.unit, Fraction(self.start + self.size) / self.unit
        return math.floor(first), min(math.ceil(behind), self.axis.size)

    def with_dim(self, dim: int) -> RowLayout:
        """Return the layout with the same rows in another dim."""
        return replace(self, dim=dim)

    def aligns_with(self, other: RowLayout | None) -> bool:
        """Return whether both divide one dim alike, so that chunks of one line up with chunks of the other."""
        if other is None:
            return False
        own = (self.dim, self.axis.size, self.size, self.runs, self.unit, self.start)
        return own == (other.dim, other.axis.size, other.size, other.runs, other.unit, other.start)

    def window(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return the positions of a run that a chunk of rows holds, [start, stop)."""
        unit, group, first, size = self.unit.numerator, self.unit.denominator, self.start, self.size
        start, stop = span
        return min(max(start * unit // group - first, 0), size), min(max(stop * unit // group - first, 0), size)

    def positions_with_values(self) -> npt.NDArray[np.int64] | None:
        """Return the positions whose rows are not padding alone, (n,); None where all may be."""
        is_valid = self.axis.is_valid
        if is_valid is None or self.group > 1:
            return None
        rows = (np.arange(self.size) + self.start) // self.unit.numerator
        return np.flatnonzero(np.tile(is_valid[rows], self.runs))

    def size_in(self, span: tuple[int, int]) -> int:
        """Return the size of the dim in a chunk of rows."""
        start, stop = self.window(span)
        return self.runs * (stop - start)

    def chunk_of(self, full: Tensor, span: tuple[int, int]) -> Tensor:
        """Return a chunk's part of a full tensor: a view, or a copy where there are several runs."""
        return self._runs_of(full, span).flatten(self.dim, self.dim + (self.runs > 1))

    def write_chunk(self, full: Tensor, span: tuple[int, int], part: Tensor) -> None:
        """Write a chunk's part into the full tensor."""
        into = self._runs_of(full, span)
        into.copy_(part if self.runs == 1 else part.reshape(into.shape))

    def _runs_of(self, full: Tensor, span: tuple[int, int]) -> Tensor:
        """Return a view of a chunk's part of a full tensor, where there are several runs with a dim for them."""
        start, stop = self.window(span)
        if self.runs == 1:
            return full.narrow(self.dim, start, stop - start)
        runs: Tensor = full.unflatten(self.dim, (self.runs, self.size)).narrow(self.dim + 1, start, stop - start)
        return runs

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> RowLayout | None:
        """Return the layout after a reshape from `old` to `new` sizes; None where no dim holds the whole axis.

        A new dim with several positions a row has a unit above one; one whose positions are groups of rows has a unit
        below one, and chunks must then begin at multiples of the group.
        """
        before = math.prod(old[: self.dim]) * self.runs
        prefix = 1
        found: list[RowLayout] = []
        for dim, size in enumerate(new):
            runs = before // prefix if prefix else 0
            if runs and before % prefix == 0 and size % runs == 0:
                run = size // runs
                # Elements that one position of the run stands for, before and after.
                old_tail, new_tail = math.prod(old[self.dim + 1 :]), math.prod(new[dim + 1 :])
                is_same = run > 0 and new_tail > 0 and run * new_tail == self.size * old_tail
                if is_same and (old_tail % new_tail == 0 or new_tail % old_tail == 0):
                    ratio = Fraction(old_tail, new_tail)
                    start = self.start * ratio
                    if start.denominator == 1:
                        found.append(RowLayout(self.axis, dim, run, runs, self.unit * ratio, int(start)))
            prefix *= size
        # Several dims may fit where a size is 1: prefer small groups, then small units, then few runs.
        return min(found, key=lambda layout: (layout.group, layout.unit, layout.runs), default=None)

    @property
    def group(self) -> int:
        """The number of rows in one position: chunks must begin at multiples of it."""
        return self.unit.denominator


def meta_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same sizes, strides and dtype without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
