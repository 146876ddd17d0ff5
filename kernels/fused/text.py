"""Numbers and conversions as Triton source."""

from __future__ import annotations

import math
import re

import torch

from subtensors.kernels.fused.lowering import HALF, TRITON_TYPES


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype that numbers of this one are computed in: truths as int8."""
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
    """The number as an integer type of so many bits holds it: torch's -1 is 255 beside an uint8."""
    return (number - info.min) % (1 << info.bits) + info.min


def constant(number: float, dtype: torch.dtype) -> str:
    """A scalar of this dtype; -0.0 by its bits, as Triton takes every zero for 0.0."""
    if number == 0 and math.copysign(1, number) < 0 and dtype in (torch.float32, torch.float64):
        bits = torch.finfo(dtype).bits
        return f"tl.full([], {-(2 ** (bits - 1))}, tl.int{bits}).to({TRITON_TYPES[dtype]}, bitcast=True)"
    return f"tl.full([], {literal(number)}, {TRITON_TYPES[dtype]})"


def literal(number: float) -> str:
    """A Python number as Triton reads it."""
    if isinstance(number, float) and not math.isfinite(number):
        return f"float('{number}')"
    return repr(int(number) if isinstance(number, bool) else number)


def renumbered(source: str) -> str:
    """The source with its values numbered as they appear: the same maths is the same text in whatever program.

    >>> renumbered("v7 = a + b; v9 = v7 * v7")
    'v0 = a + b; v1 = v0 * v0'
    """
    numbers: dict[str, int] = {}
    return re.sub(r"\bv(\d+)\b", lambda value: f"v{numbers.setdefault(value[1], len(numbers))}", source)
