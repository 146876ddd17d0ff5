"""The tensors of one argument over all elements, and how they are known again in the next call.

A step over a thousand tensors costs what it takes to look at each of them, so a column is looked at as little as
its holder's promises allow: by identity, by addresses, or by all that a plan depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from operator import add, attrgetter

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.graphs.guards import AddressLayoutGuard, MetadataGuard

_nbytes = attrgetter("nbytes")


class TensorColumn(list[Tensor]):
    """One tensor for each element of a list: how lists reach the core. Never changed once made.

    A promise of its holder spares looks at every tensor in every call.

    Args:
        tensors: the tensors.
        is_fixed: neither the tensors nor their memory change while this object lives, and autograd has saved
            none of them that does not require grad. Then the list is known by identity, and not even addresses
            are read again. The memory is kept for as long.
        keeps_layout: a tensor whose address is what it was in the last call with this list has the shape and dtype it
            had then, as parameters do. Then addresses are all that is read again, and how matrices lie there.
        like: the list that promises so for this one, as a list of parameters does for their gradients, of which
            there is a new list in each step.
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

    @property
    def holder(self) -> TensorColumn | None:
        """The list that promises that layouts are kept; None when none does."""
        return self if self._keeps_layout else self._like

    __hash__ = object.__hash__  # type: ignore[assignment]


class BlockScales(TensorColumn):
    """The scales of tensors of 8-bit codes: for each element one number a block (`kernels.fused.blockwise`)."""


class BroadcastColumn(list[Tensor]):
    """One tensor shared by all elements, once for each of them."""


Columns = Sequence[Sequence[Tensor]]
Addresses = list[list[int] | None]
"""For each column where its tensors start, as far as that was looked up in this call; [] for a fixed column."""


def distinct(column: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of a column, a shared one once."""
    return column[:1] if isinstance(column, BroadcastColumn) else column


def is_fixed(column: Sequence[Tensor]) -> bool:
    """Does the holder of this column promise that it stays as it is?"""
    return isinstance(column, TensorColumn) and column.is_fixed


def addresses_of(column: Sequence[Tensor]) -> list[int]:
    """Where the tensors of a column start; nothing for a fixed one."""
    return [] if is_fixed(column) else list(map(Tensor.data_ptr, distinct(column)))


class ImmutableColumns:
    """The fixed lists among some columns, known again by identity and not kept alive."""

    def __init__(self, columns: Columns) -> None:
        self._references = [weakref.ref(c) if is_fixed(c) else None for c in columns]

    def matches(self, columns: Columns) -> bool:
        """Are the same columns fixed, and are they the same lists?"""
        for reference, column in zip(self._references, columns, strict=True):
            if is_fixed(column) if reference is None else reference() is not column:
                return False
        return True


class ColumnGuard:
    """Are the tensors of a column like those of the column it was made for?

    A fixed list is known by identity, tensors that keep their layout by address. Others are compared by type,
    dtype, device, shape, strides and requires_grad, also when they are the same objects: `p.data = ...` and
    `p.requires_grad_()` change them.
    """

    def __init__(self, column: Sequence[Tensor]) -> None:
        self._list = weakref.ref(column) if is_fixed(column) else None
        self._metadata = MetadataGuard(distinct(column))
        self._places: weakref.WeakKeyDictionary[TensorColumn, AddressLayoutGuard] = weakref.WeakKeyDictionary()

    def matches(self, column: Sequence[Tensor], addresses: Addresses) -> bool:
        """Is every tensor like the one in its place?

        Args:
            column: the tensors.
            addresses: where they start is appended to it, or None if that was not looked up.
        """
        if self._list is not None and self._list() is column:
            addresses.append([])
            return True
        holder = _promising(column)
        if holder is None:
            addresses.append(None)
            return self._metadata.matches(distinct(column))
        # Each promise is good for the addresses seen under it, and ends with the list that made it.
        places = self._places.get(holder)
        if places is None or not places.matches(column):
            if not self._metadata.matches(column):
                return False
            places = self._places[holder] = AddressLayoutGuard(column)
        addresses.append(places.addresses)
        return True

    def places(self, column: Sequence[Tensor]) -> AddressLayoutGuard | None:
        """Where the tensors of this column were last seen; None where an address does not tell all about them."""
        holder = _promising(column)
        return None if holder is None else self._places.get(holder)


def _promising(column: Sequence[Tensor]) -> TensorColumn | None:
    """The list whose promise makes addresses tell all there is to know about this column.

    Where autograd records, it matters too which tensors it follows.
    """
    return column.holder if isinstance(column, TensorColumn) and not torch.is_grad_enabled() else None


def _reaches(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor the bytes from the first of its elements to behind the last."""
    if all(map(Tensor.is_contiguous, tensors)):
        return list(map(_nbytes, tensors))
    return [_reach(t) * t.element_size() for t in tensors]


def _reach(tensor: Tensor) -> int:
    """From the first of its elements to behind the last, counted in elements."""
    count = tensor.numel()
    if tensor.is_contiguous() or not count:
        return count
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def written_overlap(columns: Columns, stored: Collection[int]) -> bool:
    """Does memory that the columns of these numbers write overlap what another one, or another element, holds?

    Sorted by where they start, stretches of memory form clusters that touch; a cluster of several with a
    written one among them means that the order of the writes matters.
    """
    if not stored:
        return False
    starts: list[int] = []
    ends: list[int] = []
    written: list[bool] = []
    for index, column in enumerate(columns):
        begins = list(map(Tensor.data_ptr, distinct(column)))
        starts += begins
        ends += map(add, begins, _reaches(distinct(column)))
        written += [index in stored] * len(begins)
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start, end = np.asarray(starts, dtype=np.int64)[order], np.asarray(ends, dtype=np.int64)[order]
    keep = end > start
    start, end, stored = start[keep], end[keep], np.asarray(written)[order][keep]
    if len(start) < 2:
        return False
    opens = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
    cluster = np.cumsum(opens) - 1
    return bool(((np.bincount(cluster) > 1) & (np.bincount(cluster, weights=stored) > 0)).any())
