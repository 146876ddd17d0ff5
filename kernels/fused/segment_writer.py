"""The source that all kinds of segments share: values in order, their formulas, loads, conversions and constants.

The table has one column per tensor and these rows, all int64::

    0 SIZE        elements of the tensor
    1 ALIGNED     1 when every pointer below is a multiple of 16 bytes
    2 FIRST_CHUNK number of its first chunk
    3 OUTPUT      the start of its part of an output arena, in elements
    4 ...         the address of each parameter, in order

and, where a parameter is expanded, two more: the columns of each tensor's matrices, and the elements of one matrix.

An element segment runs one tile per program: `tiles[program] = tensor << 32 | tile of the tensor`. With reductions it
runs one chunk per program, ROUNDS tiles in sequence, and `tiles` holds the chunks. A full, aligned tile reads and
writes 16 bytes per thread without masks; any other tile is masked. A tensor segment runs one lane per tensor. Numbers
per tensor pass between segments in slots, as int64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from subtensors.kernels.fused.lowering import (
    ABSENT,
    CONDITIONS,
    FLOATS,
    HALF,
    INTEGERS,
    TRITON_TYPES,
    Text,
    register,
    template,
)
from subtensors.kernels.fused.program import Instruction, Operand, Parameter, Program, Ref, Scalar, Shape
from subtensors.kernels.fused.segments import Segment

SIZE, ALIGNED, FIRST_CHUNK, OUTPUT, POINTERS = range(5)

ARGUMENTS = "table, tiles, scalars, slots, partials, counters, seed_pointer, N, T"
"""The arguments of every kernel before the output arenas: addresses, as integers, cheap to pass, and two counts."""

ADDRESSED = dict.fromkeys("table tiles scalars slots partials seed_pointer".split(), "tl.int64") | {
    "counters": "tl.int32"
}


class SegmentWriter:
    """The writer of a segment's body; its two subclasses write what a program sweeps over."""

    MASK = ""
    """The mask of loads of numbers per tensor, where lanes lie beyond the last one."""

    def __init__(self, program: Program, segment: Segment, name: str) -> None:
        self.program, self.segment, self.name = program, segment, name
        self.outputs = "".join(f", out{k}" for k in segment.outputs)

    def value(self, index: int) -> Parameter | Instruction:
        """The parameter or instruction of this number."""
        return self.program.value(index)

    def register(self, index: int) -> torch.dtype:
        """The dtype in which a kernel computes this value."""
        return register(self.value(index).dtype, self.value(index).shape)

    def steps(self) -> Iterator[str]:
        """One line a dynamic scalar and a value, in order."""
        computed = [i for i in self.segment.steps if i not in self.segment.memory and i not in self.segment.slots]
        operands = [a for i in computed for a in getattr(self.value(i), "args", ())]
        for scalar in dict.fromkeys(a for a in operands if isinstance(a, Scalar)):
            suffix = "" if scalar.type is int else ".to(tl.float64, bitcast=True)"
            yield f"s{scalar.index} = tl.load(scalars + {scalar.index}){suffix}"
        for index in self.segment.steps:
            if index in self.segment.memory:
                text = self.load(index, self.segment.memory[index])
            elif index in self.segment.slots:
                slot = self.segment.slots[index]
                text = self.from_bits(f"tl.load(slots + {slot} * N + tensor{self.MASK})", index)
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
        """Return whether a value that is wider in registers than its dtype is rounded to its dtype at once.

        It is when the program converts to that dtype, and when the value is stored: later reads of it in this
        kernel then agree with reads from memory in the next kernel, and compensated sums work.
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
        source = step.args[0] if step.args else None
        if step.name in _FREE and isinstance(source, Ref):
            # Nothing to compute: the operand's own register converts straight to the result's.
            return cast(f"v{source.index}", self.register(source.index), self.register(index))
        rule = template(step.name, step.compute)
        assert rule is not None
        arity = _ARITY.get(step.name, len(operands))
        text = rule(*operands[:arity])
        made = torch.bool if step.name in _COMPARISONS else compute
        if step.name == "numel":
            made = torch.int64
            if isinstance(source, Ref) and self.value(source.index).shape is Shape.PER_TENSOR:
                text = "tl.full([], 1, tl.int64)"
        if text.isdigit():
            text = f"tl.full([], {text}, {TRITON_TYPES[arithmetic(made)]})"
        text = cast(text, made, self.register(index))
        if step.shape is Shape.PER_ELEMENT and not any(self.is_tile(r) for r in step.reads()):
            kind = arithmetic(self.register(index))
            text = cast(f"tl.full([BLOCK], {text}, {TRITON_TYPES[kind]})", kind, self.register(index))
        return text

    def is_tile(self, index: int) -> bool:
        """Return whether a program holds one number per lane of this value, rather than a single number."""
        return self.value(index).shape is Shape.PER_ELEMENT

    def compute_register(self, step: Instruction) -> torch.dtype:
        """The dtype in which an instruction is computed."""
        dtype = register(step.compute, Shape.PER_ELEMENT if step.is_reduction else step.shape)
        return dtype if step.name.startswith("logical_") else arithmetic(dtype)

    def operand(self, step: Instruction, position: int, operand: Operand, compute: torch.dtype) -> Text:
        """An operand of an instruction, converted to the dtype of the computation."""
        wanted = torch.bool if CONDITIONS.get(step.name) == position else compute
        # Booleans compute as int8, where 0.5 would be 0: so it is converted to a boolean first.
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
        """The expression that reads a value from the memory of a parameter, or from the scalars for one on the host."""
        if self.program.parameters[parameter].on_host:
            hosts = [i for i, p in enumerate(self.program.parameters) if p.on_host]
            return self.from_bits(f"tl.load(scalars + {len(self.program.scalars) + hosts.index(parameter)})", index)
        return self.loaded(f"tl.load({self.pointer(parameter)}{self.MASK})", parameter, index)

    def from_bits(self, bits: str, index: int) -> str:
        """The bits of a slot or a dynamic scalar as this value."""
        kind = self.register(index)
        if kind in FLOATS:
            return f"{bits}.to(tl.float64, bitcast=True)"
        return cast(bits, torch.int64, kind)

    def in_memory(self, index: int, dtype: torch.dtype) -> str:
        """Value `index` as the bits memory of `dtype` holds."""
        return cast(f"v{index}", self.register(index), arithmetic(dtype))

    def pointer(self, parameter: int) -> str:
        """The address of a parameter's part of this tensor."""
        kind = TRITON_TYPES[arithmetic(self.program.parameters[parameter].dtype)]
        return f"tl.load(table + {POINTERS + parameter} * N + tensor{self.MASK}).to(tl.pointer_type({kind}))"

    def loaded(self, text: str, parameter: int, index: int) -> str:
        """Return the expression `text`, loaded from a parameter's memory, in the register dtype of a value."""
        return cast(text, arithmetic(self.program.parameters[parameter].dtype), self.register(index))


_FREE = frozenset({"_to_copy", "convert_element_type", "clone"})
_CONVERSIONS = frozenset({"_to_copy", "convert_element_type", "copy"})
_COMPARISONS = frozenset("eq ne lt le gt ge isnan isinf logical_and logical_or logical_xor logical_not".split())

# The number of arguments that matter; the others are dtype, device and layout, which are known.
_ARITY = {"full_like": 2, "copy": 2, "full": 2}
_ARITY |= dict.fromkeys(("scalar_tensor", "zeros_like", "ones_like", "sum", "prod", "amax", "amin", "numel"), 1)


def function_source(name: str, arguments: str, body: list[str], kernel: bool = False) -> str:
    """The source of a `triton.jit` function; a kernel casts its arguments, which are addresses, to pointers."""
    decorator = f"@triton.jit(do_not_specialize={ARGUMENTS.split(', ')})" if kernel else "@triton.jit"
    if kernel:
        body = [f"{name} = {name}.to(tl.pointer_type({kind}))" for name, kind in ADDRESSED.items()] + body
    lines = "".join(f"    {line}\n" for line in body)
    return f"{decorator}\ndef {name}({arguments}, BLOCK: tl.constexpr):\n{lines}\n\n"


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype that numbers of this dtype have in memory and in arithmetic: int8 for booleans."""
    return torch.int8 if dtype == torch.bool else dtype


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """An expression of one dtype as another; float64 reaches half precision by way of float32."""
    if source == target:
        return text
    if target == torch.bool:
        return f"({text} != 0)"
    if source == torch.float64 and target in HALF:
        return f"{text}.to(tl.float32).to({TRITON_TYPES[target]})"
    return f"{text}.to({TRITON_TYPES[target]})"


def wrapped(number: int, info: torch.iinfo) -> int:
    """The number wrapped to the range of an integer dtype: -1 is 255 in uint8."""
    return (number - info.min) % (1 << info.bits) + info.min


def constant(number: float, dtype: torch.dtype) -> str:
    """A scalar of this dtype; -0.0 by its bits, as Triton makes every zero 0.0."""
    if number == 0 and math.copysign(1, number) < 0 and dtype in (torch.float32, torch.float64):
        bits = torch.finfo(dtype).bits
        return f"tl.full([], {-(2 ** (bits - 1))}, tl.int{bits}).to({TRITON_TYPES[dtype]}, bitcast=True)"
    return f"tl.full([], {literal(number)}, {TRITON_TYPES[dtype]})"


def literal(number: float) -> str:
    """A Python number as Triton source."""
    if isinstance(number, float) and not math.isfinite(number):
        return f"float('{number}')"
    return repr(int(number) if isinstance(number, bool) else number)
