"""A straight-line program over the elements of several tensor lists, in static single assignment form.

A program describes the computation on ONE element of every list; the kernels run it on all elements.
Values are numbered: first the parameters, then the results of the instructions in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

import torch
from torch._ops import OpOverload

T = TypeVar("T")


class Shape(Enum):
    """The granularity of a value: one number per element, per tensor, or per block of elements."""

    PER_ELEMENT = "element"
    """One number for every element of the tensor."""
    PER_TENSOR = "tensor"
    """One number for the whole tensor: a 0-d element, a 0-d tensor given to every element, or a reduction."""
    PER_BLOCK = "block"
    """One number for each block of elements, as codes of 8 bits have (`blockwise`)."""


@dataclass(frozen=True)
class Ref:
    """The value with this number."""

    index: int


@dataclass(frozen=True)
class Scalar:
    """A dynamic scalar: the `index`-th of the Python numbers that are passed at each call."""

    index: int
    type: type[float] | type[int]


Operand: TypeAlias = "Ref | Scalar | bool | int | float | str | torch.dtype | torch.device | tuple[object, ...] | None"
"""A value, a dynamic scalar, or a literal."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of each element, which the program reads and may store to."""

    name: str
    dtype: torch.dtype
    shape: Shape
    expanded: str = ""
    """For "row" or "column": one value per row or column of its last two dimensions, repeated along the other."""
    on_host: bool = False
    """A 0-d CPU tensor given to elements on a GPU: its value is passed with the dynamic scalars."""


@dataclass(frozen=True)
class Instruction:
    """One functional op; `args` are its schema's arguments in order, defaults filled in."""

    op: OpOverload
    args: tuple[Operand, ...]
    dtype: torch.dtype
    compute: torch.dtype
    """The dtype that the operands are converted to before the formula is applied."""
    shape: Shape

    @property
    def name(self) -> str:
        """The op without namespace and overload: `mul` for `aten.mul.Tensor`."""
        return self.op._schema.name.rpartition("::")[2]

    @property
    def is_reduction(self) -> bool:
        """Return whether this reduces the elements of a tensor to one number."""
        return self.name in REDUCTIONS

    def reads(self) -> list[int]:
        """The numbers of the values whose contents the instruction needs (a `zeros_like` needs none)."""
        shape_only = _SHAPE_ONLY.get(self.name)
        return [a.index for i, a in enumerate(self.args) if isinstance(a, Ref) and i != shape_only]


REDUCTIONS = frozenset({"sum", "prod", "amax", "amin"})
"""The reductions of programs; others are expanded into these."""

# The operand of which an op reads the shape alone.
_SHAPE_ONLY = dict.fromkeys(("zeros_like", "ones_like", "full_like", "copy", "fill", "zero", "numel"), 0)


@dataclass(frozen=True)
class Program:
    """The computation of one call, written for one element of every list."""

    name: str
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    scalars: tuple[type[float] | type[int], ...] = ()
    stores: dict[int, int] = field(default_factory=dict)
    """Parameter number -> the value it holds afterwards."""
    outputs: tuple[int, ...] = ()

    def value(self, index: int) -> Parameter | Instruction:
        """The parameter or instruction of value `index`."""
        first = len(self.parameters)
        return self.parameters[index] if index < first else self.instructions[index - first]

    def __hash__(self) -> int:
        return hash((self.parameters, self.instructions, self.outputs, tuple(self.stores.items())))

    def __str__(self) -> str:
        lines = [f"{self.name}({', '.join(_declaration(i, p) for i, p in enumerate(self.parameters))}):"]
        for i, step in enumerate(self.instructions, len(self.parameters)):
            lines.append(f"  {_declaration(i, step)} = {step.op}({', '.join(map(_operand, step.args))})")
        lines += [f"  store v{v} -> {self.parameters[p].name}" for p, v in self.stores.items()]
        return "\n".join([*lines, f"  return {', '.join(f'v{v}' for v in self.outputs) or 'nothing'}"])


def _declaration(index: int, value: Parameter | Instruction) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"v{index}: {dtype}{_SUFFIXES[value.shape]}"


_SUFFIXES = {Shape.PER_ELEMENT: "", Shape.PER_TENSOR: " 0-d", Shape.PER_BLOCK: " a block"}


def _operand(operand: Operand) -> str:
    match operand:
        case Ref(index):
            return f"v{index}"
        case Scalar(index):
            return f"s{index}"
        case _:
            return str(operand)


def call_form(op: OpOverload, args: Sequence[T]) -> tuple[list[T], dict[str, T]]:
    """Schema-ordered arguments as positional and keyword-only ones."""
    schema = op._schema.arguments
    positional = [a for a, s in zip(args, schema, strict=False) if not s.kwarg_only]
    return positional, {s.name: a for a, s in zip(args, schema, strict=False) if s.kwarg_only}
