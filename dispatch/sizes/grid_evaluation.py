"""Conditions on sizes evaluated over a grid of them, exactly: as Python would with each size in turn.

Integers stay integers: int64 where nothing can overflow, and Python's own beyond it. Floats are those of Python, with
one reservation. Sympy merges and reorders sums and products, as in `n * 0.1 * 3`, so that their last bit may be another
one. Where that bit decides a condition the point is *doubtful*, and so is one at which the condition is undefined.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import sympy

Values: TypeAlias = np.ndarray
"""(points,) or (): int64, float64, or objects where numbers are Python ints or fractions."""

LARGEST_EXPONENT = 4096


class NotEvaluated(Exception):
    """A condition contains a function that is not known here."""


@dataclass
class SizeGrid:
    """Points with a size for each symbol.

    Args:
        sizes: the size at every point, (points,) int64, by symbol.

    Example:
        >>> n = sympy.Symbol("n", integer=True)
        >>> SizeGrid({n: np.arange(5)}).holds(sympy.Eq(sympy.Mod(n, 2), 0))[0].tolist()
        [True, False, True, False, True]
    """

    sizes: Mapping[sympy.Symbol, Values]
    _rounded: dict[sympy.Basic, Values] = field(default_factory=dict)
    _doubtful: Values = field(default_factory=lambda: np.zeros((), dtype=bool))

    def holds(self, condition: sympy.Basic) -> tuple[Values, Values]:
        """Return where a condition holds and where that is doubtful, each (points,) bool.

        Raises:
            NotEvaluated: it contains another function than those of torch's symbolic sizes.
        """
        self._rounded, self._doubtful = {}, np.zeros((), dtype=bool)
        with np.errstate(all="ignore"):
            try:
                found = self._truth(condition)
            except (OverflowError, TypeError, ValueError) as error:  # a float beyond all bounds, or a complex one
                raise NotEvaluated(str(condition)) from error
        points = next(iter(self.sizes.values())).shape
        return np.broadcast_to(found, points), np.broadcast_to(self._doubtful, points)

    def _truth(self, condition: sympy.Basic) -> Values:
        if isinstance(condition, sympy.logic.boolalg.BooleanAtom):
            return np.array(bool(condition))
        if isinstance(condition, sympy.core.relational.Relational):
            left, right = self._value(condition.lhs), self._value(condition.rhs)
            near = self._is_near(left, right)
            self._doubt((self._is_rounded(condition.lhs) | self._is_rounded(condition.rhs)) & near)
            return np.asarray(_COMPARISONS[condition.rel_op](left, right), dtype=bool)
        if isinstance(condition, sympy.Not):
            return ~self._truth(condition.args[0])
        if isinstance(condition, sympy.And | sympy.Or):
            combine = np.logical_and if isinstance(condition, sympy.And) else np.logical_or
            return np.asarray(functools.reduce(combine, map(self._truth, condition.args)), dtype=bool)
        raise NotEvaluated(str(condition))

    def _value(self, expression: sympy.Basic) -> Values:
        if isinstance(expression, sympy.Symbol) and expression in self.sizes:
            return self.sizes[expression]
        if isinstance(expression, sympy.Integer):
            return _narrow(np.array(int(expression), dtype=object))
        if isinstance(expression, sympy.Rational):
            return np.array(Fraction(int(expression.p), int(expression.q)), dtype=object)
        if isinstance(expression, sympy.Float):
            return np.array(float(expression))
        name = type(expression).__name__
        if name in ("Where", "Piecewise"):
            return self._chosen(expression)
        known = _FUNCTIONS.get(name.removeprefix("BitwiseFn_").removeprefix("OpaqueUnaryFn_"))
        if known is None or not expression.args:
            raise NotEvaluated(str(expression))
        operands = [self._value(part) for part in expression.args]
        if name in _DIVISIONS:
            # The program left this path before, or ends with a ZeroDivisionError.
            undefined = np.asarray(operands[1] == 0, dtype=bool)
            self._doubt(undefined)
            operands[1] = np.where(undefined, 1, operands[1])
        if name in _SHIFTING:
            wrong = np.asarray((operands[1] < 0) | (operands[1] > LARGEST_EXPONENT), dtype=bool)
            self._doubt(wrong)
            operands[1] = np.where(wrong, 0, operands[1])
        found = known(*operands) if name not in _ASSOCIATIVE else functools.reduce(known, operands)
        rounded = functools.reduce(operator.or_, map(self._is_rounded, expression.args))
        if name in _STEPS:
            self._doubt(rounded & self._is_near(operands[0] * 2, np.rint(_floats(operands[0]) * 2)))
            rounded = np.zeros((), dtype=bool)
        elif name in ("Add", "Mul") and found.dtype.kind == "f":
            rounded = rounded | ~functools.reduce(operator.and_, map(_is_dyadic, [*operands, found]))
        self._rounded[expression] = rounded
        return found

    def _chosen(self, expression: sympy.Basic) -> Values:
        pairs = [(p.args[0], p.args[1]) for p in expression.args] if type(expression).__name__ == "Piecewise" else None
        if pairs is None:
            condition, then, otherwise = expression.args
            pairs = [(then, condition), (otherwise, sympy.true)]
        found = self._value(pairs[-1][0])
        for value, condition in reversed(pairs[:-1]):
            found = np.where(self._truth(condition), self._value(value), found)
        return found

    def _is_rounded(self, expression: sympy.Basic) -> Values:
        """Return where a value has the rounding of an order of operations that is not the program's."""
        return self._rounded.get(expression, np.zeros((), dtype=bool))

    @staticmethod
    def _is_near(left: Values, right: Values) -> Values:
        a, b = _floats(left), _floats(right)
        return np.asarray(np.abs(a - b) <= 1e-9 * np.maximum(1, np.abs(a)), dtype=bool)

    def _doubt(self, where: Values) -> None:
        self._doubtful = self._doubtful | where


def _floats(values: Values) -> Values:
    return values.astype(np.float64)


def _is_dyadic(values: Values) -> Values:
    """Return where values are so short in binary that sums and products of them are exact in any order."""
    scaled = _floats(values) * 2.0**16
    return np.asarray((scaled == np.rint(scaled)) & (np.abs(scaled) < 2.0**40), dtype=bool)


def _narrow(values: Values) -> Values:
    """Return Python ints as int64 where they are small."""
    if values.dtype == object and all(isinstance(v, int) and abs(v) < 1 << 62 for v in values.flat):
        return values.astype(np.int64)
    return values


def _largest(values: Values) -> int:
    if values.dtype == object:
        return 1 << 63
    return max(abs(int(values.max())), abs(int(values.min()))) if values.size else 0


def _exact(
    operation: Callable[[Values, Values], Values], bound: Callable[[int, int], int]
) -> Callable[[Values, Values], Values]:
    """Return an operation on numbers that goes over to Python ints where its bound says that int64 is too short."""

    def compute(a: Values, b: Values) -> Values:
        if "f" in (a.dtype.kind, b.dtype.kind):
            return np.asarray(operation(_floats(a), _floats(b)))
        if bound(_largest(a), _largest(b)) < 1 << 62:
            return np.asarray(operation(a, b))
        return _narrow(np.asarray(operation(a.astype(object), b.astype(object)), dtype=object))

    return compute


def _elementwise(function: Callable[..., float]) -> Callable[..., Values]:
    """Return a function of Python numbers as one of arrays; numpy's own may round otherwise."""

    def compute(*operands: Values) -> Values:
        arrays = np.broadcast_arrays(*operands)
        cached = functools.cache(function)
        found = [cached(*point) for point in zip(*(array.ravel().tolist() for array in arrays), strict=True)]
        kind = object if any(isinstance(value, int) for value in found) else np.float64
        return _narrow(np.array(found, dtype=kind).reshape(arrays[0].shape))

    return compute


def _divided(a: Values, b: Values) -> Values:
    if max(_largest(a), _largest(b)) < 1 << 53 if "f" not in (a.dtype.kind, b.dtype.kind) else True:
        return np.asarray(_floats(a) / _floats(b))
    return _elementwise(operator.truediv)(a, b)


def _unary(name: str) -> Callable[[float], float]:
    function = getattr(math, name)

    def compute(value: float) -> float:
        try:
            return float(function(float(value)))
        except (OverflowError, ValueError):  # the program raises it, too
            return math.nan

    return compute


_add, _mul = _exact(operator.add, operator.add), _exact(operator.mul, operator.mul)
_floor_divided, _modulo = _exact(operator.floordiv, max), _exact(operator.mod, max)

_FUNCTIONS: dict[str, Callable[..., Values]] = {
    "Add": _add,
    "Mul": _mul,
    "Min": _exact(np.minimum, max),
    "Max": _exact(np.maximum, max),
    "Abs": np.abs,
    "FloorDiv": _floor_divided,
    "CleanDiv": _floor_divided,
    "CeilDiv": lambda a, b: -_floor_divided(-a, b),
    "Mod": _modulo,
    "PythonMod": _modulo,
    "ModularIndexing": lambda a, b, c: _modulo(_floor_divided(a, b), c),
    "Pow": _elementwise(operator.pow),
    "PowByNatural": _elementwise(operator.pow),
    "LShift": _elementwise(operator.lshift),
    "RShift": _elementwise(operator.rshift),
    "bitwise_and": _elementwise(operator.and_),
    "bitwise_or": _elementwise(operator.or_),
    "bitwise_xor": _elementwise(operator.xor),
    "IntTrueDiv": _divided,
    "FloatTrueDiv": _divided,
    "FloatPow": _elementwise(lambda a, b: float(a) ** float(b)),
    "ToFloat": _floats,
    "Identity": lambda a: a,
    "TruncToFloat": np.trunc,
    "TruncToInt": _elementwise(math.trunc),
    "FloorToInt": _elementwise(math.floor),
    "CeilToInt": _elementwise(math.ceil),
    "RoundToInt": _elementwise(round),
    "RoundDecimal": _elementwise(lambda a, digits: float(round(a, digits))),
    **{
        name: _elementwise(_unary(name))
        for name in "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()
    },
}  # fmt: skip
_FUNCTIONS["floor"], _FUNCTIONS["ceiling"] = _FUNCTIONS["FloorToInt"], _FUNCTIONS["CeilToInt"]

_DIVISIONS = {"FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv"}
_SHIFTING = {"Pow", "PowByNatural", "LShift", "RShift"}
_ASSOCIATIVE = {"Add", "Mul", "Min", "Max"}
_STEPS = {"TruncToFloat", "TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt", "RoundDecimal", "floor", "ceiling"}

_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
