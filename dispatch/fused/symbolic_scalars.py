"""Python numbers whose values a trace must not read: arithmetic on them is recorded as text, and done by Python later.

Nothing is simplified. `k * 0` and `k - k` are NaN for an infinite k, `(k + 1) - 1` is not always k, and `2 / k` raises
where Python does: an expression is computed at each call as the function computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

SymbolicScalar = torch.SymFloat | torch.SymInt
Evaluator = Callable[[Sequence[float]], float]

_UNARY = {"neg": "(-{})", "pos": "(+{})", "abs": "abs({})"}
_BINARY = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "mod": "({} % {})",
    **dict.fromkeys(("floordiv", "int_floordiv"), "({} // {})"),
    **dict.fromkeys(("pow", "float_pow", "pow_by_natural"), "({} ** {})"),
    "sym_max": "max({}, {})",
    "sym_min": "min({}, {})",
    "lshift": "({} << {})",
    "rshift": "({} >> {})",
    "bitwise_and": "({} & {})",
    "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})",
}
_DIVISIONS = ("truediv", "float_truediv", "int_truediv")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ROUNDINGS = ("floor", "ceil", "trunc")
_KINDS = {"is_int": int, "is_float": float, "is_bool": bool}
_ANSWERS = {
    # There is no value, and nothing is known of one; an op checks its numbers itself when it runs.
    **dict.fromkeys(("expect_true", "is_symbolic"), True),
    **dict.fromkeys(("statically_known_true", "is_constant", "is_nested_int", "has_hint"), False),
    **dict.fromkeys(("maybe_as_int", "maybe_as_float", "maybe_as_bool", "nested_int"), None),
}
_DECISIONS = (
    "guard_int guard_float guard_bool guard_size_oblivious int_ bool_ evaluate guard_or_false guard_or_true".split()
)
_FUNCTIONS = "sqrt cos cosh sin sinh tan tanh asin acos atan log2 exp".split()


class ValueNeeded(RuntimeError):
    """A Python decision or conversion that needs the value of a dynamic scalar."""


class RecordedNumber:
    """The node of a dynamic scalar, as torch's SymFloat and SymInt call it: an expression as text, and its type."""

    shape_env = expr = _hint = None

    def __init__(self, text: str, kind: type[float] | type[int], floored: str = "") -> None:
        self.text, self.kind = text, kind
        self.floored = floored
        """`a // b` as text, for `a / b` and its floor: torch writes the former as `float(floor(a / b))`."""

    def __getattr__(self, name: str) -> Callable[..., RecordedNumber | bool | None]:
        """The operation of this name, which torch asks for: a method that records it, or answers for all numbers."""
        if name in _KINDS:
            return lambda: self.kind is _KINDS[name]
        if name in _ANSWERS:
            return lambda *_: _ANSWERS[name]
        if name in _DECISIONS:
            return self._refuse
        if name in _UNARY:
            return lambda: RecordedNumber(_UNARY[name].format(self.text), self.kind)
        if name in _BINARY:
            return lambda other: RecordedNumber(_BINARY[name].format(self.text, other.text), self._common_kind(other))
        if name in _DIVISIONS:
            return lambda other: self._divided_by(other)
        if name in _COMPARISONS:
            return lambda other: RecordedNumber(f"({self.text} {_COMPARISONS[name]} {other.text})", bool)
        if name in _ROUNDINGS:
            return lambda: RecordedNumber(f"math.{name}({self.text})", int, self.floored if name == "floor" else "")
        if name.removeprefix("sym_") in _FUNCTIONS:
            return lambda: RecordedNumber(f"math.{name.removeprefix('sym_')}({self.text})", float)
        raise AttributeError(name)

    def _divided_by(self, other: RecordedNumber) -> RecordedNumber:
        return RecordedNumber(
            f"({self.text} / {other.text})",
            float,
            f"({self.text} // {other.text})" if float in (self.kind, other.kind) else "",
        )

    def _common_kind(self, other: RecordedNumber) -> type[float] | type[int]:
        return float if float in (self.kind, other.kind) else int

    def round(self, ndigits: int | None = None) -> RecordedNumber:
        """Record `round`, which gives an int unless a number of digits is given."""
        return RecordedNumber(f"round({self.text}, {ndigits})", int if ndigits is None else self.kind)

    def sym_float(self) -> RecordedNumber:
        """Record `float`."""
        if self.kind is float:
            return self
        return RecordedNumber(self.floored or f"float({self.text})", float)

    def sym_int(self) -> RecordedNumber:
        """Record `int`."""
        return self if self.kind is int else RecordedNumber(f"int({self.text})", int)

    def sym_not(self) -> RecordedNumber:
        """Record `not`."""
        return RecordedNumber(f"(not {self.text})", bool)

    def wrap_float(self, number: float) -> RecordedNumber:
        """The node of a plain float."""
        return RecordedNumber(f"float('{number!r}')" if not math.isfinite(number) else repr(number), float)

    def wrap_int(self, number: int) -> RecordedNumber:
        """The node of a plain int or bool."""
        return RecordedNumber(repr(number), bool if isinstance(number, bool) else int)

    wrap_bool = wrap_int

    def _refuse(self, *_: object) -> bool:
        raise ValueNeeded(f"the value of {self.text}")

    @property
    def pytype(self) -> type:
        """The type of the value."""
        return self.kind

    def clone(self) -> RecordedNumber:
        """The node itself, which is never changed."""
        return self

    def __str__(self) -> str:
        return self.text

    str = _graph_repr = __repr__ = __str__


def symbolic_scalar(index: int, kind: type[float] | type[int]) -> SymbolicScalar:
    """The `index`-th number of a call: arithmetic on it is recorded, a Python decision raises ValueNeeded."""
    node = RecordedNumber(f"x{index}", kind)
    return torch.SymFloat(node) if kind is float else torch.SymInt(node)


def expression_of(number: SymbolicScalar) -> str:
    """The expression of a dynamic scalar, as Python text; equal texts have equal values."""
    return str(number.node)


def compile_expression(expression: str, count: int) -> Evaluator:
    """A function from the values of a call's numbers to the value of an expression of them.

    Example:
        >>> compile_expression("(x0 * 0)", 1)([float("inf")])
        nan
    """
    names = [f"x{i}" for i in range(count)]
    if expression in names:
        return itemgetter(names.index(expression))
    evaluator: Evaluator = eval(f"lambda values: (lambda {', '.join(names)}: {expression})(*values)", {"math": math})
    return evaluator
