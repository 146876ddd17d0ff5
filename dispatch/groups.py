"""How the elements of one fused call run: by Triton kernels, by torch op after op, or by the function itself.

Each group holds elements that are alike (device, dtypes, which tensors are 0-d, memory layout) and answers
`run(columns, numbers)`, a column being one argument's tensors in the order of the elements.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from subtensors.dispatch import torch_private
from subtensors.dispatch.graph_capture import NotRecordable, Recording, recording_now
from subtensors.dispatch.trace import Returned, Trace
from subtensors.kernels.launch import Grid, Kernels, bits, to_device
from subtensors.kernels.program import Extent, interpret

logger = logging.getLogger("subtensors.fused")


class Elements(list[Tensor]):
    """One tensor for each element of a list: how lists reach the core. Never changed once made.

    A promise of its holder spares looks at every tensor in every call.

    Args:
        tensors: the tensors.
        is_fixed: neither the tensors nor their memory change while this object lives, and autograd has saved
            none of them that does not require grad. Then the list is known by identity, and not even addresses
            are read again. The memory is kept for as long.
        keeps_layout: a tensor whose address is what it was in the last call with this list has the shape,
            strides and dtype it had then, as parameters do. Then addresses are all that is read again.
        like: the list that promises so for this one, as a list of parameters does for their gradients, of which
            there is a new list in each step.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        is_fixed: bool = False,
        keeps_layout: bool = False,
        like: Elements | None = None,
    ) -> None:
        super().__init__(tensors)
        self.is_fixed = is_fixed
        self._keeps_layout = keeps_layout
        self._like = like
        self._memory = [t.untyped_storage() for t in self] if is_fixed else []

    @property
    def holder(self) -> Elements | None:
        """The list that promises that layouts are kept; None when none does."""
        return self if self._keeps_layout else self._like

    __hash__ = object.__hash__  # type: ignore[assignment]


class Repeated(list[Tensor]):
    """One tensor shared by all elements, once for each of them."""


def distinct(column: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of a column, a shared one once."""
    return column[:1] if isinstance(column, Repeated) else column


def is_fixed(column: Sequence[Tensor]) -> bool:
    """Does the holder of this column promise that it stays as it is?"""
    return isinstance(column, Elements) and column.is_fixed


def addresses_of(column: Sequence[Tensor]) -> list[int]:
    """Where the tensors of a column start; nothing for a fixed one."""
    return [] if is_fixed(column) else list(map(Tensor.data_ptr, distinct(column)))


Columns = Sequence[Sequence[Tensor]]
Addresses = Sequence[list[int] | None]
"""What `addresses_of` gave for each column, where it was asked already in this call."""
Leaves = list[list[Any] | None]
"""For each leaf of the result, one value an element; None for a leaf that is None for all."""


class Group(ABC):
    """Elements of one call that run in one way."""

    reason: str = ""
    """Why not in a faster way; empty when there is none."""
    returned: optree.PyTreeSpec
    """The nest of what the function returns, known once it has been traced or run."""

    @abstractmethod
    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses = ()) -> Leaves:
        """Do the maths to every element."""

    @abstractmethod
    def describe(self) -> str:
        """What runs, in a line or more."""


class MappedGroup(Group):
    """The user's function, called on one element after the other: what every other group must agree with."""

    def __init__(self, call: Callable[[list[Any], Sequence[float]], Any], reason: str) -> None:
        self.call, self.reason = call, reason

    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses = ()) -> Leaves:
        """Call the function once an element."""
        if recording_now() is not None:
            raise NotRecordable(self.describe())
        results = [self.call(list(row), numbers) for row in zip(*columns, strict=True)]
        self.returned = optree.tree_structure(results[0], none_is_leaf=True)
        return [list(leaf) for leaf in zip(*map(self.returned.flatten_up_to, results), strict=True)]

    def describe(self) -> str:
        """One line."""
        return f"the function itself, element by element: {self.reason}"


class TorchGroup(Group):
    """The traced program, through torch's own ops."""

    def __init__(self, trace: Trace, mapped: MappedGroup, reason: str) -> None:
        self.trace, self.mapped, self.reason = trace, mapped, reason
        self.returned = optree.tree_structure(trace.results, none_is_leaf=True)

    @torch.no_grad()
    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses = ()) -> Leaves:
        """Interpret the program once an element."""
        if recording_now() is not None:
            raise NotRecordable(self.describe())
        if written_overlap(columns, self.trace.program.stores):
            return self.mapped.run(columns, numbers)
        scalars = [evaluate(numbers) for evaluate in self.trace.scalars]
        rows = [interpret(self.trace.program, row, scalars) for row in zip(*columns, strict=True)]
        outputs = [list(column) for column in zip(*rows, strict=True)]
        return _leaves(self.trace, columns, outputs)

    def describe(self) -> str:
        """One line."""
        return f"{len(self.trace.program.instructions)} torch ops an element{self.reason and ': ' + self.reason}"


def written_overlap(columns: Columns, stored: Collection[int]) -> bool:
    """Does memory that the columns of these numbers write overlap what another one, or another element, holds?

    Sorted by where they start, stretches of memory form clusters that touch; a cluster of several with a
    written one among them means that the order of the writes matters.
    """
    if not stored:
        return False
    starts, ends, written = [], [], []
    for index, column in enumerate(columns):
        for tensor in distinct(column):
            begin = tensor.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            starts.append(begin)
            ends.append(begin + reach * tensor.element_size() if tensor.numel() else begin)
            written.append(index in stored)
    order = np.argsort(np.asarray(starts, dtype=np.int64), kind="stable")
    start, end = np.asarray(starts, dtype=np.int64)[order], np.asarray(ends, dtype=np.int64)[order]
    keep = end > start
    start, end, stored = start[keep], end[keep], np.asarray(written)[order][keep]
    if len(start) < 2:
        return False
    opens = np.concatenate([[True], start[1:] >= np.maximum.accumulate(end)[:-1]])
    cluster = np.cumsum(opens) - 1
    return bool(((np.bincount(cluster) > 1) & (np.bincount(cluster, weights=stored) > 0)).any())


def _leaves(trace: Trace, columns: Columns, outputs: Sequence[Sequence[Tensor]]) -> Leaves:
    def column(leaf: Returned | None) -> list[Any] | None:
        if leaf is None:
            return None
        return list(columns[leaf.index] if leaf.is_parameter else outputs[leaf.index])

    return [column(leaf) for leaf in optree.tree_leaves(trace.results, none_is_leaf=True)]


class FixedLists:
    """The fixed lists among some columns, known again by identity and not kept alive."""

    def __init__(self, columns: Columns) -> None:
        self._references = [weakref.ref(c) if is_fixed(c) else None for c in columns]

    def matches(self, columns: Columns) -> bool:
        """Are the same columns fixed, and are they the same lists?"""
        return all(
            not is_fixed(column) if reference is None else reference() is column
            for reference, column in zip(self._references, columns, strict=True)
        )


class ColumnGuard:
    """Are the tensors of a column like those of the column it was made for?

    A fixed list is known by identity, tensors that keep their layout by address. Others are compared by type,
    dtype, device, shape, strides and requires_grad, also when they are the same objects: `p.data = ...` and
    `p.requires_grad_()` change them.
    """

    def __init__(self, column: Sequence[Tensor]) -> None:
        self._list = weakref.ref(column) if isinstance(column, Elements) and column.is_fixed else None
        self._metadata = torch_private.MetadataGuard(distinct(column))
        self._addresses: weakref.WeakKeyDictionary[Elements, list[int]] = weakref.WeakKeyDictionary()

    def matches(self, column: Sequence[Tensor], addresses: list[int] | None) -> bool:
        """Is every tensor like the one in its place?

        Args:
            column: the tensors.
            addresses: where they start, if they keep their layout.
        """
        if self._list is not None and self._list() is column:
            return True
        if addresses is None:
            return self._metadata.matches(distinct(column))
        # Each promise is good for the addresses seen under it, and ends with the list that made it.
        holder = column.holder if isinstance(column, Elements) else None
        assert holder is not None
        known = self._addresses.get(holder)
        if known == addresses:
            # The very numbers seen before: comparing them again is a comparison of identities.
            addresses[:] = known
            return True
        if not self._metadata.matches(distinct(column)):
            return False
        self._addresses[holder] = addresses
        return True


@dataclass
class _OnStream:
    """The live numbers on the device, as last written by the launches on one stream."""

    values: list[int]
    """Their bits, which tell -0.0 from 0.0."""
    scalars: Tensor


@dataclass
class _Binding:
    """A pointer table for one set of addresses."""

    fixed: FixedLists
    addresses: list[list[int]]
    """Where the tensors of the other lists start."""
    table: Tensor
    address: int
    """The table's."""
    overlaps: bool
    streams: dict[int, _OnStream] = field(default_factory=dict)
    is_captured: bool = False


class KernelGroup(Group):
    """The traced program as Triton kernels over a pointer table.

    Args:
        trace: the program; every instruction has a formula.
        kernels: its kernels.
        columns: the tensors of the first call; later calls have the same shapes, dtypes and strides.
        mapped: what to run instead when the tensors overlap in memory.
        copies: do some elements have strides of their own? Then those are copied in and out.
    """

    # A training loop has one set of addresses a parameter group, or a few that the allocator rotates through.
    BINDINGS = 8

    def __init__(self, trace: Trace, kernels: Kernels, columns: Columns, mapped: MappedGroup, copies: bool) -> None:
        self.trace, self.kernels, self.mapped, self.copies = trace, kernels, mapped, copies
        self.returned = optree.tree_structure(trace.results, none_is_leaf=True)
        self.parameters = trace.program.parameters
        pattern = next(
            (c for c, p in zip(columns, self.parameters, strict=True) if p.extent is Extent.ELEMENT), columns[0]
        )
        self.device = next(c[0].device for c, p in zip(columns, self.parameters, strict=True) if not p.on_host)
        self.is_cuda = self.device.type == "cuda"
        self.grid = Grid(kernels, [t.numel() for t in pattern], self.device)
        self.shapes = [(t.shape, torch.empty_like(t, device="meta").stride()) for t in pattern]
        self.hosts = [i for i, p in enumerate(self.parameters) if p.on_host]
        self.kinds = [*trace.program.scalars, *(_number_kind(self.parameters[i].dtype) for i in self.hosts)]
        stored = trace.program.stores
        self.observed = {i for i in stored if not is_fixed(columns[i]) or any(t.requires_grad for t in columns[i])}
        outputs = [trace.program.value(v) for v in trace.program.outputs]
        self.arenas = [(self.grid.arena if v.extent is Extent.ELEMENT else self.grid.count, v.dtype) for v in outputs]
        self.returns = any(leaf is not None for leaf in optree.tree_leaves(trace.results, none_is_leaf=True))
        self.bindings: list[_Binding] = []
        self.tables = 0
        self.stream = 0
        """The stream of the last eager call."""
        self.reason = "elements with strides of their own are copied in and out" if copies else ""
        self.seed = torch.zeros((), dtype=torch.int64, device=self.device)
        self._refuse_empty_extremes()

    def _refuse_empty_extremes(self) -> None:
        if (self.grid.sizes > 0).all():
            return
        for step in self.trace.program.instructions:
            if step.name in ("amax", "amin"):
                raise RuntimeError(f"{step.name} of an empty tensor: a maximum needs at least one element")

    def run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses = ()) -> Leaves:
        """Launch the kernels."""
        if not self.is_cuda or self.device.index == torch.cuda.current_device():
            return self._run(columns, numbers, addresses)
        with torch.cuda.device(self.device):
            return self._run(columns, numbers, addresses)

    def _run(self, columns: Columns, numbers: Sequence[float], addresses: Addresses) -> Leaves:
        if (recording := recording_now()) is not None:
            return self._record(recording, columns, numbers)
        if self.copies:
            originals = columns
            columns = [
                [t.contiguous() if p.extent is Extent.ELEMENT else t for t in column]
                for column, p in zip(columns, self.parameters, strict=True)
            ]
            addresses = ()
        is_capturing = self.is_capturing()
        binding = self._bind(columns, addresses, is_capturing)
        if binding.overlaps:
            return self.mapped.run(originals if self.copies else columns, numbers)
        if self.is_cuda and not is_capturing:
            self.stream = torch_private.current_stream(self.device)
        values = [evaluate(numbers) for evaluate in self.trace.scalars]
        values += [columns[i][0].item() for i in self.hosts]
        scalars = self._scalars(binding, values, is_capturing)
        arenas = self.new_arenas()
        seed = torch.randint(2**62, (), device=self.device) if self.kernels.is_seeded else self.seed
        self.grid.launch(binding.address, scalars.data_ptr(), seed.data_ptr(), arenas, self.stream)
        if self.copies:
            for parameter in self.trace.program.stores:
                for original, copy in zip(originals[parameter], columns[parameter], strict=True):
                    if original is not copy:
                        original.copy_(copy)
            columns = originals
        for parameter in self.observed:
            # Torch's ops tell autograd that they wrote, lest it use what it saved; so must a kernel it does not know.
            torch.autograd.graph.increment_version(columns[parameter])
        return self._results(columns, arenas)

    def _record(self, recording: Recording, columns: Columns, numbers: Sequence[float]) -> Leaves:
        """Give the launch to a recording."""
        if self.copies:
            raise NotRecordable(self.reason)
        if written_overlap(columns, self.trace.program.stores):
            raise NotRecordable(self.mapped.reason)
        return self._results(columns, recording.launch(self, columns, numbers))

    def new_arenas(self) -> list[Tensor]:
        """Memory for the outputs of a launch."""
        return [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in self.arenas]

    def _results(self, columns: Columns, arenas: list[Tensor]) -> Leaves:
        if not self.returns:
            return []
        return _leaves(
            self.trace,
            columns,
            [self._outputs(arena, v) for arena, v in zip(arenas, self.trace.program.outputs, strict=True)],
        )

    def _outputs(self, arena: Tensor, value: int) -> list[Tensor]:
        is_tiled = self.trace.program.value(value).extent is Extent.ELEMENT
        # `.data`: tensors in their own right, whose versions autograd counts one by one.
        return [part.data for part in (self._parts(arena) if is_tiled else arena.unbind())]

    def _parts(self, arena: Tensor) -> list[Tensor]:
        offsets = self.grid.offsets.tolist()
        if self.copies:
            return [arena[o : o + s.numel()].view(s) for (s, _), o in zip(self.shapes, offsets, strict=True)]
        return [arena.as_strided(s, stride, o) for (s, stride), o in zip(self.shapes, offsets, strict=True)]

    def _bind(self, columns: Columns, known: Addresses, is_capturing: bool) -> _Binding:
        addresses = [
            [] if i in self.hosts else a if a is not None else addresses_of(c)
            for i, (c, a) in enumerate(zip(columns, known or itertools.repeat(None), strict=False))
        ]
        for position, binding in enumerate(self.bindings):
            if binding.addresses == addresses and binding.fixed.matches(columns):
                if position:
                    self.bindings.insert(0, self.bindings.pop(position))
                if is_capturing and not binding.is_captured:
                    binding.is_captured = True
                    _captured.append((self, binding))
                return binding
        logger.debug("%s: new addresses, a new pointer table", self.trace.program.name)
        nowhere = [0] * self.grid.count
        pointers = [
            nowhere if i in self.hosts else list(map(Tensor.data_ptr, column)) for i, column in enumerate(columns)
        ]
        overlaps = written_overlap(columns, self.trace.program.stores)
        table = self.grid.table(pointers)
        binding = _Binding(FixedLists(columns), addresses, table, table.data_ptr(), overlaps)
        self.tables += 1
        if is_capturing:
            # Its table is filled at replay, so no eager call may use it.
            _captured.append((self, binding))
            return binding
        self.bindings.insert(0, binding)
        del self.bindings[self.BINDINGS :]
        return binding

    def is_capturing(self) -> bool:
        """Is this call recorded into a CUDA graph rather than run?"""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def _scalars(self, binding: _Binding, numbers: list[float], is_capturing: bool) -> Tensor:
        """The numbers on the device; written again only when one has changed.

        A graph captured with the numbers of the eager call before it reads what later eager calls write, so
        they stay live; one captured with others has numbers of its own.
        """
        values = bits(numbers, self.kinds)
        state = binding.streams.get(self.stream)
        if state is not None and state.values == values:
            return state.scalars
        fresh = to_device(np.asarray([*values, 0], dtype=np.int64), self.device)
        if is_capturing:
            return fresh
        if state is None:
            binding.streams[self.stream] = state = _OnStream(values, fresh)
        else:
            state.values = values
            state.scalars.copy_(fresh)
        return state.scalars

    def describe(self) -> str:
        """The kernels, a line each."""
        lines = [
            f"{self.grid.count} tensors, {self.grid.sizes.sum()} elements, {self.grid.total} tiles on {self.device}"
        ]
        for kernel in self.kernels.kernels:
            what = "elements" if kernel.segment.extent is Extent.ELEMENT else "numbers per tensor"
            lines.append(f"  kernel {kernel.name}: {len(kernel.segment.steps)} values over {what}")
        return "\n".join([*lines, *([f"  {self.reason}"] if self.reason else [])])


_captured: list[tuple[KernelGroup, _Binding]] = []
"""What graphs read and write, kept for good: a graph does not say when it dies."""


def _number_kind(dtype: torch.dtype) -> type[float] | type[int]:
    return float if dtype.is_floating_point else int
