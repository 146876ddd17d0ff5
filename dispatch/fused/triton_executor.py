"""The executor whose traced program runs as Triton kernels over a pointer table."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from subtensors.dispatch.fused.executors import Executor, Leaves, result_leaves
from subtensors.dispatch.fused.tensor_columns import (
    Addresses,
    Columns,
    addresses_of,
    is_fixed,
)
from subtensors.dispatch.fused.trace import Trace
from subtensors.dispatch.graphs.dynamic_scalars import NotRecordable, Recordable, current_scalars
from subtensors.dispatch.graphs.fused_graph import Recording
from subtensors.kernels.fused.launch import ALIGNMENT, Exchange, Grid, KernelSet, bits
from subtensors.kernels.fused.program import Shape
from subtensors.kernels.runtime import graph_lifetime
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.launcher import current_stream

logger = logging.getLogger("subtensors.fused")

_requires_grad = attrgetter("requires_grad")


@dataclass
class PointerTable:
    """A pointer table for one set of addresses."""

    addresses: list[Sequence[object]]
    """The columns as `addresses_of` reads them; a parameter on the host has none."""
    table: Tensor
    address: int
    """The address of `table`."""
    stream: int
    """The stream that fills it, whose launches read it."""
    scalars: tuple[list[int], Tensor] | None = None
    """The bits of the dynamic scalars (which differ for -0.0 and 0.0), and their memory on the device."""


class TritonExecutor(Recordable, Executor):
    """The traced program as Triton kernels over a pointer table.

    Args:
        trace: the program; every instruction has a formula.
        kernels: its kernels.
        columns: the tensors of the first call; later calls have the same shapes, dtypes and strides.
        copies: True to copy elements with strides of their own in and out.
        exchange: combines the reductions, where other processes have other parts of the tensors.
    """

    # A training loop has one set of addresses a parameter group, or a few that the allocator rotates through.
    MAX_TABLES = 8

    trace: Trace
    grid: Grid

    def __init__(
        self, trace: Trace, kernels: KernelSet, columns: Columns, copies: bool, exchange: Exchange | None = None
    ) -> None:
        self.trace, self.kernels, self.copies = trace, kernels, copies
        self.result_spec, self.parameters = trace.result_spec, trace.program.parameters
        is_full_size = [p.shape is Shape.PER_ELEMENT and not p.expanded for p in self.parameters]
        pattern = next(itertools.compress(columns, is_full_size), columns[0])
        self.device = next(c[0].device for c, p in zip(columns, self.parameters, strict=True) if not p.on_host)
        self.is_cuda = self.device.type == "cuda"
        matrices = [(t.shape[-2], t.shape[-1]) for t in pattern] if any(p.expanded for p in self.parameters) else None
        self.grid = Grid(kernels, [t.numel() for t in pattern], self.device, matrices, exchange)
        self.hosts = [i for i, p in enumerate(self.parameters) if p.on_host]
        host_kinds = [float if self.parameters[i].dtype.is_floating_point else int for i in self.hosts]
        self.kinds = [*trace.program.scalars, *host_kinds]
        stored = trace.program.stores
        self.scalars = trace.scalars
        self.is_seeded = kernels.is_seeded
        self.stores = {
            i: p.dtype.itemsize * (1 if p.shape is Shape.PER_ELEMENT else -1)
            for i, p in enumerate(self.parameters)
            if i in stored
        }
        self.observed = {i for i in stored if not is_fixed(columns[i]) or any(map(_requires_grad, columns[i]))}
        self.outputs = [trace.program.value(v) for v in trace.program.outputs]
        is_tiled = any(v.shape is Shape.PER_ELEMENT for v in self.outputs)
        order = torch.contiguous_format if copies else torch.preserve_format
        layouts = [torch.empty_like(t, device="meta", memory_format=order) for t in pattern if is_tiled]
        self.shapes = [(t.shape, t.stride()) for t in layouts]
        """For each element, the shape and strides of an output of its size; empty without such outputs."""
        self.arenas = [
            (self.grid.arena if v.shape is Shape.PER_ELEMENT else self.grid.count, v.dtype) for v in self.outputs
        ]
        self.returns = any(leaf is not None for leaf in trace.results)
        self.tables: list[PointerTable] = []
        self.tables_built = 0
        self.reason = "elements with strides of their own are copied in and out" if copies else ""
        self.seed = torch.zeros((), dtype=torch.int64, device=self.device)
        # Of a part without elements, another process has the other elements.
        extremes = [step.name for step in trace.program.instructions if step.name in ("amax", "amin")]
        if extremes and exchange is None and not (self.grid.sizes > 0).all():
            raise RuntimeError(f"{extremes[0]} of an empty tensor: a maximum needs at least one element")

    def _execute(self, columns: Columns, numbers: Sequence[float], addresses: Addresses | None) -> Leaves:
        """Launch the kernels."""
        if self.copies:
            originals = columns
            columns = [
                [t.contiguous() if p.shape is Shape.PER_ELEMENT else t for t in column]
                for column, p in zip(columns, self.parameters, strict=True)
            ]
            addresses = None
        stream, is_capturing = current_stream(self.device), self.is_capturing()
        table = self._pointer_table(columns, addresses, stream, is_capturing)
        arenas = self.launch(table, columns, numbers, stream, is_capturing)
        if self.copies:
            for parameter in self.trace.program.stores:
                for original, copy in zip(originals[parameter], columns[parameter], strict=True):
                    if original is not copy:
                        original.copy_(copy)
            columns = originals
            self._increment_versions(columns)
        return self._results(columns, arenas)

    def launch(
        self, table: PointerTable, columns: Columns, numbers: Sequence[float], stream: int, is_capturing: bool
    ) -> list[Tensor]:
        """Run the kernels on a pointer table, which is that of these columns and stream.

        Returns:
            The memory of the outputs.
        """
        hosts = [columns[i][0].item() for i in self.hosts]
        if is_capturing and (dynamic := current_scalars()) is not None:
            scalars = dynamic.allocate(self, numbers, hosts, self.device)
        else:
            values = [evaluate(numbers) for evaluate in self.scalars]
            scalars = self._scalars(table, [*values, *hosts], is_capturing)
        arenas = self.new_arenas()
        seed = torch.randint(2**62, (), device=self.device) if self.is_seeded else self.seed
        # A graph's own scalars live as long as this reference to them: their address alone would let arenas take their
        # memory.
        workspace = None if is_capturing else stream
        self.grid.launch(table.address, scalars.data_ptr(), seed.data_ptr(), arenas, stream, workspace)
        if not self.copies:
            self._increment_versions(columns)
        return arenas

    def _increment_versions(self, columns: Columns) -> None:
        """Increment the versions of written tensors, as torch's ops do, so that autograd notices stale saved values."""
        for parameter in self.observed:
            torch.autograd.graph.increment_version(columns[parameter])

    def is_on_current_device(self) -> bool:
        """Return whether the executor can launch without a change of device."""
        return not self.is_cuda or self.device.index == torch.cuda.current_device()

    def repeatable_table(self, columns: Columns, addresses: Addresses) -> PointerTable | None:
        """The pointer table of an eager launch with these columns, if that may be repeated without any other check."""
        if self.copies or self.returns or self.is_capturing():
            return None
        return self._known_table(self._addresses(columns, addresses), current_stream(self.device))

    def _record(self, recording: Recording, columns: Columns, numbers: Sequence[float]) -> Leaves:
        """Give the launch to a recording."""
        if self.copies:
            raise NotRecordable(self.reason)
        return self._results(columns, recording.launch(self, columns, numbers))

    def new_arenas(self) -> list[Tensor]:
        """Memory for the outputs of a launch."""
        return [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in self.arenas]

    def _results(self, columns: Columns, arenas: list[Tensor]) -> Leaves:
        outputs = [
            # `.data`: tensors whose versions autograd counts one by one.
            [part.data for part in (self._parts(arena) if value.shape is Shape.PER_ELEMENT else arena.unbind())]
            for arena, value in zip(arenas, self.outputs, strict=True)
        ]
        return result_leaves(self.trace, columns, outputs)

    def _parts(self, arena: Tensor) -> list[Tensor]:
        """The elements of an output of their size."""
        places = zip(self.grid.offsets.tolist(), self.shapes, strict=True)
        return [arena.as_strided(shape, stride, offset) for offset, (shape, stride) in places]

    def _addresses(self, columns: Columns, known: Addresses | None) -> list[Sequence[object]]:
        """The columns as a pointer table keeps them."""
        given = known or [None] * len(columns)
        addresses = [addresses_of(c) if own is None else own for c, own in zip(columns, given, strict=True)]
        for host in self.hosts:
            addresses[host] = []
        return addresses

    def _known_table(self, addresses: list[Sequence[object]], stream: int | None) -> PointerTable | None:
        """The table of these addresses and this stream, if there is one; of any stream, if None is given."""
        for table in self.tables:
            if stream in (None, table.stream) and table.addresses == addresses:
                return table
        return None

    def _pointer_table(
        self, columns: Columns, known: Addresses | None, stream: int, is_capturing: bool
    ) -> PointerTable:
        """The pointer table of these columns: an earlier one where no address has changed, else a new one."""
        addresses = self._addresses(columns, known)
        found = self._known_table(addresses, None if is_capturing else stream)
        if found is not None:
            # A guard returns the same list objects each time, and those compare by identity.
            found.addresses = addresses
            if is_capturing:
                graph_lifetime.keep_with_graph((self, found))
            elif found is not self.tables[0]:
                self._put_first(found)
            return found
        logger.debug("%s: new addresses, a new pointer table", self.trace.program.name)
        table = self.grid.table(self._pointers(columns))
        pointer_table = PointerTable(addresses, table, table.data_ptr(), stream)
        self.tables_built += 1
        if is_capturing:
            # The table is filled at replay, so no eager call may use it.
            graph_lifetime.keep_with_graph((self, pointer_table))
            return pointer_table
        self._put_first(pointer_table)
        return pointer_table

    def _put_first(self, table: PointerTable) -> None:
        """Keep a table as the one that was used last. The list is a new one: other threads may be reading it."""
        self.tables = [table, *(other for other in self.tables if other is not table)][: self.MAX_TABLES]

    def _pointers(self, columns: Columns) -> list[list[int]]:
        nowhere = [0] * self.grid.count
        return [nowhere if i in self.hosts else list(map(Tensor.data_ptr, c)) for i, c in enumerate(columns)]

    def is_capturing(self) -> bool:
        """Return whether this call is being captured into a CUDA graph rather than run."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def _scalars(self, table: PointerTable, numbers: list[float], is_capturing: bool) -> Tensor:
        """The numbers on the device; written again only when one has changed.

        A graph captured with the numbers of the eager call before it reads what later eager calls write, so
        they stay current; one captured with other numbers has memory of its own for them.
        """
        values = bits(numbers, self.kinds)
        known, scalars = table.scalars or (None, None)
        if scalars is not None and known == values:
            return scalars
        fresh = to_device(np.asarray([*values, 0], dtype=np.int64), self.device)
        if is_capturing:
            return fresh
        scalars = fresh if scalars is None else scalars.copy_(fresh)
        table.scalars = values, scalars
        return scalars

    def explain(self, columns: Columns) -> str:
        """Describe the kernels, and how many tensors they read and write in a slower way."""
        pointers = self._pointers(columns)
        masked = 0 if self.copies else self.grid.count - int(self.grid.is_aligned(pointers).sum())
        note = f"\n  {masked} of them not at multiples of {ALIGNMENT} bytes: with narrower loads and stores, masked"
        return self.describe() + (note if masked else "")

    def describe(self) -> str:
        """Describe the kernels, in a line each."""
        elements, tiles = self.grid.sizes.sum(), self.grid.tiles.total
        lines = [f"{self.grid.count} tensors, {elements} elements, {tiles} tiles on {self.device}"]
        for kernel in self.kernels.kernels:
            over = "elements" if kernel.segment.shape is Shape.PER_ELEMENT else "numbers per tensor"
            lines.append(f"  kernel {kernel.name}: {len(kernel.segment.steps)} values over {over}")
        return "\n".join([*lines, *([f"  {self.reason}"] if self.reason else [])])
