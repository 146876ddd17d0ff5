"""The layout of a padded tensor for the masked kernels: independent rows, and columns that an op works along.

The dimensions that an op keeps are the rows; those that it works along (the softmax dimension, reduced dimensions) are
the columns. Each becomes at most two levels of a size and a stride,

    offset = r1 * row_strides[0] + r0 * row_strides[1] + c1 * column_strides[0] + c0 * column_strides[1],

by merging dimensions that lie in memory as one. A tile spans `r0` and `c0`; `r1` and `c1` are constant within it, so
that neighbouring lanes touch neighbouring memory whichever of the two is contiguous. Rows are numbered in the order of
their dimensions: a result with one number per row has that of a row at `r1 * rows[1] + r0`.

A padded dimension lies within one level. Its index is `level // div % mod`; a *slot* holds these three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.kernels.runtime.custom_ops import is_dense
from subtensors.kernels.runtime.valid_lengths import ValidLength, normalize_dims

R1, R0, C1, C0 = range(4)
"""The levels, as the kernels number them."""

NO_BATCH = -1
"""In place of a level, for a valid length with one size for all rows."""

TILE_ELEMENTS = 4096
"""The most elements of a tile: 32 for each thread of four warps."""

WARP_ELEMENTS = 1024
"""The most elements of whole rows that one warp holds: 32 a thread."""

MIN_ADJACENT_ROWS = 64
"""The fewest rows of a tile if rows are adjacent in memory: 128 bytes of half precision, one memory access."""


@dataclass(frozen=True)
class Slot:
    """The level, divisor and modulus that give a padded dimension's index, and those of its batch index."""

    level: int
    div: int
    mod: int
    batch_level: int
    batch_div: int
    batch_mod: int

    @property
    def is_of_rows(self) -> bool:
        """Return whether the slot is the same for all columns."""
        return self.level < C1 and self.batch_level < C1


@dataclass(frozen=True)
class MaskedLayout:
    """The walk over tensors of one shape and stride."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    row_strides: tuple[int, int]
    column_strides: tuple[int, int]
    slots: tuple[Slot, ...]
    """The slots of the valid lengths, those of rows first; `order` holds the lengths' numbers."""
    order: tuple[int, ...]
    row_shape: tuple[int, ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes and strides in the order in which every kernel takes them."""
        return (*self.rows, *self.columns, *self.row_strides, *self.column_strides)

    @functools.cached_property
    def statics(self) -> tuple[tuple[int, bool, int, bool], ...]:
        """The compile-time constants of each slot: its levels, and whether the index wraps around in them."""
        return tuple((s.level, s.mod > 0, s.batch_level, s.batch_mod > 0) for s in self.slots)

    @functools.cached_property
    def row_slots(self) -> int:
        """The number of leading slots that are the same for all columns."""
        return sum(slot.is_of_rows for slot in self.slots)

    def slot_arguments(self, lengths: Sequence[ValidLength]) -> tuple[tuple[Tensor | int, ...], ...]:
        """Return the run-time arguments of each slot."""
        return tuple(
            (lengths[i].sizes, slot.div, slot.mod, slot.batch_div, slot.batch_mod)
            for i, slot in zip(self.order, self.slots, strict=True)
        )

    @property
    def is_flat(self) -> bool:
        """Return whether columns lie side by side in memory."""
        return self.column_strides[1] == 1

    @property
    def _neighbours(self) -> int:
        """The minimum number of rows in a tile, for wide loads where rows lie side by side in memory."""
        return MIN_ADJACENT_ROWS if self.row_strides[1] == 1 and self.column_strides[1] != 1 else 1

    def fits_whole_rows(self, limit: int) -> bool:
        """Return whether a tile of at most `limit` elements can hold whole rows."""
        return self.columns[0] == 1 and power_of_two(self.columns[1]) * self._neighbours <= limit

    @property
    def bounds_vary(self) -> bool:
        """Return whether the valid part of `c0` depends on `c1`."""
        return any(C1 in (slot.level, slot.batch_level) for slot in self.slots[self.row_slots :])

    def lanes(self, block_columns: int, element_size: int) -> int:
        """Return the number of columns that four warps load at once; a wider tile is a loop over registers."""
        loaded = LOAD_BYTES // element_size
        return max(min(block_columns, loaded // self._neighbours), 1)

    def tile(self, whole_rows: bool = False) -> tuple[int, int]:
        """Return the rows and columns of a tile, powers of two; with `whole_rows`, a tile has all of `c0`."""
        rows, columns = power_of_two(self.rows[1]), power_of_two(self.columns[1])
        min_rows = min(rows, self._neighbours)
        block_columns = columns if whole_rows else min(columns, max(TILE_ELEMENTS // min_rows, 1))
        return max(min(rows, TILE_ELEMENTS // block_columns), min_rows), block_columns

    def whole_rows(self) -> tuple[int, int, int]:
        """Return the rows, columns and warps of a tile of whole rows; one warp, which needs no sync, if possible."""
        if self._neighbours > 1:
            block_rows, block_columns = self.tile(whole_rows=True)
            return block_rows, block_columns, warps(block_rows * block_columns)
        block_columns = power_of_two(self.columns[1])
        block_rows = min(power_of_two(self.rows[1]), max(min(WARP_ELEMENTS, TILE_ELEMENTS) // block_columns, 1))
        return block_rows, block_columns, max(block_rows * block_columns // WARP_ELEMENTS, 1)


LOAD_BYTES = 2048
"""Bytes that four warps load at once: 16 a thread."""


def warps(elements: int) -> int:
    """Return the number of warps for a tile of this many elements, at most 32 a thread."""
    return 4 if elements <= 4096 else 8 if elements <= 8192 else 16


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def plan(
    x: Tensor, columns: Sequence[int], lengths: Sequence[ValidLength], whole_columns: bool = False
) -> tuple[Tensor, MaskedLayout]:
    """Plan the walk of a kernel along some dimensions of `x`.

    Args:
        x: the padded tensor.
        columns: the dimensions that the kernel works along.
        lengths: the padded dimensions.
        whole_columns: whether columns that lie in memory as one are one level. Otherwise, and in rows, a padded
            dimension starts a level where possible, so that its valid part comes first.

    Returns:
        `x`, or a copy that can be walked, and the layout of its shape and strides.

    Raises:
        ValueError: a dimension is out of range, or a ragged length has another number of rows than its batch.
    """
    lengths = normalize_dims(lengths, x.dim())
    for length in lengths:
        if length.sizes.dim() and length.sizes.shape != (x.shape[length.batch_dim],):
            raise ValueError(
                f"the sizes of dim {length.dim} are one or one a row, () or ({x.shape[length.batch_dim]},); "
                f"got {tuple(length.sizes.shape)}"
            )
    shapes = tuple((e.dim, e.batch_dim if e.sizes.dim() else NO_BATCH) for e in lengths)
    wanted = tuple(sorted({d % x.dim() for d in columns}))
    if not is_dense(x):
        x = x.contiguous()
    layout = _layout(tuple(x.shape), x.stride(), wanted, shapes, whole_columns)
    if layout is None:
        # Rows first, then columns: as one level each.
        order = [d for d in range(x.dim()) if d not in wanted] + list(wanted)
        x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
        layout = _layout(tuple(x.shape), x.stride(), wanted, shapes, whole_columns)
        assert layout is not None, "a copy in the order of rows and columns has one level of each"
    return x, layout


def with_strides_of(tensor: Tensor, x: Tensor) -> Tensor:
    """Return the tensor, or a copy with the strides of `x`."""
    if tensor.stride() == x.stride():
        return tensor
    return torch.empty_strided(x.shape, x.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], strides: tuple[int, ...], columns: tuple[int, ...], lengths: tuple[tuple[int, int], ...],
    whole_columns: bool,
) -> MaskedLayout | None:  # fmt: skip
    """Return the layout; None if rows or columns need more than two levels."""
    rows = tuple(d for d in range(len(shape)) if d not in columns)
    levels: list[list[int]] = []
    for dims in (rows, columns):
        merged = _merged_dims(dims, shape, strides)
        if len(merged) > 2:
            return None
        if len(merged) == 1 and not (whole_columns and dims is columns):
            merged = _split(merged[0], shape, {dim for dim, _ in lengths})
        levels += [[]] * (2 - len(merged)) + merged
    places = {
        d: (level, math.prod(shape[e] for e in dims[dims.index(d) + 1 :]))
        for level, dims in enumerate(levels)
        for d in dims
    }

    def place(dim: int) -> tuple[int, int, int]:
        """Return level, divisor and modulus of a dimension's index; modulus 0 if it is outermost and doesn't wrap."""
        level, div = places[dim]
        return level, div, 0 if levels[level][0] == dim else shape[dim]

    slots = []
    for dim, batch_dim in lengths:
        slots.append(Slot(*place(dim), *(place(batch_dim) if batch_dim != NO_BATCH else (NO_BATCH, 1, 0))))
    order = tuple(sorted(range(len(slots)), key=lambda i: not slots[i].is_of_rows))
    sizes = [math.prod(shape[d] for d in dims) for dims in levels]
    steps = [_step(dims, shape, strides) for dims in levels]
    return MaskedLayout(
        (sizes[R1], sizes[R0]),
        (sizes[C1], sizes[C0]),
        (steps[R1], steps[R0]),
        (steps[C1], steps[C0]),
        tuple(slots[i] for i in order),
        order,
        tuple(shape[d] for d in rows),
    )


def _merged_dims(dims: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[list[int]]:
    """Group neighbouring dimensions that can be walked as one."""
    runs: list[list[int]] = []
    for d in dims:
        step = _step(runs[-1], shape, strides) if runs else 0
        if runs and (shape[d] == 1 or step in (0, shape[d] * strides[d])):
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


def _split(run: list[int], shape: Sequence[int], padded: set[int]) -> list[list[int]]:
    """Split a run of dimensions before its last padded one, if the rest is large enough to fill tiles."""
    for at in range(len(run) - 1, 0, -1):
        if run[at] in padded and math.prod(shape[d] for d in run[at:]) >= MIN_ADJACENT_ROWS:
            return [run[:at], run[at:]]
    return [run]


def _step(dims: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the stride of a run of dimensions; 0 if all have size 1."""
    return next((strides[d] for d in reversed(dims) if shape[d] != 1), 0)
