"""The true sizes behind bucket sizes: symbols on the host, their values on the device, and the masks they imply."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subtensors.dispatch.ops.errors import SizeError, UnsupportedCall
from subtensors.dispatch.padded.size_conditions import HostSize, SizeCondition, noting
from subtensors.dispatch.sizes.dim_factors import Factor, Factors
from subtensors.dispatch.sizes.expressions import Size, as_expression, size_on_device, size_on_host, size_symbol
from subtensors.dispatch.torch_internals.dispatcher import is_traced, without_modes, without_overrides

if TYPE_CHECKING:
    import sympy


@cache
def rows_symbol() -> sympy.Symbol:
    """Return the symbol for the size of a ragged batch, whose rows are all valid and may differ in length."""
    # A Dim's name is an identifier, so no Dim has this one; unlike a Dummy it is equal to itself in another process.
    return size_symbol("(rows)")


class SizeKey(NamedTuple):
    """Symbols and their bucket sizes: the key of cached results, which holds no tensor."""

    symbols: tuple[sympy.Symbol, ...]
    buckets: tuple[int, ...]


_kind = lru_cache(4096)(lambda *_: object())


class TrueSizes:
    """The values of some symbols: one number each, or one for each row of a ragged batch.

    Args:
        symbols: the symbols, without `rows_symbol()`.
        buckets: the bucket size of each.
        values: (number of symbols, *rows) int64; `rows` is empty, or the batch of a ragged dimension.
        host: the same values as Python ints, where the host knows them.
    """

    def __init__(
        self,
        symbols: tuple[sympy.Symbol, ...],
        buckets: tuple[int, ...],
        values: Tensor,
        host: tuple[HostSize, ...] | None = None,
    ) -> None:
        self.symbols, self.buckets, self.values = symbols, buckets, values
        self.is_cuda = values.is_cuda
        self.key = SizeKey(symbols, buckets)
        self._host = host
        self.masks: dict[Hashable, Tensor] = {}
        """Masks, fill tensors and values that were computed from these sizes, by what they depend on."""
        self.attention_masks: dict[Hashable, tuple[Tensor, Tensor | None]] = {}
        """The last masks that were made for attention; each with the caller's mask that it includes."""
        self.serves_one_run = False
        """True if made for a single run of a program, in which each mask and expression is computed once."""

    @cached_property
    def kind(self) -> object:
        """An object that all sizes of these symbols, buckets and rows share: the key of what holds for them all."""
        return _kind(self.key, self.rows, self.serves_one_run)

    @cached_property
    def rows(self) -> int | None:
        """The number of rows of the ragged batch; None when each size is one number."""
        return self.values.shape[1] if self.values.dim() == 2 else None

    def host(self) -> tuple[HostSize, ...]:
        """Return the values as Python ints; wait for the device if only it knows them."""
        noting.host_reads += 1
        if self._host is None:
            listed = self.values.tolist()
            self._host = tuple(tuple(v) if isinstance(v, list) else v for v in listed)
        return self._host

    @property
    def known_on_host(self) -> bool:
        """Return whether `host()` can answer without waiting for the device; False in a graph capture."""
        noting.host_reads += 1
        return self._host is not None and not self.is_captured

    def each_on_host(self, size: Size) -> tuple[int, ...]:
        """Return the value of an expression, one for each row of a ragged batch; none where the host doesn't know."""
        return _each_on_host(size, self.symbols, self.host(), self.rows) if self.known_on_host else ()

    def allow(self, size: Size, least: int) -> bool:
        """Return whether a size is at least some number in every row, as far as the host knows, and note the need."""
        if size.is_Integer:
            return bool(size >= least)
        if noting.into is not None:
            own = size.xreplace({rows_symbol(): as_expression(self.rows)}) if self.rows is not None else size
            noting.into.note(SizeCondition(own, "__ge__", least, is_required=True), outcome=True)
        return all(n >= least for n in self.each_on_host(size))

    @property
    def is_captured(self) -> bool:
        """Return whether work on these sizes is being captured into a CUDA graph, which serves other sizes too."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def set(self, host: Sequence[HostSize]) -> None:
        """Set the symbols to other values, in the memory that a captured graph reads.

        Args:
            host: one value a symbol, or for a ragged batch a tuple of one a row.
        """
        source = torch.tensor(host, dtype=torch.int64)
        if self.values.is_cuda:
            source = source.pin_memory()
        self.values.copy_(source, non_blocking=True)
        self._host = tuple(host)
        self.forget()

    def forget(self) -> None:
        """Forget the masks and values of expressions that were computed so far, and free their memory."""
        self.masks.clear()
        self.attention_masks.clear()

    def of(self, size: Size) -> Tensor:
        """The value of an expression on the device: () or (rows,) int64."""
        if not self.serves_one_run:
            return self._of(size)
        if size not in self.masks:
            self.masks[size] = self._of(size)
        return self.masks[size]

    def of_each(self, size: Size) -> Tensor:
        """The value of an expression on the device: (rows,) int64 where rows differ in it, else ()."""
        value = self.of(size)
        return value[0] if value.dim() and not self.differs_by_row(size) else value

    def _of(self, size: Size) -> Tensor:
        if size.is_Symbol and size in self.symbols:
            return self.values[self.symbols.index(size)]
        symbols, values = self.symbols, self.values
        if size.has(rows_symbol()):
            count = torch.full((1, *values.shape[1:]), self.rows or 0, dtype=torch.int64, device=values.device)
            symbols, values = (rows_symbol(), *symbols), torch.cat([count, values])
        return size_on_device(size, symbols, values)

    def mask(self, dims: tuple[Factors, ...], wanted: tuple[int, ...]) -> Tensor | None:
        """Return `valid_positions` of these sizes, computed once unless a captured graph serves other ones."""
        if self.is_captured and not self.serves_one_run:
            return valid_positions(dims, wanted, self)
        found = self.masks.get((dims, wanted))
        if found is None:
            with without_overrides():  # a recorded rule asks for the mask, and doesn't repeat how it was made
                found = valid_positions(dims, wanted, self)
            if found is not None:
                self.masks[dims, wanted] = found
        return found

    def fill(self, value: float, dtype: torch.dtype, device: torch.device) -> float | Tensor:
        """Return a number to put into padding; within a single run, as a tensor that is made once."""
        if not self.serves_one_run:
            return value
        key = ("fill", repr(value), dtype)
        if key not in self.masks:
            self.masks[key] = torch.full((), value, dtype=dtype, device=device)
        return self.masks[key]

    def assignment(self, row: int | None = None) -> dict[sympy.Symbol, int]:
        """Return the value of each symbol, read on the host; of a ragged batch, in one row."""
        assigned: dict[sympy.Symbol, int] = {}
        for symbol, size in zip(self.symbols, self.host(), strict=True):
            if isinstance(size, int):
                assigned[symbol] = size
            elif row is not None:
                assigned[symbol] = size[row]
        if self.rows is not None:
            assigned[rows_symbol()] = self.rows
        return assigned

    def on_host(self, size: Size, value: Callable[[Size, dict[sympy.Symbol, int]], int] = size_on_host) -> HostSize:
        """Return what `value` makes of an expression, one for each row where rows may differ."""
        if not self.is_ragged(size):
            return value(size, self.assignment(row=0))
        return tuple(value(size, self.assignment(row)) for row in range(self.rows or 0))

    def is_ragged(self, size: Size) -> bool:
        """Return whether this size may differ from row to row."""
        return self.rows is not None and any(symbol in size.free_symbols for symbol in self.symbols)

    def differs_by_row(self, size: Size) -> bool:
        """Return whether this size may differ from row to row and the batch has more than one row."""
        return self.rows != 1 and self.is_ragged(size)

    def clone(self) -> TrueSizes:
        """Return a copy in new memory."""
        return TrueSizes(self.symbols, self.buckets, self.values.clone(), self._host)

    def of_rows(self, rows: int | slice) -> TrueSizes:
        """Return the sizes of some rows of a ragged batch, or of one, counted from the end if negative."""
        host = tuple(n if isinstance(n, int) else n[rows] for n in self.host()) if self.known_on_host else None
        return TrueSizes(self.symbols, self.buckets, self.values[:, rows], host)

    def agree_with(self, other: TrueSizes) -> bool:
        """Return whether the host knows that the sizes of a tensor that was padded apart are the same."""
        is_known = self.kind is other.kind and self._host is not None and self._host == other._host
        return is_known and not self.is_captured and not other.is_captured

    def to(self, device: torch.device) -> TrueSizes:
        """Return the same sizes on another device."""
        if device == self.values.device:
            return self
        return TrueSizes(self.symbols, self.buckets, self.values.to(device), self._host)


@lru_cache(4096)
def _each_on_host(
    size: Size, symbols: tuple[sympy.Symbol, ...], host: tuple[HostSize, ...], rows: int | None
) -> tuple[int, ...]:
    found = []
    for row in range(rows or 1):
        assigned = {s: n if isinstance(n, int) else n[row] for s, n in zip(symbols, host, strict=True)}
        found.append(int(size.xreplace({**assigned, rows_symbol(): rows or 1})))
    return tuple(found)


def merge_sizes(operands: Sequence[TrueSizes]) -> TrueSizes | None:
    """Return the sizes of all symbols of several tensors; None when there are none.

    Raises:
        SizeError: a symbol has two buckets, or two values that the host knows.
    """
    distinct = list({id(sizes.values): sizes for sizes in operands if sizes.symbols}.values())
    if len(distinct) < 2:
        return distinct[0] if distinct else None
    chosen: dict[sympy.Symbol, tuple[TrueSizes, int]] = {}
    for sizes in distinct:
        for i, symbol in enumerate(sizes.symbols):
            first, j = chosen.setdefault(symbol, (sizes, i))
            _check_agreement(symbol, first, j, sizes, i)
    if len(chosen) == len(distinct[0].symbols):
        return distinct[0]
    rows = next((sizes.rows for sizes in distinct if sizes.rows is not None), None)
    parts = [sizes.values[i].expand(rows) if rows else sizes.values[i] for sizes, i in chosen.values()]
    host = None
    if all(sizes.known_on_host for sizes in distinct):
        host = tuple(_per_row(sizes.host()[i], rows) for sizes, i in chosen.values())
    buckets = tuple(sizes.buckets[i] for sizes, i in chosen.values())
    return TrueSizes(tuple(chosen), buckets, torch.stack(parts), host)


def _per_row(size: HostSize, rows: int | None) -> HostSize:
    return (size,) * rows if rows and isinstance(size, int) else size


def _check_agreement(symbol: sympy.Symbol, a: TrueSizes, i: int, b: TrueSizes, j: int) -> None:
    if a.buckets[i] != b.buckets[j]:
        raise SizeError(f"{symbol} has the bucket {a.buckets[i]} in one tensor and {b.buckets[j]} in another")
    if a is b or not (a.known_on_host and b.known_on_host):
        return
    rows = a.rows or b.rows
    if _per_row(a.host()[i], rows) != _per_row(b.host()[j], rows):
        raise SizeError(f"{symbol} is {a.host()[i]} in one tensor and {b.host()[j]} in another")


def valid_positions(dims: tuple[Factors, ...], wanted: tuple[int, ...], sizes: TrueSizes) -> Tensor | None:
    """Return the mask of the valid positions of the dims whose padding counts.

    Returns:
        bool, True at valid positions, of size 1 along dims on which it doesn't vary; None when all are valid.

    Raises:
        UnsupportedCall: a length differs from row to row, and no dim holds the rows.
    """
    flat = [factor for factors in dims for factor in factors]
    rows_dim_index = next((i for i, factor in enumerate(flat) if factor.size == rows_symbol()), None)
    found: Tensor | None = None
    position = 0
    for d, factors in enumerate(dims):
        for factor in factors:
            if d in wanted and not factor.is_static and not _covers(factor, sizes):
                valid = _below(factor, sizes, position, rows_dim_index, len(flat))
                found = valid if found is None else found & valid
            position += 1
    return None if found is None else _unfactored(found, dims)


def valid_on_host(dims: tuple[Factors, ...], dim: int, sizes: TrueSizes | None) -> npt.NDArray[np.bool_] | None:
    """Return which positions of a dim are valid in some row; None where all are, or the host doesn't know.

    A position along which another dim is empty is valid: a reduction of that dim has a result for it. Nothing that
    watches for reads of the device's values sees this one, since a capture would do without it.
    """
    if sizes is None or not sizes.known_on_host or is_traced(sizes.values):
        return None
    with without_overrides(), without_modes():
        here = TrueSizes(sizes.symbols, sizes.buckets, torch.tensor(sizes.host()), sizes.host())
        mask = valid_positions(dims, (dim,), here)
        if mask is None or mask.shape[dim] == 1:
            return None
        valid: npt.NDArray[np.bool_] = mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1).numpy()
    return None if valid.all() else valid


def _covers(factor: Factor, sizes: TrueSizes) -> bool:
    """Return whether a factor is the rows of a ragged batch, all of them valid."""
    rows = rows_symbol()
    return bool(factor.size.free_symbols == {rows} and factor.size.subs(rows, sizes.rows) == factor.bucket)


def _below(factor: Factor, sizes: TrueSizes, position: int, rows_dim_index: int | None, rank: int) -> Tensor:
    def along(t: Tensor, d: int) -> Tensor:
        return t.view([-1 if e == d else 1 for e in range(rank)])

    index = along(torch.arange(factor.bucket, device=sizes.values.device), position)
    size = sizes.of(factor.size)
    if size.dim() == 0:
        return index < size
    if not sizes.differs_by_row(factor.size):
        return index < size[0]
    if rows_dim_index is None:
        raise UnsupportedCall("a ragged batch without a dim of rows has no lengths")
    return index < along(size, rows_dim_index)


def _unfactored(mask: Tensor, dims: tuple[Factors, ...]) -> Tensor:
    """Merge a mask's dims, one for each factor, into one for each dim; size 1 along dims on which it doesn't vary."""
    if all(len(factors) == 1 for factors in dims):
        return mask
    expanded, shape = [], []
    position = 0
    for factors in dims:
        sizes = list(mask.shape[position : position + len(factors)])
        if any(size != 1 for size in sizes):
            sizes = [factor.bucket for factor in factors]
        expanded += sizes
        shape.append(math.prod(sizes))
        position += len(factors)
    return mask.expand(expanded).reshape(shape)
