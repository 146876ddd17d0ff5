"""Packing: the elements of a list as views of one flat tensor per device and dtype.

Element i of group k is `flats[k].as_strided(shapes[i], strides[i], offsets[i])`. Offsets are multiples of 64 values, so
that lists of one structure and different dtypes have one layout, and every element starts on at least 64 bytes.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import optree
import torch

from subtensors.dispatch.graphs.guards import AddressSnapshot, LayoutSnapshot, tensor_properties
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals.dispatcher import is_traced
from subtensors.dispatch.torch_internals.memory import use_count
from subtensors.lists.tree_structure import leaf_name

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False, repr=False)
class PackedLayout:
    """The place of each element in the flats; equal layouts are one object (`unique`), so that `is` compares them."""

    treespec: optree.PyTreeSpec
    """The structure of the list."""
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    """The strides of each element, in values."""
    groups: tuple[int, ...]
    """The index of the flat that each element lies in."""
    offsets: tuple[int, ...]
    """The offset of each element in its flat, in values."""
    sizes: tuple[int, ...]
    """The number of values of each flat."""

    def unique(self) -> PackedLayout:
        """Return the one layout that equals this one."""
        return _layouts.setdefault(self._fields(), self)

    @cached_property
    def has_scalars(self) -> bool:
        """Return whether an element is 0-d."""
        return any(not shape for shape in self.shapes)

    @cached_property
    def has_ties(self) -> bool:
        """Return whether an element occurs twice."""
        starts = [(g, o) for g, o, s in zip(self.groups, self.offsets, self.shapes, strict=True) if s.numel()]
        return len(set(starts)) < len(starts)

    def _fields(self) -> tuple[Hashable, ...]:
        return self.treespec, self.shapes, self.strides, self.groups, self.offsets, self.sizes

    def __reduce__(self) -> tuple[object, ...]:
        return _unique_layout, self._fields()

    def __repr__(self) -> str:
        return f"Layout({len(self.shapes)} elements in {len(self.sizes)} flats)"

    def stable_hash(self) -> str:
        """Return a hash of the layout that is the same in every process."""
        parts = (str(self.treespec), *self._fields()[1:])
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def view(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elements as views of the flats."""
        geometry = zip(self.groups, self.shapes, self.strides, self.offsets, strict=True)
        return [flats[g].as_strided(shape, stride, offset) for g, shape, stride, offset in geometry]


_layouts: WeakValueDictionary[tuple[Hashable, ...], PackedLayout] = WeakValueDictionary()


def _unique_layout(*fields: object) -> PackedLayout:
    return PackedLayout(*fields).unique()  # type: ignore[arg-type]


class Packed:
    """The flats of a packed list and their layout; its elements are compared in full once, then by a check in C++.

    Example:
        >>> import optree
        >>> t = [torch.ones(2), torch.zeros(3)]
        >>> packed = pack(t, optree.tree_structure([0, 1]))
        >>> packed.holds(t)
        True
        >>> t[1].data = torch.zeros(3)
        >>> packed.holds(t)
        False
    """

    any_requires_grad: bool | None = None
    """True if an element required grad at the last full check; None before the first one."""

    def __init__(self, flats: list[torch.Tensor], layout: PackedLayout) -> None:
        self.flats, self.layout = flats, layout
        self._guards: tuple[AddressSnapshot, LayoutSnapshot] | None = None

    def metadata(self) -> list[tuple[torch.dtype, torch.device, torch.Size]]:
        """Return the dtype, device and shape of each element."""
        flats = [self.flats[g] for g in self.layout.groups]
        return [(flat.dtype, flat.device, shape) for flat, shape in zip(flats, self.layout.shapes, strict=True)]

    @cached_property
    def _addresses(self) -> list[int]:
        """The address of each element; 0 for an empty one."""
        flats = [self.flats[g] for g in self.layout.groups]
        places = zip(flats, self.layout.offsets, self.layout.shapes, strict=True)
        return [flat.data_ptr() + o * flat.itemsize if shape.numel() else 0 for flat, o, shape in places]

    def holds(self, elements: Sequence[torch.Tensor]) -> bool:
        """Return whether each element is still where it was packed, with the same shape and strides."""
        if type(self.flats[0]) is not torch.Tensor:
            return True  # traced tensors have no address, and no one can set their .data
        if self._guards is not None and self._guards[0].matches(elements) and self._guards[1].matches(elements):
            return True
        self._guards = None
        are_in_place = (
            list(map(torch.Tensor.data_ptr, elements)) == self._addresses
            and tuple(map(torch.Tensor.stride, elements)) == self.layout.strides
            and tuple([t.shape for t in elements]) == self.layout.shapes
        )
        if are_in_place:
            self._guards = AddressSnapshot(elements, with_layout=False), LayoutSnapshot(elements)
            self.any_requires_grad = any(t.requires_grad for t in elements)
        return are_in_place


def pack(tensors: Sequence[torch.Tensor], treespec: optree.PyTreeSpec) -> Packed:
    """Move the tensors into one new flat per device and dtype; each becomes a view of its place there.

    Raises:
        ValueError: two elements overlap in memory without being the same, or one is not a strided torch tensor.
    """
    for index, t in enumerate(tensors):
        if t.is_meta:
            raise ValueError(
                f"pack() can't move {leaf_name(treespec, index)}: it is on the meta device, where tensors have no "
                "memory; pack the list on a device with memory"
            )
    ties = _ties(tensors, treespec)
    keys: dict[tuple[torch.device, torch.dtype], int] = {}
    sizes: list[int] = []
    groups: list[int] = []
    offsets: list[int] = []
    for i, t in enumerate(tensors):
        group = keys.setdefault((t.device, t.dtype), len(keys))
        if group == len(sizes):
            sizes.append(0)
        groups.append(group)
        if i in ties:
            offsets.append(offsets[ties[i]])
            continue
        offsets.append(sizes[group])
        sizes[group] += -(-t.numel() // _ALIGNMENT) * _ALIGNMENT
    with torch.no_grad():
        flats = [torch.zeros(n, dtype=d, device=v) for n, (v, d) in zip(sizes, keys, strict=True)]
        # empty_like keeps dense strides, and makes others dense in the same order, as a pointwise op does.
        strides = tuple(torch.empty_like(t, device="meta").stride() for t in tensors)
        shapes = tuple(t.shape for t in tensors)
        layout = PackedLayout(treespec, shapes, strides, tuple(groups), tuple(offsets), tuple(sizes)).unique()
        places = layout.view(flats)
        for place, t in zip(places, tensors, strict=True):
            place.copy_(t)
        for place, t in zip(places, tensors, strict=True):
            t.data = place
    return Packed(flats, layout)


def are_private(tensors: list[torch.Tensor]) -> bool:
    """Return whether only this list refers to these tensors, and each is a plain tensor without grad or attributes.

    >>> are_private([torch.ones(2)])
    True
    >>> shared = torch.ones(2)
    >>> are_private([shared])
    False
    """
    [unshared] = map(sys.getrefcount, [object()])
    if any(count != unshared for count in map(sys.getrefcount, tensors)):
        return False
    return not any(
        type(t) is not torch.Tensor
        or t.requires_grad
        or t.grad is not None
        or vars(t)
        or weakref.getweakrefcount(t)
        or use_count(t) != 1
        for t in tensors
    )


def _ties(tensors: Sequence[torch.Tensor], treespec: optree.PyTreeSpec) -> dict[int, int]:
    """Map each element that repeats another to the first one's index; raise ValueError for a partial overlap."""
    ties: dict[int, int] = {}
    spans: dict[tuple[torch.device, int], list[tuple[int, int, int]]] = {}
    for i, t in enumerate(tensors):
        is_dense = t.layout is torch.strided and not t.is_nested and not t.is_quantized
        if not is_dense or type(t) not in (torch.Tensor, torch.nn.Parameter):
            if is_traced(t):
                raise RuleError(
                    "pack() has no rule under torch.compile: it moves tensors into memory of its own, so pack the list "
                    "outside of the compiled function"
                )
            raise ValueError(
                "pack() moves tensors into memory of its own, strided ones of torch's own types; "
                f"{leaf_name(treespec, i)} is a {t.layout} {type(t).__name__}"
            )
        if t.numel():
            start = t.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
            spans.setdefault((t.device, t.untyped_storage().data_ptr()), []).append(
                (start, start + reach * t.element_size(), i)
            )
    for in_storage in spans.values():
        in_storage.sort()
        end, last = -1, -1
        for start, stop, i in in_storage:
            if start < end:
                if tensor_properties(tensors[i]) != tensor_properties(tensors[last]):
                    raise ValueError(
                        f"pack() can't move {leaf_name(treespec, last)} and {leaf_name(treespec, i)}: they share part "
                        f"of their memory; clone one of them"
                    )
                ties[i] = ties.get(last, last)
            elif stop > end:
                end, last = stop, i
    return ties
