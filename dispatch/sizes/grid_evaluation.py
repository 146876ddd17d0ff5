"""Conditions on sizes evaluated over a grid of them by Python itself: as the program would with each size in turn.

A condition becomes a function of its symbols, which runs on Python's own numbers at each of their points. There is one
reservation: sympy merges and reorders sums and products, as in `n * 0.1 * 3`, so that the last bit of a float may be
another one. Where that bit decides a condition the point is *doubtful*, and so is one at which the condition raises.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import sympy

Function: TypeAlias = "Callable[..., object]"

LARGEST_EXPONENT = 4096


class NotEvaluated(Exception):
    """A condition contains a function or a symbol that is not known here."""


class _Doubtful(ArithmeticError):
    """The last bit of a float decides a condition, or an exponent is too large to compute with."""


class _Rounded(float):
    """A float with the rounding of an order of operations that is not the program's."""


@dataclass(frozen=True)
class SizeGrid:
    """Points with a size for each symbol.

    Args:
        sizes: the sizes of each symbol, int64 arrays that broadcast to the grid.

    Example:
        >>> n = sympy.Symbol("n", integer=True)
        >>> SizeGrid({n: np.arange(5)}).holds(sympy.Eq(sympy.Mod(n, 2), 0))[0].tolist()
        [True, False, True, False, True]
    """

    sizes: Mapping[sympy.Symbol, np.ndarray]
    _known: dict[sympy.Basic, np.ndarray] = field(default_factory=dict)

    def holds(self, condition: sympy.Basic) -> tuple[np.ndarray, np.ndarray]:
        """Return where a condition holds and where that is doubtful, each a bool array of the grid's shape.

        Raises:
            NotEvaluated: it contains another function than those of torch's symbolic sizes, or another symbol.
        """
        if condition not in self._known:
            symbols = [symbol for symbol in self.sizes if symbol in condition.free_symbols]
            compute = _function_of(condition, symbols)

            def outcome(*sizes: int) -> int:
                try:
                    return int(bool(compute(*sizes)))
                except (ArithmeticError, ValueError, TypeError):  # what the program raises there, too
                    return -1

            # A symbol that the condition lacks takes no part.
            own = [self.sizes[symbol] for symbol in symbols]
            found = np.frompyfunc(outcome, len(own), 1)(*own) if own else outcome()
            shape = np.broadcast_shapes(*[sizes.shape for sizes in self.sizes.values()])
            self._known[condition] = np.broadcast_to(np.asarray(found, dtype=np.int64), shape)
        return self._known[condition] == 1, self._known[condition] == -1


def _function_of(condition: sympy.Basic, symbols: Sequence[sympy.Symbol]) -> Function:
    """Return a condition as a Python function of its symbols."""
    scope: dict[str, object] = {}
    names = {symbol: f"size{i}" for i, symbol in enumerate(symbols)}

    def source(part: sympy.Basic) -> str:
        if part in names:
            return names[part]
        if not part.args:
            scope[name := f"constant{len(scope)}"] = _number(part)
            return name
        name = type(part).__name__.removeprefix("BitwiseFn_").removeprefix("OpaqueUnaryFn_")
        if name not in _FUNCTIONS:
            raise NotEvaluated(str(part))
        scope[name] = _FUNCTIONS[name]
        return f"{name}({', '.join(map(source, part.args))})"

    function: Function = eval(f"lambda {', '.join(names.values())}: {source(condition)}", scope)
    return function


def _number(part: sympy.Basic) -> object:
    if isinstance(part, sympy.logic.boolalg.BooleanAtom):
        return bool(part)
    if isinstance(part, sympy.Float):
        return float(part)
    if isinstance(part, sympy.Rational):
        return int(part) if part.is_Integer else Fraction(int(part.p), int(part.q))
    raise NotEvaluated(str(part))


def _is_dyadic(value: float) -> bool:
    """Return whether a value is so short in binary that sums and products of such ones are exact in any order."""
    scaled = value * 2.0**16
    return scaled == round(scaled) and abs(scaled) < 2.0**40


def _refuse_near(a: object, b: object, *rounded: object) -> None:
    """Raise _Doubtful for numbers that the last bit of a rounded one makes equal, or not."""
    if any(type(value) is _Rounded for value in rounded) and abs(a - b) <= 1e-9 * max(1, abs(a)):  # type: ignore[operator, arg-type]
        raise _Doubtful


def _combined(operation: Callable[[float, float], float]) -> Function:
    """Return an operation on several values, which sympy may have reordered."""

    def compute(*values: float) -> object:
        found = functools.reduce(operation, values)
        if type(found) is int:
            return found
        is_exact = _Rounded not in map(type, values) and all(map(_is_dyadic, (*values, found)))
        return _Rounded(found) if isinstance(found, float) and not is_exact else found

    return compute


def _applied(function: Function) -> Function:
    """Return a function whose result is rounded if an operand is."""

    def compute(*values: object) -> object:
        found = function(*values)
        return _Rounded(found) if isinstance(found, float) and _Rounded in map(type, values) else found

    return compute


def _step(function: Function) -> Function:
    """Return a function that rounds to an integer."""

    def compute(value: float) -> object:
        _refuse_near(value * 2, round(value * 2), value)
        return function(value)

    return compute


def _compared(comparison: Function) -> Function:
    def compute(left: float, right: float) -> object:
        _refuse_near(left, right, left, right)
        return comparison(left, right)

    return compute


def _bounded(function: Function) -> Function:
    """Return a function of a base and an exponent, which is doubtful where that is out of bounds."""

    def compute(base: int, exponent: int) -> object:
        if not 0 <= exponent <= LARGEST_EXPONENT:
            raise _Doubtful
        return function(base, exponent)

    return compute


_FUNCTIONS: dict[str, Function] = {
    "Equality": _compared(operator.eq),
    "Unequality": _compared(operator.ne),
    "StrictLessThan": _compared(operator.lt),
    "LessThan": _compared(operator.le),
    "StrictGreaterThan": _compared(operator.gt),
    "GreaterThan": _compared(operator.ge),
    "Not": operator.not_,
    "And": lambda *parts: all(parts),
    "Or": lambda *parts: any(parts),
    "Where": lambda condition, then, otherwise: then if condition else otherwise,
    "ExprCondPair": lambda *pair: pair,
    "Piecewise": lambda *pairs: next(value for value, condition in pairs if condition),
    "Add": _combined(operator.add),
    "Mul": _combined(operator.mul),
    "Min": min,
    "Max": max,
    "Abs": _applied(abs),
    **dict.fromkeys(["FloorDiv", "CleanDiv"], operator.floordiv),
    "CeilDiv": lambda a, b: -(-a // b),
    **dict.fromkeys(["Mod", "PythonMod"], operator.mod),
    "ModularIndexing": lambda a, b, c: a // b % c,
    **dict.fromkeys(["Pow", "PowByNatural"], _applied(_bounded(operator.pow))),
    "LShift": _bounded(operator.lshift),
    "RShift": _bounded(operator.rshift),
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    **dict.fromkeys(["IntTrueDiv", "FloatTrueDiv"], _applied(operator.truediv)),
    "FloatPow": _applied(lambda a, b: float(a) ** float(b)),
    "ToFloat": _applied(float),
    "Identity": lambda a: a,
    "TruncToFloat": _step(lambda a: float(math.trunc(a))),
    "TruncToInt": _step(math.trunc),
    **dict.fromkeys(["FloorToInt", "floor"], _step(math.floor)),
    **dict.fromkeys(["CeilToInt", "ceiling"], _step(math.ceil)),
    "RoundToInt": _step(round),
    "RoundDecimal": _applied(lambda a, digits: float(round(a, digits))),
    **{
        name: _applied(getattr(math, name))
        for name in "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()
    },
}
"""The functions that a condition is made of, by the names of sympy's classes for them."""
