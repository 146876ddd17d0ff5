"""The Triton formula of each functional op: tables from op name to formula.

Every operand is already converted to the op's compute type, so an entry is the bare formula. Transcendental functions
come from `libdevice`, CUDA's own math library, because torch's kernels call it too: the results agree to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from subtensors.kernels.fused.program import Instruction, Scalar, Shape


class Text(str):
    """An operand as source text; `literal` is its value when it was written in the program."""

    literal: bool | int | float | None

    def __new__(cls, text: str, literal: bool | int | float | None = None) -> Text:
        """Wrap `text`."""
        self = super().__new__(cls, text)
        self.literal = literal
        return self


ABSENT = Text("None")
"""An optional operand that was not given."""

ONE = Text("1", 1)
"""A scale that changes nothing."""

Template = Callable[..., str]

HALF = frozenset({torch.bfloat16, torch.float16})
FLOATS = HALF | {torch.float32, torch.float64}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
DTYPES = FLOATS | INTEGERS | {torch.bool}

TRITON_TYPES = {dtype: str(dtype).replace("torch.", "tl.") for dtype in DTYPES} | {torch.bool: "tl.int1"}


def _call(name: str) -> Template:
    return lambda *args: f"{name}({', '.join(args)})"


def _libdevice(name: str) -> Template:
    return _call(f"libdevice.{name}")


def _scaled(term: str, scale: Text) -> str:
    return term if scale.literal == 1 else f"{scale} * {term}"


def _clamp(x: Text, low: Text = ABSENT, high: Text = ABSENT) -> str:
    if low is not ABSENT:
        x = Text(f"tl.maximum({x}, {low}, propagate_nan=tl.PropagateNan.ALL)")
    if high is not ABSENT:
        x = Text(f"tl.minimum({x}, {high}, propagate_nan=tl.PropagateNan.ALL)")
    return x


# The exponents that torch's kernels special-case, so that both round alike.
_SPECIAL_POWERS: dict[float | None, str] = {
    -2: "div(1.0, {0} * {0})",
    -1: "div(1.0, {0})",
    -0.5: "libdevice.rsqrt({0})",
    0.5: "sqrt({0})",
    1: "{0}",
    2: "({0} * {0})",
    3: "({0} * {0} * {0})",
}


def _power(base: Text, exponent: Text) -> str:
    special = _SPECIAL_POWERS.get(exponent.literal)
    return special.format(base) if special else f"power({base}, {exponent})"


def _divide(a: Text, b: Text, rounding: Text = ABSENT) -> str:
    return f"{_ROUNDED_DIVISIONS[rounding.strip()]}({a}, {b})"


_ROUNDED_DIVISIONS = {"None": "div", "'floor'": "floor_divide", "'trunc'": "trunc_divide"}

_NAMES = "mul eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor".split()
_SIGNS = "* == != < <= > >= & | ^".split()

_SHARED: dict[str, Template] = {
    "add": lambda a, b, alpha=ONE: f"({a} + {_scaled(b, alpha)})",
    "sub": lambda a, b, alpha=ONE: f"({a} - {_scaled(b, alpha)})",
    "rsub": lambda a, b, alpha=ONE: f"({b} - {_scaled(a, alpha)})",
    **{name: f"({{0}} {sign} {{1}})".format for name, sign in zip(_NAMES, _SIGNS, strict=True)},
    "neg": "(-{0})".format,
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)".format,
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)".format,
    "fmax": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.NONE)".format,
    "fmin": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.NONE)".format,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, ABSENT, high),
    "relu": lambda x: _clamp(x, Text("0", 0)),
    "abs": "tl.abs({0})".format,
    "sign": "(({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype))".format,
    "isnan": "({0} != {0})".format,
    "div": _divide,
    "floor_divide": _call("floor_divide"),
    "remainder": _call("remainder"),
    "where": "tl.where({0}, {1}, {2})".format,
    "masked_fill": "tl.where({1}, {2}, {0})".format,
    "addcmul": lambda x, a, b, value=ONE: f"({x} + {_scaled(f'({a} * {b})', value)})",
    # Conversions and copies: the cast around the expression does everything.
    **dict.fromkeys(("_to_copy", "clone", "convert_element_type"), lambda x, *_: x),
    "copy": lambda _, source, *__: source,
    "fill": lambda _, value: value,
    "full_like": lambda _, value, *__: value,
    "zero": lambda *_: "0",
    "zeros_like": lambda *_: "0",
    "ones_like": lambda *_: "1",
    "scalar_tensor": lambda value, *_: value,
    "numel": lambda *_: "size",
    "full": lambda _, value, *__: value,
}

_FLOAT: dict[str, Template] = {
    "reciprocal": lambda x: f"div(1.0, {x})",
    "addcdiv": lambda x, a, b, value=ONE: f"({x} + {_scaled(f'div({a}, {b})', value)})",
    # Torch's two-sided form, exact at both ends.
    "lerp": "tl.where(tl.abs({2}) < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1.0 - {2}))".format,
    "sqrt": _call("sqrt"),
    "rsqrt": _libdevice("rsqrt"),
    "pow": _power,
    "sigmoid": "div(1.0, 1.0 + libdevice.exp(-{0}))".format,
    "round": _libdevice("nearbyint"),
    "frac": "({0} - libdevice.trunc({0}))".format,
    "isinf": "(tl.abs({0}) == float('inf'))".format,
    "blockwise_absmax": lambda x: f"blockwise_absmax({x}, inside, FULL, BLOCK)",
    "quantize_blockwise": lambda x, scales, signed: f"quantize_blockwise({x}, {scales}, {signed.literal}, BLOCK)",
    "dequantize_blockwise": lambda x, scales, signed: f"dequantize_blockwise({x}, {scales}, {signed.literal}, BLOCK)",
    "stochastic_round": lambda x, salt: f"stochastic_round({x}, seed, tile, which, {salt.literal}, BLOCK)",
    **{
        name: _libdevice(name)
        for name in """acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1
        floor fmod hypot lgamma log log10 log1p log2 sin sinh tan tanh trunc""".split()
    },
}

_INTEGER: dict[str, Template] = {
    "isinf": "({0} != {0})".format,
    **dict.fromkeys(("ceil", "floor", "round", "trunc"), "{0}".format),
    "fmod": "({0} % {1})".format,
    "bitwise_not": "(~{0})".format,
    "pow": lambda base, exponent: _SPECIAL_POWERS[exponent.literal].format(base),
}

# Booleans compute as int8, but for these.
_LOGICAL: dict[str, Template] = {
    "logical_and": "(({0}.to(tl.int8) & {1}.to(tl.int8)) != 0)".format,
    "logical_or": "(({0}.to(tl.int8) | {1}.to(tl.int8)) != 0)".format,
    "logical_xor": "({0} != {1})".format,
    "logical_not": "({0} == 0)".format,
}

# Booleans differ: -2, the bitwise complement of 1, is as true as 1.
_BOOL: dict[str, Template] = {"bitwise_not": "({0} == 0)".format}

_REDUCE = {"sum": "tile_sum", "prod": "tile_prod", "amax": "tile_amax", "amin": "tile_amin"}


def identity(name: str, dtype: torch.dtype) -> str:
    """Return the identity of reduction `name` in registers of `dtype`, for lanes beyond the end."""
    if name in ("sum", "prod"):
        return "0" if name == "sum" else "1"
    if dtype in FLOATS:
        return "float('-inf')" if name == "amax" else "float('inf')"
    return str(torch.iinfo(dtype).min if name == "amax" else torch.iinfo(dtype).max)


# The operand that is a condition rather than a number.
CONDITIONS = {"where": 0, "masked_fill": 1}


def template(name: str, compute: torch.dtype) -> Template | None:
    """The formula of op `name` on operands of dtype `compute`; None when there is none."""
    if name in _REDUCE:
        return _call(_REDUCE[name])
    if name in _LOGICAL:
        return _LOGICAL[name]
    if compute == torch.bool and name in _BOOL:
        return _BOOL[name]
    return _SHARED.get(name) or (_FLOAT if compute in FLOATS else _INTEGER).get(name)


def can_lower(instruction: Instruction) -> bool:
    """Return whether Triton has a formula for this instruction, with its dtypes and literals."""
    name, compute = instruction.name, instruction.compute
    if not DTYPES.issuperset((compute, instruction.dtype)) or template(name, compute) is None:
        return False
    if name == "round" and len(instruction.args) > 1:
        # The second argument is a number of decimals.
        return False
    if name == "pow" and compute in INTEGERS:
        exponent = instruction.args[1]
        return isinstance(exponent, int) and exponent in (1, 2, 3)
    return not may_exceed_dtype(instruction)


def may_exceed_dtype(instruction: Instruction) -> bool:
    """Return whether integers are clamped to a bound that may not fit their dtype.

    Some versions of torch ignore such a bound, some wrap it around, and some raise an error.
    """
    if instruction.name not in ("clamp", "clamp_min", "clamp_max") or instruction.compute not in INTEGERS:
        return False
    info = torch.iinfo(instruction.compute)
    for bound in instruction.args[1:]:
        if isinstance(bound, Scalar) and instruction.compute != torch.int64:
            return True
        if isinstance(bound, int) and not info.min <= bound <= info.max:
            return True
    return False


def register(dtype: torch.dtype, shape: Shape) -> torch.dtype:
    """The dtype a value of `dtype` has in registers.

    Half precision computes in float32; a number per tensor computes in float64, once for the whole tile,
    so that `1 - beta ** step` keeps its precision.
    """
    if dtype not in FLOATS:
        return dtype
    return torch.float64 if shape is Shape.PER_TENSOR or dtype == torch.float64 else torch.float32
