"""Launches of a program's kernels over many tensors at once: tiles, pointer tables, compilation, the launch itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock

import numpy as np
import torch
from torch import Tensor

from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.codegen import Kernel, write_kernel
from subtensors.kernels.fused.lowering import FLOATS, register
from subtensors.kernels.fused.program import Instruction, Program, Shape
from subtensors.kernels.fused.segment_writer import ADDRESSED
from subtensors.kernels.fused.segments import plan_segments, slot_count
from subtensors.kernels.runtime.gc_pause import gc_paused
from subtensors.kernels.runtime.graph_lifetime import to_device
from subtensors.kernels.runtime.launcher import Launch, is_capturing, multiprocessors, prepare_launch

LANES = 128
"""Tensors a program of a tensor segment."""

ROUNDS = 8
"""Tiles that a program sweeps, one after another, in a kernel with reductions: the programs of a tensor synchronize
through an atomic counter, and the last one combines the results of all, so few programs are better."""

MANY_ROUNDS = 32
"""The same where the kernels write no elements, only results of reductions, and many programs are left."""

MIN_PROGRAMS = 16
"""Programs a multiprocessor; where there would be fewer, each program sweeps one tile instead of `ROUNDS`."""

ALIGNMENT = 16
"""Bytes an address must be a multiple of for the widest loads, and elements between parts of an output arena."""


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

Exchange = Callable[[Tensor, str], None]
"""Combines the partial results of several processes for each tensor: float64 or int64 to be written in place, and the
reduction: "sum", "prod", "amax" or "amin"."""


@dataclass(frozen=True)
class Tiling:
    """The tiling of a sweep over elements: elements per tile, and warps that share a tile."""

    block: int = 512
    warps: int = 2


class KernelSet:
    """The Triton kernels of a program, one a segment."""

    def __init__(self, program: Program, tiling: Tiling) -> None:
        self.program, self.tiling = program, tiling
        if any(p.shape is Shape.PER_BLOCK for p in program.parameters):
            # A tile holds whole blocks.
            self.tiling = tiling = replace(tiling, block=max(tiling.block, blockwise.SIZE))
        self.segments = plan_segments(program)
        name = "".join(c if c.isalnum() else "_" for c in program.name)
        self.kernels: list[Kernel] = [
            write_kernel(
                program,
                segment,
                name=f"{name}_{segment.shape.value}_{segment.round}",
                block=tiling.block if segment.shape is Shape.PER_ELEMENT else LANES,
            )
            for segment in self.segments
        ]
        self.slots = slot_count(self.segments)
        self.reductions = max((len(s.reductions) for s in self.segments), default=0)
        self.is_seeded = any(step.name == "stochastic_round" for step in program.instructions)
        self.are_compiled = False
        """True once `compile_together` has handled these kernels."""


@dataclass(frozen=True)
class TileMap:
    """Tensors cut into parts of equal size, a part a program."""

    entries: Tensor
    """(total,) int64: tensor << 32 | part of the tensor."""
    address: int
    """The address of `entries`."""
    first: Integers
    """The number of each tensor's first part."""
    total: int

    @staticmethod
    def of(sizes: Integers, part: int, min_parts: int, device: torch.device) -> TileMap:
        """Cut tensors into parts of `part` elements, each into `min_parts` or more."""
        parts = np.maximum(-(-sizes // part), min_parts)
        total = int(parts.sum())
        # At least one entry, which may be unused: Triton's interpreter accepts no empty tensor.
        entries = to_device(tile_entries(parts) if total else np.zeros(1, np.int64), device)
        return TileMap(entries, entries.data_ptr(), before(parts), total)


def before(sizes: Integers) -> Integers:
    """The sum of all sizes before each."""
    return np.cumsum(sizes) - sizes


def tile_entries(parts: Integers) -> Integers:
    """For each part of each tensor, tensor << 32 | part of the tensor, of tensors with these numbers of parts."""
    tensor = np.repeat(np.arange(len(parts), dtype=np.int64), parts)
    return tensor << 32 | (np.arange(len(tensor), dtype=np.int64) - np.repeat(before(parts), parts))


@dataclass(frozen=True)
class Workspace:
    """Memory that the kernels of a launch share; whoever passes its addresses on keeps it until the launch."""

    slots: Tensor
    partials: Tensor
    """Partial results of chunks."""
    counters: Tensor
    """Atomic counters, which launches leave at zero."""

    @cached_property
    def addresses(self) -> list[int]:
        """The addresses of the three."""
        return [memory.data_ptr() for memory in (self.slots, self.partials, self.counters)]


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event of the copies made so far on the current stream; None in a capture, whose graph makes them."""
    if device.type != "cuda" or is_capturing(device):
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class Grid:
    """The tiles of a list of tensor sizes, on the device. Depends on no address.

    Args:
        kernels: the kernels that run over them.
        sizes: elements of each tensor.
        device: where they are.
        matrices: the last two dimensions of each, for programs with expanded parameters; a row each by default.
        exchange: combines the reductions, where other processes have other parts of the tensors.
    """

    def __init__(
        self,
        kernels: KernelSet,
        sizes: Sequence[int],
        device: torch.device,
        matrices: Sequence[tuple[int, int]] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.kernels, self.device, self.exchange = kernels, device, exchange
        self._matrices = self._matrix_rows(sizes, matrices)
        # Torch's kernels keep denormal numbers; libdevice as Triton links it by default flushes them to zero.
        self._options = {"enable_reflect_ftz": False} if device.type == "cuda" else {}
        self._launches: dict[int, tuple[Launch, int]] = {}
        """By kernel, its launch and number of programs, once it was compiled."""
        self._launching = RLock()
        """Held by a launch: another thread's kernels on the same stream work in the same memory."""
        self._workspaces: dict[int, Workspace] = {}
        """One for all launches that follow each other, on one stream or in one recording."""
        self.count = len(sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        block = kernels.tiling.block
        self.tiles = TileMap.of(self.sizes, block, 0, device)
        self.rounds, self.chunks = 1, self.tiles
        if kernels.reductions:
            sweeps = [kernel.segment for kernel in kernels.kernels if kernel.segment.shape is Shape.PER_ELEMENT]
            writes, programs = any(s.stores or s.outputs for s in sweeps), MIN_PROGRAMS * multiprocessors(device)
            is_large = device.type == "cpu" or self.tiles.total >= ROUNDS * programs
            is_huge = not writes and self.tiles.total >= 4 * MANY_ROUNDS * programs
            self.rounds = MANY_ROUNDS if is_huge else ROUNDS if is_large else 1
            # Where there are no elements, reductions must come out as the identity.
            self.chunks = TileMap.of(self.sizes, block * self.rounds, 1, device)
        self._ready = _event(device)
        rounded = -(-self.sizes // ALIGNMENT) * ALIGNMENT
        self.offsets = before(rounded)
        self.arena = int(rounded.sum())

    def _matrix_rows(self, sizes: Sequence[int], matrices: Sequence[tuple[int, int]] | None) -> list[list[int]]:
        """The rows of the table with the shapes of matrices; none for a program without expanded parameters."""
        if not any(p.expanded for p in self.kernels.program.parameters):
            return []
        matrices = matrices or [(1, size) for size in sizes]
        # Never 0, since kernels divide by them.
        return [[max(c, 1) for _, c in matrices], [max(r * c, 1) for r, c in matrices]]

    def workspace(self, key: int | None) -> Workspace:
        """Return the workspace of some launches, made where there is none.

        Args:
            key: of those launches; None for one alone, in a graph that others capture. That graph may run beside any
                launch, and what is zeroed in it is so only once it has run; so its workspace is new, and not kept.
        """
        if key is None:
            return self._new_workspace()
        found = self._workspaces.get(key)
        # Another thread may make it meanwhile, and launch with that.
        return self._workspaces.setdefault(key, self._new_workspace()) if found is None else found

    def forget(self, key: int) -> None:
        """Free the workspace of this key."""
        self._workspaces.pop(key, None)

    def _new_workspace(self) -> Workspace:
        # The stream may be another one than that of the tiles. In a capture, they were there before.
        if self._ready is not None and not is_capturing(self.device):
            self._ready.wait()
        needed = self.kernels.slots * self.count, self.kernels.reductions * self.chunks.total
        slots, partials = (torch.empty(max(n, 1), dtype=torch.int64, device=self.device) for n in needed)
        # Where nothing is reduced, nothing is counted: a graph needs no node for it.
        make = torch.zeros if self.kernels.reductions else torch.empty
        counters = make(max(self.count, 1), dtype=torch.int32, device=self.device)
        return Workspace(slots, partials, counters)

    @property
    def table_size(self) -> int:
        """The number of integers that `rows` returns."""
        return (4 + len(self.kernels.program.parameters) + len(self._matrices)) * self.count

    def table(self, pointers: Sequence[Sequence[int]]) -> Tensor:
        """The pointer table on the device: `rows` of these pointers."""
        return to_device(self.rows(pointers), self.device)

    def rows(self, pointers: Sequence[Sequence[int]] | Integers) -> Integers:
        """The pointer table (`segment_writer` documents its rows)."""
        addresses = np.asarray(pointers, dtype=np.int64).reshape(len(pointers), self.count)
        aligned = self.is_aligned(addresses)
        matrices = np.asarray(self._matrices, dtype=np.int64).reshape(-1, self.count)
        return np.concatenate(
            [self.sizes[None], aligned[None], self.chunks.first[None], self.offsets[None], addresses, matrices]
        )

    def is_aligned(
        self, pointers: Sequence[Sequence[int]] | Integers
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """For each tensor, True if full tiles of it can be read and written without a mask; pointers as in `rows`."""
        parameters = self.kernels.program.parameters
        elements = [i for i, p in enumerate(parameters) if p.shape is Shape.PER_ELEMENT and not p.expanded]
        addresses = np.asarray(pointers, dtype=np.int64).reshape(len(pointers), self.count)
        return (addresses[elements] % ALIGNMENT == 0).all(axis=0)  # type: ignore[no-any-return]

    def launch(
        self,
        table: int,
        scalars: int,
        seed: int,
        outputs: Sequence[Tensor],
        stream: int,
        workspace: int | None,
    ) -> None:
        """Run every kernel of the program once; of several threads, one launches after the other.

        Args:
            table: address of the result of `table`.
            scalars: address of the dynamic scalars' bits, (n,) int64.
            seed: address of a 0-d int64; read only by programs that round stochastically.
            outputs: one arena an output: (`arena`,) for elements, (`count`,) for numbers per tensor.
            stream: the CUDA stream to launch on, the current one, as a number.
            workspace: which workspace to use; launches that may run at the same time want different ones.
        """
        with self._launching:
            own = self.workspace(workspace)
            rest = (scalars, *own.addresses, seed, self.count, self.chunks.total)
            for number, kernel in enumerate(self.kernels.kernels):
                tile_map, constants = self._tile_map(kernel)
                arenas = [outputs[k] for k in kernel.segment.outputs]
                arguments = (table, tile_map.address, *rest, *arenas, *constants)
                prepared = self._launches.get(number)
                if prepared is not None:
                    launch, programs = prepared
                    launch(programs, *arguments, stream=stream)
                else:
                    self._first_launch(number, kernel, arguments)
                if self.exchange is not None:
                    self._exchange(self.exchange, kernel, own.slots)

    def _tile_map(self, kernel: Kernel) -> tuple[TileMap, tuple[int, ...]]:
        """Return the tile map that a kernel sweeps over, and the constants that it is compiled for."""
        return (
            (self.chunks, (self.rounds, kernel.block)) if kernel.segment.reductions else (self.tiles, (kernel.block,))
        )

    def programs(self, kernel: Kernel) -> int:
        """Return the number of programs in a launch of a kernel; 0 where there are no elements."""
        return self._tile_map(kernel)[0].total if kernel.segment.shape is Shape.PER_ELEMENT else -(-self.count // LANES)

    def compile(self, kernel: Kernel) -> None:
        """Compile a kernel for the arguments that `launch` will pass, without launching it."""
        tile_map, constants = self._tile_map(kernel)
        addresses = [tile_map.address] * len(ADDRESSED)  # Triton sees only their type
        outputs = [self.kernels.program.value(self.kernels.program.outputs[k]).dtype for k in kernel.segment.outputs]
        arguments = (*addresses, self.count, self.chunks.total, *outputs, *constants)
        kernel.run.warmup(*arguments, grid=(1,), num_warps=self.kernels.tiling.warps, **self._options)

    def _exchange(self, exchange: Exchange, kernel: Kernel, slots: Tensor) -> None:
        """Combine the reductions of this sweep with those of other processes."""
        for slot, value in kernel.segment.reductions.items():
            step = self.kernels.program.value(value)
            assert isinstance(step, Instruction)
            results = slots[slot * self.count : (slot + 1) * self.count]
            is_float = register(step.compute, Shape.PER_ELEMENT) in FLOATS
            exchange(results.view(torch.float64) if is_float else results, step.name)

    @gc_paused()
    def _first_launch(self, number: int, kernel: Kernel, arguments: tuple[object, ...]) -> None:
        """Compile and launch; later calls have arguments of the same types, so they skip Triton's checks of them."""
        programs = self.programs(kernel)
        if not programs:
            return
        compiled = kernel.run[(programs,)](*arguments, num_warps=self.kernels.tiling.warps, **self._options)
        if compiled is not None:
            self._launches[number] = prepare_launch(compiled), programs


@gc_paused()
def compile_together(grids: Sequence[Grid]) -> None:
    """Compile the kernels of grids that are not compiled yet, in parallel; do nothing where only one kernel is new.

    Triton releases Python's lock for most of the 0.2 s that a kernel takes, so a step over parameters of several dtypes
    is ready nearly as soon as one over a single dtype.
    """
    grids = [grid for grid in grids if grid.device.type == "cuda" and not grid.kernels.are_compiled]
    kernels = [(grid, kernel) for grid in grids for kernel in grid.kernels.kernels if grid.programs(kernel)]
    for grid in grids:
        grid.kernels.are_compiled = True

    def compile_all() -> None:
        from subtensors.kernels.runtime.triton_compat import triton

        with ThreadPoolExecutor(len(kernels)) as pool, triton.AsyncCompileMode(pool):
            for grid, kernel in kernels:
                with torch.cuda.device(grid.device):
                    grid.compile(kernel)

    if len(kernels) > 1:
        # In a context without the caller's own AsyncCompileMode: Triton refuses a nested one.
        Context().run(compile_all)


def bits(numbers: Iterable[float], kinds: Iterable[type[float] | type[int]]) -> list[int]:
    """Each number as the int64 the kernels read: a float's float64 bits, an integer itself."""
    return [
        struct.unpack("<q", struct.pack("<d", n))[0] if k is float else int(n)
        for n, k in zip(numbers, kinds, strict=True)
    ]
