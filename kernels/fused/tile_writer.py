"""The source of an element segment: a tile of a tensor a program, or a few of them where it ends in reductions.

Each lane accumulates in registers from tile to tile. At its end a program reduces its lanes to one partial result a
reduction; the last program of a tensor to finish combines the partial results, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from subtensors.kernels.fused import blockwise
from subtensors.kernels.fused.lowering import FLOATS, TRITON_TYPES, identity, template
from subtensors.kernels.fused.program import Instruction, Shape
from subtensors.kernels.fused.segment_writer import (
    ALIGNED,
    ARGUMENTS,
    FIRST_CHUNK,
    OUTPUT,
    POINTERS,
    SegmentWriter,
    function_source,
)


class TileWriter(SegmentWriter):
    """An element segment."""

    def load(self, index: int, parameter: int) -> str:
        """The expression that reads a value from the memory of a parameter."""
        if expanded := self.program.parameters[parameter].expanded:
            return self.loaded(f"load_tile(p{parameter}, {expanded}, inside, FULL)", parameter, index)
        if self.is_tile(index):
            return self.loaded(f"load_tile(p{parameter}, lane, inside, FULL)", parameter, index)
        if self.value(index).shape is Shape.PER_BLOCK:
            return f"load_blocks(p{parameter}, left, FULL, BLOCK)"
        return super().load(index, parameter)

    def source(self) -> str:
        """The segment's functions; the last one is the kernel."""
        arguments = "table, scalars, slots, seed_pointer, N, tensor, tile, start, left, size" + self.outputs
        body = ["lane = tl.arange(0, BLOCK)", "inside = lane < left"]
        if self.seeded():
            body += ["seed = tl.load(seed_pointer)", "which = tensor"]
        touched = {*self.segment.memory.values(), *self.segment.stores}
        expanded = {self.program.parameters[p].expanded for p in touched} - {""}
        if expanded:
            first = POINTERS + len(self.program.parameters)
            body.append(f"columns = tl.load(table + {first} * N + tensor)")
            body.append(f"matrix = tl.load(table + {first + 1} * N + tensor)")
            body += [f"{kind} = {kind}_of(lane, start, columns, matrix, BLOCK)" for kind in sorted(expanded)]
        for p in sorted(touched):
            if self.program.parameters[p].expanded:
                body.append(f"p{p} = {self.pointer(p)}")
            elif self.program.parameters[p].shape is Shape.PER_ELEMENT:
                start = self.aligned(f"{self.pointer(p)} + start", self.program.parameters[p].dtype)
                body.append(f"p{p} = {start}")
            elif self.program.parameters[p].shape is Shape.PER_BLOCK:
                body.append(f"p{p} = {self.pointer(p)} + start // {blockwise.SIZE}")
        body += self.steps()
        for parameter, value in self.segment.stores.items():
            text = self.in_memory(value, self.program.parameters[parameter].dtype)
            if self.program.parameters[parameter].shape is Shape.PER_BLOCK:
                body.append(f"store_blocks(p{parameter}, left, {text}, FULL, BLOCK)")
            else:
                body.append(f"store_tile(p{parameter}, lane, inside, {text}, FULL)")
        if self.segment.outputs:
            body.append(f"offset = tl.load(table + {OUTPUT} * N + tensor) + start")
        for number, value in self.segment.outputs.items():
            text = self.in_memory(value, self.value(value).dtype)
            start = self.aligned(f"out{number} + offset", self.value(value).dtype)
            body.append(f"store_tile({start}, lane, inside, {text}, FULL)")
        body += [f"r{slot} = {self.contribution(step)}" for slot, step in self.reductions()]
        body.append(f"return {self.names('r') or 'tile'}")
        kernel = [*(self.sweep() if self.segment.reductions else self.tile())]
        more = ", ROUNDS: tl.constexpr" if self.segment.reductions else ""
        return function_source(f"{self.name}_tile", f"{arguments}, FULL: tl.constexpr", body) + function_source(
            self.name, f"{ARGUMENTS}{self.outputs}{more}", kernel, kernel=True
        )

    def names(self, prefix: str) -> str:
        """A variable for each reduction."""
        return ", ".join(f"{prefix}{slot}" for slot in self.segment.reductions)

    def one_tile(self, target: str) -> list[str]:
        """The lines that run one tile: without masks where it is full and aligned."""
        arguments = "table, scalars, slots, seed_pointer, N, tensor, tile, start, left, size" + self.outputs
        call = f"{target} = {self.name}_tile({arguments}, {{}}, BLOCK)"
        return [
            "start = tile.to(tl.int64) * BLOCK",
            "left = size - start",
            "if (left >= BLOCK) & aligned:",
            f"    {call.format('True')}",
            "else:",
            f"    {call.format('False')}",
        ]

    def tile(self) -> Iterator[str]:
        """The kernel of a segment without reductions."""
        yield from self.entry("tile")
        yield from self.one_tile("done")

    def entry(self, part: str) -> Iterator[str]:
        """Yield the lines that read a program's entry of `tiles`: its tensor, and `part`, its tile or chunk."""
        yield "entry = tl.load(tiles + tl.program_id(0))"
        yield "tensor = (entry >> 32).to(tl.int32)"
        yield f"{part} = (entry & 0xFFFFFFFF).to(tl.int32)"
        yield "size = tl.load(table + tensor)"
        yield f"aligned = tl.load(table + {ALIGNED} * N + tensor) != 0"

    def sweep(self) -> Iterator[str]:
        """The kernel of a segment with reductions: a program folds the tiles of a chunk, the last one combines all."""
        yield from self.entry("chunk")
        for slot, step in self.reductions():
            kind = self.compute_register(step)
            yield f"r{slot} = tl.full([BLOCK], {identity(step.name, kind)}, {TRITON_TYPES[kind]})"
        yield "tiles_left = tl.cdiv(size, BLOCK) - chunk * ROUNDS"
        yield "for number in range(tl.minimum(tiles_left, ROUNDS).to(tl.int32)):"
        yield "    tile = chunk * ROUNDS + number"
        yield from (f"    {line}" for line in self.one_tile(self.names("more")))
        for slot, step in self.reductions():
            yield f"    r{slot} = fold(r{slot}, more{slot}, {step.name!r})"
        yield f"first = tl.load(table + {FIRST_CHUNK} * N + tensor)"
        yield "count = tl.maximum(tl.cdiv(size, ROUNDS * BLOCK), 1)"
        for order, (slot, step) in enumerate(self.reductions()):
            rule = template(step.name, step.compute)
            assert rule is not None
            yield f"tl.store(partials + {order} * T + first + chunk, to_bits({rule(f'r{slot}')}))"
        yield "if is_last_arrival(counters, tensor, count):"
        for order, (slot, step) in enumerate(self.reductions()):
            is_float = self.compute_register(step) in FLOATS
            neutral = identity(step.name, torch.float64 if is_float else torch.int64)
            yield (
                f"    combine(partials + {order} * T + first, count, slots + {slot} * N + tensor, "
                f"{neutral}, {step.name!r}, {is_float}, BLOCK)"
            )

    def reductions(self) -> list[tuple[int, Instruction]]:
        """The slot of each reduction, and its instruction."""
        return [(slot, cast(Instruction, self.value(value))) for slot, value in self.segment.reductions.items()]

    def contribution(self, step: Instruction) -> str:
        """Return the expression of each lane's contribution to a reduction."""
        kind = self.compute_register(step)
        operand = self.operand(step, 0, step.args[0], kind)
        return f"({operand} if FULL else tl.where(inside, {operand}, {identity(step.name, kind)}))"

    def aligned(self, pointer: str, dtype: torch.dtype) -> str:
        """The start of a tile, with an alignment hint for a full one: 16 bytes for the widest dtype, less for others.

        With 16 bytes for each, a thread would hold other elements of a narrow tensor than of a wide one, and values
        would have to move between threads. The hint is given where the address is computed: Triton loses a hint on a
        function's argument when it inlines the function.
        """
        touched = [self.program.parameters[p] for p in (*self.segment.memory.values(), *self.segment.stores)]
        written = [self.value(value) for value in self.segment.outputs.values()]
        widest = max(t.dtype.itemsize for t in (*touched, *written) if t.shape is Shape.PER_ELEMENT)
        return f"tl.multiple_of({pointer}, {16 * dtype.itemsize // widest}) if FULL else {pointer}"

    def seeded(self) -> bool:
        """Return whether the segment draws random bits."""
        return any(
            isinstance(s := self.value(i), Instruction) and s.name == "stochastic_round" for i in self.segment.steps
        )
