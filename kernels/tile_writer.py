"""The source of an element segment: one tile of one tensor a program."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from subtensors.kernels import blockwise
from subtensors.kernels.lowering import FLOATS, identity, template
from subtensors.kernels.program import Extent, Instruction
from subtensors.kernels.segment_writer import (
    ALIGNED,
    ARGUMENTS,
    FIRST_TILE,
    OUTPUT,
    POINTERS,
    SegmentWriter,
    function_source,
)


class TileWriter(SegmentWriter):
    """An element segment: one tile of one tensor a program."""

    def load(self, index: int, parameter: int) -> str:
        """The expression that reads a value from the memory of a parameter."""
        if self.program.parameters[parameter].on_host:
            return self.from_bits(f"tl.load(scalars + {self.host_slot(parameter)})", index)
        if expanded := self.program.parameters[parameter].expanded:
            return self.loaded(f"load_tile(p{parameter}, {expanded}, inside, WHOLE)", parameter, index)
        if self.is_tile(index):
            return self.loaded(f"load_tile(p{parameter}, lane, inside, WHOLE)", parameter, index)
        if self.value(index).extent is Extent.BLOCK:
            return f"load_blocks(p{parameter}, left, WHOLE, BLOCK)"
        return self.loaded(f"tl.load({self.pointer(parameter)})", parameter, index)

    def load_slot(self, index: int) -> str:
        """The expression that reads a value from its slot."""
        return self.from_bits(f"tl.load(slots + {self.segment.slots[index]} * N + tensor)", index)

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
            elif self.program.parameters[p].extent is Extent.ELEMENT:
                start = self.aligned(f"{self.pointer(p)} + start", self.program.parameters[p].dtype)
                body.append(f"p{p} = {start}")
            elif self.program.parameters[p].extent is Extent.BLOCK:
                body.append(f"p{p} = {self.pointer(p)} + start // {blockwise.SIZE}")
        body += self.steps()
        for parameter, value in self.segment.stores.items():
            text = self.in_memory(value, self.program.parameters[parameter].dtype)
            if self.program.parameters[parameter].extent is Extent.BLOCK:
                body.append(f"store_blocks(p{parameter}, left, {text}, WHOLE, BLOCK)")
            else:
                body.append(f"store_tile(p{parameter}, lane, inside, {text}, WHOLE)")
        if self.segment.outputs:
            body.append(f"offset = tl.load(table + {OUTPUT} * N + tensor) + start")
        for number, value in self.segment.outputs.items():
            text = self.in_memory(value, self.value(value).dtype)
            start = self.aligned(f"out{number} + offset", self.value(value).dtype)
            body.append(f"store_tile({start}, lane, inside, {text}, WHOLE)")
        partials = []
        for slot, value in self.segment.reductions.items():
            step = self.value(value)
            assert isinstance(step, Instruction)
            text = self.reduced(step)
            body.append(f"r{slot} = to_bits({text})")
            partials.append(f"r{slot}")
        body.append(f"return {', '.join(partials) or 'tile'}")
        results = ", ".join(partials) or "done"
        call = f"{self.name}_tile({arguments}, {{}}, BLOCK)"
        kernel = [
            "entry = tl.load(tiles + tl.program_id(0))",
            "tensor = (entry >> 32).to(tl.int32)",
            "tile = (entry & 0xFFFFFFFF).to(tl.int32)",
            "start = tile.to(tl.int64) * BLOCK",
            "size = tl.load(table + tensor)",
            "left = size - start",
            f"if (left >= BLOCK) & (tl.load(table + {ALIGNED} * N + tensor) != 0):",
            f"    {results} = {call.format('True')}",
            "else:",
            f"    {results} = {call.format('False')}",
            *self.finish(),
        ]
        return function_source(f"{self.name}_tile", f"{arguments}, WHOLE: tl.constexpr", body) + function_source(
            self.name, f"{ARGUMENTS}{self.outputs}", kernel, kernel=True
        )

    def aligned(self, pointer: str, dtype: torch.dtype) -> str:
        """The start of a tile, with what a whole one promises: as many elements of each tensor fill 16 bytes or less.

        Were it 16 bytes of each, a thread would hold other elements of a narrow tensor than of a wide one, and values
        would change threads on their way. The promise is made where the address is computed: one made of a function's
        argument is lost where the function is inlined.
        """
        touched = [self.program.parameters[p] for p in (*self.segment.memory.values(), *self.segment.stores)]
        written = [self.value(value) for value in self.segment.outputs.values()]
        widest = max(t.dtype.itemsize for t in (*touched, *written) if t.extent is Extent.ELEMENT)
        return f"tl.multiple_of({pointer}, {16 * dtype.itemsize // widest}) if WHOLE else {pointer}"

    def seeded(self) -> bool:
        """Does it draw random bits?"""
        return any(
            isinstance(s := self.value(i), Instruction) and s.name == "stochastic_round" for i in self.segment.steps
        )

    def reduced(self, step: Instruction) -> str:
        """What a tile contributes to a reduction."""
        kind = self.compute_register(step)
        operand = self.operand(step, 0, step.args[0], kind)
        padded = f"({operand} if WHOLE else tl.where(inside, {operand}, {identity(step.name, kind)}))"
        rule = template(step.name, step.compute)
        assert rule is not None
        return rule(padded)

    def finish(self) -> Iterator[str]:
        """The last tile of a tensor to arrive combines what all of them left."""
        if not self.segment.reductions:
            return
        yield f"first = tl.load(table + {FIRST_TILE} * N + tensor)"
        yield "count = tl.maximum(tl.cdiv(size, BLOCK), 1)"
        for order, slot in enumerate(self.segment.reductions):
            yield f"tl.store(partials + {order} * T + first + tile, r{slot})"
        yield "if arrive(counters, tensor, count):"
        for order, (slot, value) in enumerate(self.segment.reductions.items()):
            step = self.value(value)
            assert isinstance(step, Instruction)
            is_float = self.compute_register(step) in FLOATS
            neutral = identity(step.name, torch.float64 if is_float else torch.int64)
            yield (
                f"    combine(partials + {order} * T + first, count, slots + {slot} * N + tensor, "
                f"{neutral}, {step.name!r}, {is_float}, BLOCK)"
            )
