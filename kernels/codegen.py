"""Writing a segment of a program as a Triton kernel over pointer tables.

The table has one column a tensor and these rows, all int64::

    0 SIZE        elements of the tensor
    1 ALIGNED     1 when every pointer below is a multiple of 16 bytes
    2 FIRST_TILE  number of its first tile
    3 OUTPUT      where its part of an output arena starts, in elements
    4 ...         the address of each parameter, in order

and, where a parameter is expanded, two more: the columns of each tensor's matrices, and the elements of one.

An element segment runs one tile a program: `tiles[program] = tensor << 32 | tile of the tensor`. A full,
aligned tile reads and writes 16 bytes a thread without masks; any other one is masked. A tensor segment
runs one lane a tensor. Numbers per tensor travel between segments in slots, as int64 bits.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from subtensors.kernels import blockwise, blockwise_tiles, tile_math
from subtensors.kernels.libdevice import libdevice
from subtensors.kernels.lowering import (
    ABSENT,
    CONDITIONS,
    FLOATS,
    INTEGERS,
    TRITON_TYPES,
    Text,
    identity,
    register,
    template,
)
from subtensors.kernels.program import Extent, Instruction, Parameter, Program, Ref, Scalar
from subtensors.kernels.segments import Segment
from subtensors.kernels.source_text import arithmetic, cast, constant, wrapped

SIZE, ALIGNED, FIRST_TILE, OUTPUT, POINTERS = range(5)

ARGUMENTS = "table, tiles, scalars, slots, partials, counters, seed_pointer, N, T"
"""What every kernel takes, before the output arenas: addresses, as integers that are cheap to pass, and two counts."""

_ADDRESSED = dict.fromkeys("table tiles scalars slots partials seed_pointer".split(), "tl.int64") | {
    "counters": "tl.int32"
}


@dataclass(frozen=True)
class Kernel:
    """A compiled-on-first-use Triton kernel and the segment it runs."""

    segment: Segment
    run: Any
    """The `triton.jit` function."""
    source: str
    name: str
    block: int
    """Elements a tile, or tensors a program."""
    lanes: Any = None
    """Of a tensor segment, the `triton.jit` function of one program, which other kernels may call."""


def write_kernel(program: Program, segment: Segment, name: str, block: int) -> Kernel:
    """The Triton kernel of one segment.

    Args:
        program: the program the segment is cut from.
        segment: what to read, compute and write.
        name: what the kernel is called in profiles.
        block: elements a tile, or tensors a program of a tensor segment.

    Returns:
        The kernel; its source can be read in tracebacks and with `st.explain`.
    """
    writer = _TileWriter if segment.extent is Extent.ELEMENT else _LaneWriter
    source = writer(program, segment, name).source()
    has_codes = any(program.parameters[p].extent is Extent.BLOCK for p in segment.memory.values())
    names = _compile(source, name, has_codes)
    return Kernel(segment, names[name], source, name, block, names.get(f"{name}_lanes"))


_serial = itertools.count()


def _compile(source: str, name: str, has_codes: bool) -> dict[str, Any]:
    # Triton asks `inspect` for a function's source, and `inspect` asks `linecache`.
    filename = f"<subtensors {name} {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": __name__}
    names |= {f: getattr(tile_math, f) for f in _TILE_FUNCTIONS}
    names |= {f: getattr(blockwise_tiles, f) for f in _BLOCK_FUNCTIONS}
    if has_codes:
        # Beside codes of 8 bits, the last bit of a quotient is nothing; that of the parameter is rounded afterwards.
        names |= {"sqrt": blockwise_tiles.approximate_sqrt, "div": blockwise_tiles.approximate_div}
    exec(compile(source, filename, "exec"), names)
    return names


_TILE_FUNCTIONS = """div sqrt power remainder trunc_divide floor_divide stochastic_round tile_sum tile_prod tile_amax
tile_amin row_of column_of load_tile store_tile to_bits arrive combine""".split()
_BLOCK_FUNCTIONS = "blockwise_absmax quantize_blockwise dequantize_blockwise load_blocks store_blocks".split()


class _Writer:
    """Writes the body of a segment; the two subclasses know how it reads and writes memory."""

    def __init__(self, program: Program, segment: Segment, name: str) -> None:
        self.program, self.segment, self.name = program, segment, name
        self.outputs = "".join(f", out{k}" for k in segment.outputs)

    def value(self, index: int) -> Parameter | Instruction:
        return self.program.value(index)

    def register(self, index: int) -> torch.dtype:
        return register(self.value(index).dtype, self.value(index).extent)

    def steps(self) -> Iterator[str]:
        """One line a live number and a value, in order."""
        computed = [i for i in self.segment.steps if i not in self.segment.memory and i not in self.segment.slots]
        operands = [a for i in computed for a in getattr(self.value(i), "args", ())]
        for scalar in dict.fromkeys(a for a in operands if isinstance(a, Scalar)):
            suffix = "" if scalar.type is int else ".to(tl.float64, bitcast=True)"
            yield f"s{scalar.index} = tl.load(scalars + {scalar.index}){suffix}"
        for index in self.segment.steps:
            if index in self.segment.memory:
                text = self.load(index, self.segment.memory[index])
            elif index in self.segment.slots:
                text = self.load_slot(index)
            else:
                step = self.value(index)
                assert isinstance(step, Instruction)
                if step.is_reduction:
                    continue
                text = self.formula(index, step)
                if self.is_rounded(index, step):
                    text = cast(cast(text, self.register(index), step.dtype), step.dtype, self.register(index))
            yield f"v{index} = {text}"

    def is_rounded(self, index: int, step: Instruction) -> bool:
        """Does a value wider in registers than its dtype lose the difference at once?

        When the program converts to that dtype, and when memory will hold the value: what is read from it
        later in this kernel is then what is read from memory in the next, and compensated sums work.
        """
        if step.dtype not in FLOATS or step.dtype == self.register(index):
            return False
        source = step.args[1 if step.name == "copy" else 0] if step.name in _CONVERSIONS else None
        is_converted = isinstance(source, Ref) and self.value(source.index).dtype != step.dtype
        return is_converted or index in self.program.stores.values()

    def formula(self, index: int, step: Instruction) -> str:
        """The expression of an instruction, in the register type of its result."""
        compute = self.compute_register(step)
        operands = [self.operand(step, i, a, compute) for i, a in enumerate(step.args)]
        if step.name in _FREE:
            # Nothing to compute: the operand's own register converts straight to the result's.
            source = self.register(step.args[0].index)
            return cast(f"v{step.args[0].index}", source, self.register(index))
        rule = template(step.name, step.compute)
        assert rule is not None
        arity = _ARITY.get(step.name, len(operands))
        text = rule(*operands[:arity])
        made = torch.bool if step.name in _COMPARISONS else compute
        if step.name == "numel":
            made = torch.int64
            if self.value(step.args[0].index).extent is Extent.TENSOR:
                text = "tl.full([], 1, tl.int64)"
        if text.isdigit():
            text = f"tl.full([], {text}, {TRITON_TYPES[arithmetic(made)]})"
        text = cast(text, made, self.register(index))
        if step.extent is Extent.ELEMENT and not any(self.is_tile(r) for r in step.reads()):
            kind = arithmetic(self.register(index))
            text = cast(f"tl.full([BLOCK], {text}, {TRITON_TYPES[kind]})", kind, self.register(index))
        return text

    def is_tile(self, index: int) -> bool:
        return self.value(index).extent is Extent.ELEMENT

    def compute_register(self, step: Instruction) -> torch.dtype:
        dtype = register(step.compute, step.extent)
        if step.is_reduction:
            dtype = register(step.compute, Extent.ELEMENT)
        return torch.int8 if dtype == torch.bool and not step.name.startswith("logical_") else dtype

    def operand(self, step: Instruction, position: int, operand: Any, compute: torch.dtype) -> Text:
        wanted = torch.bool if CONDITIONS.get(step.name) == position else compute
        # Truths compute as int8, where 0.5 would be 0: it is true first.
        through = torch.bool if step.compute == torch.bool else wanted

        def converted(text: str, source: torch.dtype) -> Text:
            return Text(cast(cast(text, source, through), through, wanted))

        match operand:
            case Ref(index):
                if index not in self.segment.steps:
                    return ABSENT
                return converted(f"v{index}", self.register(index))
            case Scalar(index, kind):
                return converted(f"s{index}", torch.int64 if kind is int else torch.float64)
            case bool() | int() | float():
                if through == torch.bool:
                    operand = bool(operand)
                if wanted in INTEGERS:
                    operand = wrapped(int(operand), torch.iinfo(wanted))
                return Text(constant(operand, arithmetic(wanted)), operand)
            case None:
                return ABSENT
            case _:
                return Text(repr(operand))

    def load(self, index: int, parameter: int) -> str:
        raise NotImplementedError

    def load_slot(self, index: int) -> str:
        raise NotImplementedError

    def from_bits(self, bits: str, index: int) -> str:
        kind = self.register(index)
        if kind in FLOATS:
            return f"{bits}.to(tl.float64, bitcast=True)"
        return cast(bits, torch.int64, kind)

    def in_memory(self, index: int, dtype: torch.dtype) -> str:
        """Value `index` as the bits memory of `dtype` holds."""
        return cast(f"v{index}", self.register(index), torch.int8 if dtype == torch.bool else dtype)

    def pointer(self, parameter: int, mask: str = "") -> str:
        dtype = self.program.parameters[parameter].dtype
        kind = "tl.int8" if dtype == torch.bool else TRITON_TYPES[dtype]
        return f"tl.load(table + {POINTERS + parameter} * N + tensor{mask}).to(tl.pointer_type({kind}))"

    def loaded(self, text: str, parameter: int, index: int) -> str:
        dtype = self.program.parameters[parameter].dtype
        return cast(text, torch.int8 if dtype == torch.bool else dtype, self.register(index))

    def host_slot(self, parameter: int) -> int:
        """Where the scalars hold a parameter that lives on the host."""
        hosts = [i for i, p in enumerate(self.program.parameters) if p.on_host]
        return len(self.program.scalars) + hosts.index(parameter)


class _TileWriter(_Writer):
    """An element segment: one tile of one tensor a program."""

    def load(self, index: int, parameter: int) -> str:
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
        return self.from_bits(f"tl.load(slots + {self.segment.slots[index]} * N + tensor)", index)

    def source(self) -> str:
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
        return _function(f"{self.name}_tile", f"{arguments}, WHOLE: tl.constexpr", body) + _function(
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
        return any(
            isinstance(s := self.value(i), Instruction) and s.name == "stochastic_round" for i in self.segment.steps
        )

    def reduced(self, step: Instruction) -> str:
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


class _LaneWriter(_Writer):
    """A tensor segment: one lane a tensor."""

    MASK = ", mask=inside, other=0"

    def is_tile(self, index: int) -> bool:
        return True

    def load(self, index: int, parameter: int) -> str:
        if self.program.parameters[parameter].on_host:
            return self.from_bits(f"tl.load(scalars + {self.host_slot(parameter)})", index)
        return self.loaded(f"tl.load({self.pointer(parameter, self.MASK)}{self.MASK})", parameter, index)

    def load_slot(self, index: int) -> str:
        return self.from_bits(f"tl.load(slots + {self.segment.slots[index]} * N + tensor{self.MASK})", index)

    def source(self) -> str:
        body = [
            "lane = tl.arange(0, BLOCK)",
            "tensor = tile * BLOCK + lane",
            "inside = tensor < N",
            f"size = tl.load(table + tensor{self.MASK})",
            "seed = tl.load(seed_pointer)",
            "which = 0",
            *self.steps(),
        ]
        for parameter, value in self.segment.stores.items():
            text = self.in_memory(value, self.program.parameters[parameter].dtype)
            body.append(f"tl.store({self.pointer(parameter, self.MASK)}, {text}, mask=inside)")
        for number, value in self.segment.outputs.items():
            text = self.in_memory(value, self.value(value).dtype)
            body.append(f"tl.store(out{number} + tensor, {text}, mask=inside)")
        for slot, value in self.segment.keeps.items():
            body.append(f"tl.store(slots + {slot} * N + tensor, to_bits(v{value}), mask=inside)")
        arguments = "table, scalars, slots, seed_pointer, N, tile" + self.outputs
        call = f"{self.name}_lanes({arguments}, BLOCK)"
        return _function(f"{self.name}_lanes", arguments, body) + _function(
            self.name, f"{ARGUMENTS}{self.outputs}", ["tile = tl.program_id(0)", call], kernel=True
        )


_FREE = frozenset({"_to_copy", "convert_element_type", "clone"})
_CONVERSIONS = frozenset({"_to_copy", "convert_element_type", "copy"})
_COMPARISONS = frozenset("eq ne lt le gt ge isnan isinf logical_and logical_or logical_xor logical_not".split())

# Ops whose last arguments say where or how the result is stored, which is already known.
_ARITY = {"full_like": 2, "copy": 2, "full": 2}
_ARITY |= dict.fromkeys(("scalar_tensor", "zeros_like", "ones_like", "sum", "prod", "amax", "amin", "numel"), 1)


def _function(name: str, arguments: str, body: list[str], kernel: bool = False) -> str:
    decorator = f"@triton.jit(do_not_specialize={ARGUMENTS.split(', ')})" if kernel else "@triton.jit"
    if kernel:
        body = [f"{name} = {name}.to(tl.pointer_type({kind}))" for name, kind in _ADDRESSED.items()] + body
    lines = "".join(f"    {line}\n" for line in body)
    return f"{decorator}\ndef {name}({arguments}, BLOCK: tl.constexpr):\n{lines}\n\n"
