"""Bucket sizes that know which true size they stand for: what `shape` of a PaddedTensor gives.

To Python a `PaddedSize` is the bucket's size, an int. Sums, differences and multiples keep the expression of the true
size, so that `x[:, : x.shape[1] - 1]` ends one before the true end, whatever the bucket is. The rules of a few ops take
such numbers; any other call that gets one runs at the true sizes. What a program decides by a size, and where it takes
it as any number, is noted by the conditions of the bucketed program that runs, and by the debug modes that are on.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.tree import PyTree, map_arguments, tree_has
from subtensors.dispatch.padded.size_conditions import COMPARISONS, HostSize, SizeCondition, noting
from subtensors.dispatch.padded.true_sizes import SizeKey, TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, padded_dim, static_dims
from subtensors.dispatch.sizes.expressions import (
    Size,
    added,
    as_expression,
    floor_divided,
    largest,
    multiplied,
    remainder,
    smallest,
    value_at,
)

if TYPE_CHECKING:
    import sympy


class SizeWatcher(Protocol):
    """A debug mode, which is told how a program uses the number of a bucket's size."""

    def note_number(self, size: PaddedSize, operation: str) -> None:
        """Note that the program got a plain number of a size; "" for one that may be text, or be read to compare."""

    def note_comparison(self, size: PaddedSize, name: str, other: float, outcome: bool, operation: str) -> None:
        """Note the outcome of a size's method that compares it with a number, or with another size."""


watchers: list[SizeWatcher] = []
"""The debug modes that are on."""


class PaddedSize(int):
    """A number made of bucket sizes, with the same number made of true sizes.

    Args:
        bucket: the number that Python sees.
        size: the true one.
        sizes: the values of its symbols.
    """

    size: Size
    sizes: TrueSizes
    origin: str = ""
    """The dim that it is the size of, for warnings."""

    def __new__(cls, bucket: int, size: Size, sizes: TrueSizes) -> Self:
        """Return the number."""
        number = super().__new__(cls, bucket)
        number.size, number.sizes = size, sizes
        return number

    @functools.cached_property
    def text(self) -> str:
        """The true size as text, which is hashed faster than an expression."""
        return text_of(self.size)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # Elsewhere its true sizes mean nothing.
        return int, (int(self),)

    def __bool__(self) -> bool:
        """Return whether the bucket's number is not zero."""
        outcome = int.__bool__(self)
        if watchers or noting.into is not None:
            _note_comparison(self, "__ne__", 0, outcome, "a branch")
        return outcome

    def derived(self, bucket: int, size: Size, sizes: TrueSizes) -> int:
        """Return a number made of this one; a plain int where it is the same at every true size."""
        if size.is_Integer:
            return int(size)
        number = int.__new__(PaddedSize, bucket)
        number.size, number.sizes, number.origin = size, sizes, _made_of(self.origin)
        return number

    def on_device(self) -> Tensor:
        """The true number, () int64.

        Raises:
            UnsupportedCall: it differs from row to row.
        """
        value = self.sizes.of_each(self.size)
        if value.dim():
            raise UnsupportedCall(f"the size {self.size} differs from row to row, and no dim says which is whose")
        return value

    def at(self, host: Mapping[sympy.Symbol, HostSize]) -> HostSize:
        """The number at the true sizes in `host`, which has every symbol; one for each row where they differ."""
        values = tuple(host[symbol] for symbol in self.sizes.symbols)
        return TrueSizes(self.sizes.symbols, self.sizes.buckets, self.sizes.values, values).on_host(self.size, value_at)

    def on_host(self, row: int | None = None) -> int:
        """The true number; waits for the device where the host doesn't know it."""
        return value_at(self.size, self.sizes.assignment(row))


@functools.lru_cache(4096)
def _made_of(origin: str) -> str:
    return origin if origin.startswith("made") else f"made of {origin}"


_BY_NUMBER = frozenset(["__floordiv__", "__mod__"])
"""The methods that keep the true size only where the other operand is a positive number that is no size."""
_LINEAR = frozenset(["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"])
"""The methods whose result with an integer that is no padded size is a padded size, or the same at all true sizes."""


def _computing(name: str, combined: Callable[[Size, Size], Size] | None, operation: str) -> Callable[..., object]:
    """Return the method of `int` with this name, which computes with the true size too where that is `combined`."""
    plain: Callable[..., object] = getattr(int, name)

    def method(self: PaddedSize, *others: object) -> object:
        out, other = plain(self, *others), others[0] if others else None
        if combined is not None and isinstance(out, int) and isinstance(other, int):
            if not isinstance(other, PaddedSize):
                if name not in _BY_NUMBER or other >= 1:
                    out = self.derived(out, combined(self.size, as_expression(int(other))), self.sizes)
            elif name not in _BY_NUMBER:
                sizes = self.sizes if other.sizes is self.sizes else merge_sizes([self.sizes, other.sizes])
                assert sizes is not None
                out = self.derived(out, combined(self.size, other.size), sizes)
        if watchers or noting.into is not None:
            _note_number(self, out, other, name, operation)
        return out

    method.__name__ = name
    return method


def _comparing(name: str) -> Callable[[PaddedSize, object], object]:
    """Return the comparison of `int` with this name, which is that of the true sizes where the other is padded too."""
    plain: Callable[[int, object], bool] = getattr(int, name)
    orders, compare = name not in ("__eq__", "__ne__"), COMPARISONS[name][1]

    def method(self: PaddedSize, other: object) -> object:
        # A debug mode goes on where true sizes would decide.
        if orders and isinstance(other, PaddedSize) and other.size != self.size and not watchers:
            outcomes = _outcomes(self, other, plain)
            if len(outcomes) > 1:
                raise UnsupportedCall(
                    f"a branch compares the sizes {self.size} and {other.size}, which true sizes decide"
                )
            return outcomes.pop()
        if isinstance(other, float):
            outcome = compare(int.__int__(self), other)
        else:
            outcome = plain(self, other)
        if (watchers or noting.into is not None) and isinstance(other, int | float):
            _note_comparison(self, name, other, outcome, "a comparison")
        return outcome

    method.__name__ = name
    return method


def _note_comparison(size: PaddedSize, name: str, other: float, outcome: bool, operation: str) -> None:
    """Note a comparison by the program, whose frame called the size's method, which called this."""
    if _is_library(2):
        return
    for watcher in watchers:
        watcher.note_comparison(size, name, other, outcome, operation)
    if noting.into is not None and not isinstance(other, PaddedSize):
        noting.into.note(SizeCondition(size.size, name, other), outcome)


def _note_number(size: PaddedSize, out: object, other: object, name: str, operation: str) -> None:
    """Note that the program gets a plain number or text of a size."""
    # A float and a sequence answer themselves, by the bucket's number.
    is_sequence = isinstance(other, list | tuple | str) and name != "__format__"
    is_plain = not isinstance(out, PaddedSize) and (
        out is not NotImplemented or is_sequence or isinstance(other, float)
    )
    if is_plain and not (name in _LINEAR and isinstance(other, int)) and not _is_library(2):
        for watcher in watchers:
            watcher.note_number(size, "a repeated sequence" if is_sequence else operation)
        noting.number_read()


def _is_library(depth: int) -> bool:
    """Return whether the frame so many above the caller's is the library's own."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__")).startswith("subtensors.")


def _outcomes(a: PaddedSize, b: PaddedSize, compare: Callable[[int, object], bool]) -> set[bool]:
    """Return the outcomes that a comparison has at the true sizes or, where the host doesn't know them, may have."""
    sizes = a.sizes if b.sizes is a.sizes else merge_sizes([a.sizes, b.sizes])
    assert sizes is not None
    if sizes.known_on_host:
        return set(map(compare, sizes.each_on_host(a.size), sizes.each_on_host(b.size)))
    signs = _signs(a.size, b.size, sizes.key) if len(a.size.free_symbols | b.size.free_symbols) == 1 else None
    return {compare(sign, 0) for sign in signs} if signs else {compare(int(a), int(b))}


_COMBINED: dict[str, Callable[[Size, Size], Size]] = {
    "__add__": added,
    "__radd__": added,
    "__sub__": lambda a, b: added(a, multiplied(-1, b)),
    "__rsub__": lambda a, b: added(b, multiplied(-1, a)),
    "__mul__": multiplied,
    "__rmul__": multiplied,
    "__floordiv__": lambda size, by: floor_divided(size, int(by)),
    "__mod__": lambda size, by: remainder(size, int(by)),
}
_ARITHMETIC = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod and
    rand or ror xor rxor lshift rlshift rshift rrshift float round trunc floor ceil invert"""
for _name in [f"__{name}__" for name in _ARITHMETIC.split()]:
    setattr(PaddedSize, _name, _computing(_name, _COMBINED.get(_name), "Python arithmetic"))
for _name in ("__int__", "__repr__", "__format__"):
    setattr(PaddedSize, _name, _computing(_name, None, ""))
for _name in COMPARISONS:
    setattr(PaddedSize, _name, _comparing(_name))
PaddedSize.__neg__ = lambda self: -1 * self  # type: ignore[method-assign]
PaddedSize.__hash__ = int.__hash__  # type: ignore[method-assign]


_LARGEST_GRID = 2**16
"""The most pairs of sizes at which two expressions are compared."""

text_of = functools.lru_cache(4096)(str)
"""The text of an expression."""


def map_sizes(tree: PyTree, function: Callable[[PaddedSize], PyTree]) -> PyTree:
    """Return the arguments of a call with each padded size replaced, in slices too."""
    if not tree_has(PaddedSize, tree):
        return tree
    return map_arguments(tree, lambda x: function(x) if isinstance(x, PaddedSize) else x)


def find_sizes(tree: PyTree) -> list[PaddedSize]:
    """Return the padded sizes among the arguments of a call."""
    found: list[PaddedSize] = []
    map_sizes(tree, found.append)
    return found


def true_expression(number: int) -> Size:
    """Return the true number that an argument stands for."""
    return number.size if isinstance(number, PaddedSize) else as_expression(int(number))


def sizes_with(sizes: TrueSizes | None, *numbers: object) -> TrueSizes | None:
    """Return the true sizes of a value and of the padded sizes among some numbers."""
    others = [number.sizes for number in numbers if isinstance(number, PaddedSize)]
    return merge_sizes([*([] if sizes is None else [sizes]), *others]) if others else sizes


def dim_of(number: int, sizes: TrueSizes | None) -> Factors:
    """Return the dim that a number asks for: a padded one for a padded size."""
    if not isinstance(number, PaddedSize):
        return static_dims([number])[0]
    return padded_dim(most(number.size, sizes), number.size)


def most(size: Size, sizes: TrueSizes | None) -> int:
    """Return the largest value of an expression at any true sizes of the buckets.

    Raises:
        UnsupportedCall: it is not found.
    """
    bounds = _bounds(size, None if sizes is None else sizes.key)
    if bounds is None:
        raise UnsupportedCall(f"no bucket is known to hold the size {size}")
    return bounds[1]


def least(size: Size, sizes: TrueSizes | None) -> int:
    """Return the smallest value of an expression, as `most` does the largest."""
    bounds = _bounds(size, None if sizes is None else sizes.key)
    if bounds is None:
        raise UnsupportedCall(f"the size {size} may be negative")
    return bounds[0]


def is_same(a: Size, b: Size, sizes: TrueSizes | SizeKey | None) -> bool:
    """Return whether two sizes are equal at all true sizes of the buckets."""
    if a == b:
        return True
    known = sizes if sizes is None or isinstance(sizes, SizeKey) else sizes.key
    return known is not None and _signs(a, b, known) == frozenset([0])


def bound_in(size: Size, bound: int | None, default: Size | int, sizes: TrueSizes | None) -> Size:
    """Return the position that a bound of a slice means in a dim of a true size; a negative one counts from its end."""
    if bound is None:
        return as_expression(default)
    position = true_expression(bound)
    bounds = _bounds(position, None if sizes is None else sizes.key)
    clamped = smallest(position, size)
    if bounds is not None and bounds[0] >= 0:
        return clamped
    from_end = largest(0, added(size, position))
    if position.is_Integer:
        return from_end if position < 0 else clamped
    # One where the bound is negative, else zero.
    is_negative = smallest(1, largest(0, multiplied(-1, position)))
    exact = largest(0, smallest(size, added(position, multiplied(size, is_negative))))
    # Where a sign makes no difference, the simpler expression fits those of other dims.
    return next((simple for simple in (largest(0, clamped), from_end) if is_same(simple, exact, sizes)), exact)


@functools.lru_cache(4096)
def _signs(a: Size, b: Size, known: SizeKey) -> frozenset[int] | None:
    """Return the signs that `a - b` has where neither is negative, as that is an error without padding."""
    points = _values((a, b), known)
    return None if points is None else frozenset((m > n) - (m < n) for m, n in points if m >= 0 and n >= 0)


@functools.lru_cache(4096)
def _bounds(size: Size, known: SizeKey | None) -> tuple[int, int] | None:
    """Return the smallest and the largest value of an expression; None where they aren't found."""
    points = _values((size,), known, is_monotone=_grows(size))
    return None if points is None else (min(points)[0], max(points)[0])


def _values(sizes: tuple[Size, ...], known: SizeKey | None, is_monotone: bool = False) -> list[tuple[int, ...]] | None:
    """Return the values of expressions at all true sizes of the buckets; None where that is unknown, or too many.

    Where they are monotone, the first and the last of these sizes are enough.
    """
    import sympy

    symbols = sorted(set().union(*(size.free_symbols for size in sizes)), key=str)
    if symbols and (known is None or not set(symbols) <= set(known.symbols)):
        return None
    buckets = [known.buckets[known.symbols.index(symbol)] for symbol in symbols] if known is not None else []
    if is_monotone:
        return [
            tuple(value_at(size, dict(zip(symbols, ends, strict=True))) for size in sizes)
            for ends in ([0] * len(buckets), buckets)
        ]
    if len(symbols) > 2 or (len(symbols) == 2 and math.prod(buckets) > _LARGEST_GRID):
        return None
    function = sympy.lambdify(symbols, sizes, modules=[{"Max": max, "Min": min}, "math"], dummify=True)
    return [function(*point) for point in itertools.product(*(range(bucket + 1) for bucket in buckets))]


def _grows(size: Size) -> bool:
    """Return whether an expression never shrinks as one of its symbols, which are not negative, grows."""
    import sympy

    if size.is_Symbol or size.is_Integer:
        return True
    if isinstance(size, sympy.Mul):
        return all(part.is_nonnegative and (part.is_Rational or _grows(part)) for part in size.args)
    if isinstance(size, sympy.Add | sympy.Min | sympy.Max | sympy.floor):
        return all(part.is_Rational or _grows(part) for part in size.args)
    return False
