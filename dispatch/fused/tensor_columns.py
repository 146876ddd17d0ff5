"""The tensors of one argument over all elements, and guards that recognize them in the next call.

Checking each of a thousand tensors takes as long as a step over them, so a column is checked only as far as the
promises of its holder require: by identity, by addresses, or by everything that a plan depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs.guards import AddressSnapshot, LayoutSnapshot
from subtensors.kernels.memory.from_address import tensor_from_address


class TensorColumn(list[Tensor]):
    """One tensor for each element of a list, never changed once made: the form in which lists are dispatched.

    Promises of the list's holder save checks of every tensor in every call.

    Args:
        tensors: the tensors.
        is_fixed: promises that neither the tensors nor their memory change while this object lives, and that autograd
            has saved none of them that does not require grad. Then the list is recognized by identity, and not even
            addresses are read again. The list keeps the memory alive.
        keeps_layout: promises that a tensor at an unchanged address has an unchanged shape and dtype, as parameters
            have. Then only addresses, and the layouts of matrices, are read again.
        like: the list whose `keeps_layout` holds for this one too, as a list of parameters has for their gradients, of
            which there is a new list in each step.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        is_fixed: bool = False,
        keeps_layout: bool = False,
        like: TensorColumn | None = None,
    ) -> None:
        super().__init__(tensors)
        self.is_fixed = is_fixed
        self._keeps_layout = keeps_layout
        self._like = like
        self._memory = [t.untyped_storage() for t in self] if is_fixed else []
        self._side_by_side: dict[tuple[int, int], Tensor | None] = {}

    @property
    def holder(self) -> TensorColumn | None:
        """The list that promises that layouts are kept; None when none does."""
        return self if self._keeps_layout else self._like

    @cached_property
    def flat_views(self) -> list[Tensor]:
        """The tensors of a fixed list, which are contiguous, as 1-D views, made once."""
        return [t.detach().view(-1) for t in self]

    def as_one(self, indices: Sequence[int]) -> Tensor | None:
        """The elements at some indices as one 1-D view, where the list is fixed and they lie side by side."""
        key = indices[0], indices[-1]
        if not self.is_fixed or key[1] - key[0] + 1 != len(indices):
            return None
        if key not in self._side_by_side:
            self._side_by_side[key] = _as_one([self[i] for i in indices])
        return self._side_by_side[key]

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__  # by identity, as weak references to it compare


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The elements of some CPU tensors as a 1-D view of their memory, if they are contiguous and lie side by side."""
    first, size = tensors[0], 0
    for t in tensors:
        is_next = t.data_ptr() == first.data_ptr() + size and t.dtype == first.dtype and t.device.type == "cpu"
        if not is_next or not t.is_contiguous():
            return None
        size += t.nbytes
    return tensor_from_address(first.data_ptr(), size, first.device, tuple(tensors)).view(first.dtype)


class BlockScales(TensorColumn):
    """The scales of tensors of 8-bit codes: for each element one number a block (`kernels.fused.blockwise`)."""


class BroadcastColumn(list[Tensor]):
    """One tensor shared by all elements, once for each of them."""


Columns = Sequence[Sequence[Tensor]]
Addresses = list[Sequence[object] | None]
"""For each column what `addresses_of` reads; None where this call did not read them."""


def unique_tensors(column: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of a column, a shared one once."""
    return column[:1] if isinstance(column, BroadcastColumn) else column


def is_fixed(column: Sequence[Tensor]) -> bool:
    """Return whether the holder of a column promises that it never changes."""
    return isinstance(column, TensorColumn) and column.is_fixed


def addresses_of(column: Sequence[Tensor]) -> Sequence[object]:
    """The addresses of the tensors of a column; a weak reference to a fixed one, which equals no other column's."""
    return [weakref.ref(column)] if is_fixed(column) else [*map(Tensor.data_ptr, unique_tensors(column))]


class ColumnGuard:
    """A guard that the tensors of a column are like those of the column it was made for.

    A fixed list is recognized by identity, tensors that keep their layout by address. Others are compared by type,
    dtype, device, shape, strides and requires_grad, also when they are the same objects: `p.data = ...` and
    `p.requires_grad_()` change them.
    """

    def __init__(self, column: Sequence[Tensor]) -> None:
        self._list = weakref.ref(column) if is_fixed(column) else None
        self._metadata = LayoutSnapshot(unique_tensors(column))
        self._known: weakref.WeakKeyDictionary[TensorColumn, AddressSnapshot] = weakref.WeakKeyDictionary()

    def matches(self, column: Sequence[Tensor], addresses: Addresses) -> bool:
        """Return whether every tensor is like the one at its position.

        Args:
            column: the tensors.
            addresses: the tensors' addresses are appended to it, or None if they were not read.
        """
        if self._list is not None and self._list() is column:
            addresses.append([self._list])
            return True
        holder = _promise_holder(column)
        if holder is None:
            addresses.append(None)
            return self._metadata.matches(unique_tensors(column))
        # A promise holds for the addresses seen under it, and ends with the list that made it.
        known = self._known.get(holder)
        if known is None or not known.matches(column):
            if not self._metadata.matches(column):
                return False
            known = self._known[holder] = AddressSnapshot(column)
        addresses.append(known.addresses)
        return True

    def known_addresses(self, column: Sequence[Tensor]) -> AddressSnapshot | None:
        """The addresses last seen under this column's promise; None where it has none, or in grad mode."""
        holder = _promise_holder(column)
        return None if holder is None else self._known.get(holder)


def _promise_holder(column: Sequence[Tensor]) -> TensorColumn | None:
    """The list whose promise lets addresses alone identify the tensors of this column; None without one.

    In grad mode there is none: `requires_grad` of each tensor matters, too.
    """
    return column.holder if isinstance(column, TensorColumn) and not torch.is_grad_enabled() else None


class WrittenOverlap:
    """The check that columns of one layout do not overlap in memory that is written, made where an address changed.

    Memory ranges, sorted by start, form clusters of ranges that overlap; in a cluster of several ranges with a written
    one among them, the order of the writes matters.

    Args:
        stored: the indices of the columns that are written.
    """

    MAX_KNOWN = 8
    """The sets of addresses whose answer is kept: a loop has one, or a few that an allocator rotates through."""

    def __init__(self, stored: Collection[int]) -> None:
        self._stored = stored
        self._layout: tuple[np.ndarray, np.ndarray] | None = None
        """For each tensor, the bytes from its first element to the end of its last, and whether it is written."""
        self._known: list[tuple[list[Sequence[object]], bool]] = []

    def check(self, columns: Columns, known: Addresses | None = None) -> bool:
        """Return whether memory of a stored column overlaps that of another column or element.

        Args:
            columns: with the shapes, dtypes and strides of those of the first call.
            known: the addresses of the columns, as far as they were read; the others are read into it.
        """
        if not self._stored:
            return False
        known = [None] * len(columns) if known is None else known
        addresses = [addresses_of(c) if own is None else own for c, own in zip(columns, known, strict=True)]
        known[:] = addresses
        earlier = self._known  # another thread may replace it
        for before, overlaps in earlier:
            if before == addresses:
                return overlaps
        found = self._find(columns)
        self._known = [(addresses, found), *earlier][: self.MAX_KNOWN]
        return found

    def _find(self, columns: Columns) -> bool:
        unique = list(map(unique_tensors, columns))
        if self._layout is None:
            # Most are contiguous, and cost no call of a function.
            spans = [
                (t.numel() if t.is_contiguous() else _span(t)) * t.element_size() for column in unique for t in column
            ]
            stored = np.repeat([i in self._stored for i in range(len(unique))], list(map(len, unique)))
            self._layout = np.asarray(spans, dtype=np.int64), stored
        nbytes, written = self._layout
        start = np.asarray([a for column in unique for a in map(Tensor.data_ptr, column)], dtype=np.int64)
        order = np.argsort(start, kind="stable")
        order = order[nbytes[order] > 0]
        start, end = start[order], start[order] + nbytes[order]
        if (start[1:] >= end[:-1]).all():
            return False
        opens = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
        cluster = np.cumsum(opens) - 1
        return bool(((np.bincount(cluster) > 1) & (np.bincount(cluster, weights=written[order]) > 0)).any())


def _span(tensor: Tensor) -> int:
    """The number of elements in memory from the first to the last, gaps included."""
    return tensor.numel() and sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
