"""Sizes as sympy expressions in the symbols of named dimensions: the arithmetic of ops on them, and their values.

A padded dimension reports its bucket size, and carries beside it an expression for the true one: `seq`, `2*seq + 1`,
`floor((seq - 3)/2) + 1`. Expressions are the same for all sizes of a bucket, so compiled code may hold them; their
values come from a small int64 tensor on the device, or from Python ints where the host knows those.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import RuleError, SizeError

if TYPE_CHECKING:
    import sympy

P = ParamSpec("P")
T = TypeVar("T")

SizeTuples: TypeAlias = "int | str | tuple[SizeTuples, ...]"
"""An expression as plain values: a number, the name of a symbol, or the name of a function and its arguments."""

Size: TypeAlias = "sympy.Expr"
"""An integer expression; a plain int is accepted where one is taken."""


def size_symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a named dimension, a nonnegative integer."""
    import sympy

    return sympy.Symbol(name, integer=True, nonnegative=True)


def as_expression(size: Size | int) -> Size:
    """Return an int as an expression, and an expression unchanged."""
    import sympy

    return sympy.Integer(size) if type(size) is int else sympy.sympify(size)


def as_tuples(size: Size) -> SizeTuples:
    """Return an expression as plain values, which any pickle may hold.

    >>> as_tuples(2 * size_symbol("seq"))
    ('Mul', 2, 'seq')
    """
    if size.is_Integer:
        return int(size)
    if size.is_Rational:
        return ("Rational", int(size.p), int(size.q))
    return str(size) if size.is_Symbol else (type(size).__name__, *map(as_tuples, size.args))


def from_tuples(tuples: SizeTuples) -> Size:
    """Return the expression that `as_tuples` returned as plain values.

    >>> from_tuples(("Mul", 2, "seq"))
    2*seq
    """
    import sympy

    if isinstance(tuples, int):
        return sympy.Integer(tuples)
    if isinstance(tuples, str):
        return size_symbol(tuples)
    kinds = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Rational, sympy.Min, sympy.Max, sympy.Mod, sympy.floor)
    name, *arguments = tuples
    return {kind.__name__: kind for kind in kinds}[str(name)](*map(from_tuples, arguments))


def _memoized(function: Callable[P, T]) -> Callable[P, T]:
    """Cache a function of expressions and ints: sympy takes longer than the op that needs the size."""
    return functools.wraps(function)(functools.lru_cache(4096, typed=True)(function))  # type: ignore[return-value]


def _combining(name: str) -> Callable[..., Size]:
    """Return a function of any number of sizes that is sympy's function with this name.

    >>> added(size_symbol("seq"), 1), multiplied(size_symbol("batch"), size_symbol("seq"), 4)
    (seq + 1, 4*batch*seq)
    """

    @_memoized
    def combined(*sizes: Size | int) -> Size:
        import sympy

        return getattr(sympy, name)(*sizes)

    return combined


added = _combining("Add")
"""The size of a concatenation."""

multiplied = _combining("Mul")
"""The size of several dimensions as one, or of one that is repeated."""

smallest, largest = _combining("Min"), _combining("Max")
"""The minimum and the maximum of several sizes."""


@_memoized
def divided(size: Size | int, by: Size | int) -> Size:
    """The size that makes `size` when multiplied with `by`.

    Raises:
        RuleError: no expression does, whatever the sizes are.

    >>> seq = size_symbol("seq")
    >>> divided(12 * seq, 4)
    3*seq
    """
    import sympy

    quotient = sympy.cancel(sympy.sympify(size) / by)
    # A size is an integer for all integer values of its symbols.
    if not quotient.is_integer or sympy.fraction(sympy.together(quotient))[1] != 1:
        raise RuleError(
            f"a size of {size} cannot be divided by {by}: it is not a multiple of it for every size; "
            "divide a dimension that is not padded, or unpad first"
        )
    return quotient


@_memoized
def floor_divided(size: Size | int, by: int) -> Size:
    """The floor of a size divided by `by`.

    >>> floor_divided(size_symbol("seq") + 1, 2)
    floor(seq/2 + 1/2)
    """
    import sympy

    return sympy.sympify(size) if by == 1 else sympy.floor(size / sympy.Integer(by))


@_memoized
def remainder(size: Size | int, by: int) -> Size:
    """The remainder of a size divided by `by`, as in Python.

    >>> remainder(size_symbol("seq") + 4, 4)
    seq - 4*floor(seq/4)
    """
    import sympy

    # Not as a Mod, which sympy prints into code without the parentheses that a product with it needs.
    return sympy.expand(size - by * floor_divided(size, by))


@_memoized
def sliced(size: Size | int, start: int | None, stop: int | None, step: int = 1) -> tuple[Size, Size]:
    """The start and the size of a Python slice of a dimension; negative bounds count from the true end.

    Args:
        size: of the dimension.
        start, stop, step: of the slice; the step is at least 1.

    Returns:
        The first index, and how many there are.

    Raises:
        RuleError: the step is not positive.

    >>> seq = size_symbol("seq")
    >>> sliced(seq, None, -1), sliced(seq, 0, 64), sliced(seq, 5, None)
    ((0, Max(0, seq - 1)), (0, Min(64, seq)), (Min(5, seq), Max(0, seq - Min(5, seq))))
    """
    if step < 1:
        raise RuleError(f"a slice with step {step} has no size expression; a step is at least 1")
    size = as_expression(size)
    first, last = (_within(size, bound, default) for bound, default in ((start, as_expression(0)), (stop, size)))
    return first, largest(0, _ceiling(last - first, step))


def _within(size: Size, bound: int | None, default: Size) -> Size:
    if bound is None:
        return default
    return largest(0, size + bound) if bound < 0 else smallest(bound, size)


@_memoized
def convolved(
    size: Size | int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, ceil_mode: bool = False
) -> Size:
    """The size of a convolution's or a pooling's result along one dimension.

    Args:
        size: of the input.
        kernel, stride, padding, dilation: along the dimension; `padding` is that of one side.
        ceil_mode: whether a window may reach beyond the end, as in pooling.

    >>> convolved(size_symbol("t"), kernel=3, stride=2, padding=1)
    floor(t/2 - 1/2) + 1
    """
    reach = as_expression(size) + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return floor_divided(reach, stride) + 1
    windows = _ceiling(reach, stride) + 1
    # The last window has to start inside the input or its left padding.
    return smallest(windows, _ceiling(as_expression(size) + padding, stride))


@_memoized
def deconvolved(
    size: Size | int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, output_padding: int = 0
) -> Size:
    """The size of a transposed convolution's result along one dimension; arguments as of `convolved`.

    >>> deconvolved(size_symbol("t"), kernel=4, stride=2, padding=1)
    2*t
    """
    return (as_expression(size) - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def _ceiling(numerator: Size, denominator: int) -> Size:
    return -floor_divided(-numerator, denominator)


def size_on_host(size: Size | int, sizes: Mapping[sympy.Symbol, int]) -> int:
    """The value of an expression, from Python ints.

    Args:
        size: the expression.
        sizes: the true size behind each symbol.

    Raises:
        SizeError: a symbol has no size here, or the value is negative or no integer.

    >>> seq = size_symbol("seq")
    >>> size_on_host(convolved(seq, kernel=3, stride=2), {seq: 8})
    3
    """
    import sympy

    expression = sympy.sympify(size)
    missing = expression.free_symbols - set(sizes)
    if missing:
        raise SizeError(f"the size {expression} needs {sorted(map(str, missing))}, which nothing here is padded on")
    value = expression.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()})
    value = value if value.is_Integer else value.doit()  # sympy may leave Min(1, 2) unevaluated within a Max
    if not value.is_Integer or value < 0:
        given = ", ".join(f"{symbol}={sizes[symbol]}" for symbol in sorted(expression.free_symbols, key=str))
        raise SizeError(f"the size {expression} is {value} for {given}; a size is a nonnegative integer")
    return int(value)


def value_at(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    """The value of an expression at some sizes; unlike a size it may be negative."""
    import sympy

    return int(size.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()}))


def size_on_device(size: Size | int, symbols: Sequence[sympy.Symbol], sizes: Tensor) -> Tensor:
    """The value of an expression, computed on the device from its true sizes: the host never reads them.

    Args:
        size: the expression.
        symbols: of the dimensions, in the order of `sizes`.
        sizes: (number of symbols, *rows) int64; `rows` is empty, or the batch of a ragged dimension.

    Returns:
        (*rows) int64. An expression without symbols gives the same number in each row.

    Raises:
        RuleError: the expression holds a symbol that is not listed, or a function that has no device arithmetic.

    >>> seq = size_symbol("seq")
    >>> size_on_device(sliced(seq, 1, -1)[1], [seq], torch.tensor([[5, 2, 1]]))
    tensor([3, 0, 0])
    """
    expression = as_expression(size)
    values = {symbol: sizes[i] for i, symbol in enumerate(symbols)}
    value = _computed(expression, values)
    if isinstance(value, int):
        # Filled on the device: a copy of a host tensor would make the host wait, and breaks graph capture.
        return torch.full(sizes.shape[1:], value, dtype=torch.int64, device=sizes.device)
    return value


def _computed(expression: Size, values: Mapping[sympy.Symbol, Tensor]) -> Tensor | int:
    import sympy

    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        if expression not in values:
            raise RuleError(f"the size {expression} is that of no dimension here; known are {list(map(str, values))}")
        return values[expression]
    numerator, denominator = _fraction(expression)
    if denominator != 1:
        return _computed(numerator, values) // _computed(denominator, values)
    if isinstance(expression, sympy.floor):
        numerator, denominator = _fraction(expression.args[0])
        return _computed(numerator, values) // _computed(denominator, values)
    parts = [_computed(part, values) for part in expression.args]
    if isinstance(expression, sympy.Pow) and isinstance(parts[1], int) and parts[1] > 0:
        return reduce(operator.mul, [parts[0]] * parts[1])
    combine = _DEVICE_ARITHMETIC.get(type(expression).__name__)
    if combine is None:
        raise RuleError(f"a size of {expression} has no device arithmetic: {type(expression).__name__} is not known")
    return reduce(combine, parts)


@_memoized
def _fraction(expression: Size) -> tuple[Size, Size]:
    import sympy

    numerator, denominator = sympy.fraction(sympy.together(expression))
    return numerator, denominator


def _minimum(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else torch.clamp(a, max=b)
    return torch.clamp(b, max=a) if isinstance(b, Tensor) else min(a, b)


def _maximum(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp(a, min=b)
    return torch.clamp(b, min=a) if isinstance(b, Tensor) else max(a, b)


_DEVICE_ARITHMETIC: dict[str, Callable[..., Tensor | int]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Mod": operator.mod,
    "Min": _minimum,
    "Max": _maximum,
}
"""The functions of sympy that the device computes, by name."""
