"""Maps of logits by row and by class: temperatures that are tensors, biases and masks of classes.

A quotient by (N, 1) temperatures, a sum with a (V,) bias and a `masked_fill` by a (V,) mask are found in plain code:

    z = r u + o,    with 0 for u where a mask selects the class;   or  z = r (u + o)

for the scale r of a row and the offset o of a class, -inf or what else the mask fills in. Kernels apply both as they
read the logits, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, RowSlice, emit, replicated
from subtensors.dispatch.chunked.record import record, sliced

aten = torch.ops.aten

View: TypeAlias = list[int] | tuple[int, int | None, int | None, int]
"""A view of rows: the sizes of a reshape without the classes, or the arguments of a slice."""

RowsT = TypeVar("RowsT", bound=LazyValue | Tensor)


def viewed(value: RowsT, views: tuple[View, ...], call: Callable[..., RowsT]) -> RowsT:
    """Return views of rows of logits, or of hidden states that they are computed from; `call` calls or records ops."""
    for view in views:
        if isinstance(view, tuple):
            value = call(aten.slice.Tensor, value, *view)
        else:
            value = call(aten.reshape.default, value, [*view, value.shape[-1]])
    return value


@dataclass(frozen=True)
class RowScale:
    """A product of logits with a number a row, or a quotient by it.

    Args:
        factor: one element, or broadcast to (..., 1).
        divides: whether it is a quotient.
        sizes: of the rows, (...).
        views: of the rows that follow.
    """

    factor: LazyValue
    divides: bool
    sizes: tuple[int, ...]
    views: tuple[View, ...]

    def rows(self, dtype: torch.dtype) -> LazyValue:
        """Record the factor of each row after the views: (..., 1), or one element for all."""
        factor: LazyValue = record(aten._to_copy.default, self.factor, dtype=dtype)
        if factor.layout is None and factor.shape.numel() == 1:
            return factor
        rows: LazyValue = record(aten.expand.default, factor, [*self.sizes, 1])
        return viewed(rows, self.views, record)


@dataclass(frozen=True)
class ClassOffset:
    """A sum of logits with a value a class, or a mask that replaces some of them by it.

    Args:
        value: (V,) or one element, with leading dims of size 1; or a number.
        divisor: of the value: the temperature of what follows.
        mask: (V,), with leading dims of size 1; None for a sum.
        keeps: whether the mask selects the logits that are kept.
    """

    value: LazyValue | float
    divisor: float
    mask: LazyValue | None = None
    keeps: bool = False


LogitMap: TypeAlias = RowScale | ClassOffset


def match_map(value: LazyValue, divisor: float, views: tuple[View, ...]) -> tuple[LazyValue, LogitMap] | None:
    """Return the logits that an op maps, and the map; None for other ops.

    Args:
        value: its result, (..., V).
        divisor, views: the temperature and the views that follow.
    """
    node, classes = value.node, value.shape[-1]
    if node is None or node.kwargs or node.op not in _MAPS:
        return None
    op, args = node.op, node.args
    *mask, logits, other = (args[1], args[0], args[2]) if op in _FILLS else args
    is_swapped = op in _SYMMETRIC and not _is_logits(logits, value)
    if is_swapped:
        logits, other = other, logits
    if not _is_logits(logits, value):
        return None
    if op in _PRODUCTS:
        factor = other.value if isinstance(other, RowSlice) else other
        if not isinstance(factor, LazyValue) or factor.shape[-1:] not in ((), (1,)) or factor.dtype.is_complex:
            return None
        return logits, RowScale(factor, op is aten.div.Tensor, tuple(value.shape[:-1]), views)
    if not all(_is_by_class(x, classes) for x in mask) or not _is_by_class(other, classes, or_one=bool(mask)):
        return None
    divisor = -divisor if op is aten.sub.Tensor else divisor
    return logits, ClassOffset(other, divisor, mask[0] if mask else None, op is aten.where.self and not is_swapped)


_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)
_SYMMETRIC = (aten.where.self, aten.add.Tensor, aten.mul.Tensor)
_MAPS = {*_FILLS, *_PRODUCTS, *_SYMMETRIC, aten.sub.Tensor}


def _is_logits(x: object, result: LazyValue) -> bool:
    """Return whether an operand has the rows of a result, whose dtype keeps every value of it."""
    if not isinstance(x, LazyValue) or x.layout is None or x.shape != result.shape:
        return False
    is_wider = x.dtype is result.dtype or x.dtype.itemsize < result.dtype.itemsize
    return is_wider and x.dtype.is_floating_point and x.device == result.device


def _is_by_class(x: object, classes: int, or_one: bool = False) -> bool:
    """Return whether an operand has a number a class, or perhaps one, for all rows alike and without a gradient."""
    if not isinstance(x, LazyValue):
        return or_one
    is_one = or_one and x.shape.numel() == 1
    is_constant = x.layout is None and not x.needs_grad and not x.dtype.is_complex
    return is_constant and (is_one or (x.shape[-1:] == (classes,) and x.shape.numel() == classes))


def scales_offsets(maps: Sequence[LogitMap]) -> bool:
    """Return whether maps, the last one first, scale the rows after the offsets of classes."""
    return len({type(m) for m in maps}) == 2 and isinstance(maps[0], RowScale)


def can_follow(maps: Sequence[LogitMap], found: LogitMap) -> bool:
    """Return whether kernels apply a map before these, the last one first: scales, then offsets, or the reverse.

    A scale that has a gradient and multiplies offsets is left to torch.
    """
    kinds = [type(m) for m in maps]
    if len({*kinds}) == 2 and kinds[-1] is not type(found):
        return False
    scales = [m.factor for m in maps if isinstance(m, RowScale)]
    return isinstance(found, RowScale) or not any(factor.needs_grad for factor in scales)


def record_maps(maps: Sequence[LogitMap], logits: LazyValue, dtype: torch.dtype) -> list[LazyValue | RowSlice | None]:
    """Record the scale of rows, (..., 1) or one element, the offsets of classes, (V,), and the mask, (V,), of logits.

    Args:
        maps: of the logits, the last one first; None is recorded for what they lack.
        logits: (..., V), chunked.
        dtype: of the computation.
    """
    total: LazyValue | None = None
    for scale in (m for m in maps if isinstance(m, RowScale)):
        rows = scale.rows(dtype)
        rows = record(aten.reciprocal.default, rows) if scale.divides else rows
        total = rows if total is None else record(aten.mul.Tensor, total, rows)
    is_one = total is None or (total.layout is None and total.shape.numel() == 1)
    factor = total if total is None or is_one else sliced(total, logits.row_layout)
    offsets = [m for m in maps if isinstance(m, ClassOffset)]
    if not offsets:
        return [factor, None, None]
    metas = [torch.empty(logits.shape[-1], dtype=d, device="meta") for d in (dtype, torch.bool)]
    operands = [replicated(x) if isinstance(x, LazyValue) else x for m in offsets for x in (m.value, m.mask)]
    options = [(m.divisor, m.keeps) for m in offsets]
    args = logits.shape[-1], dtype, options, *operands
    return [factor, *emit(class_offsets, args, {}, metas)]


def class_offsets(
    classes: int, dtype: torch.dtype, options: Sequence[tuple[float, bool]], *operands: Tensor | float | None
) -> list[Tensor]:
    """Return the offset of each class, (V,), and the mask of those that it replaces.

    Args:
        classes: V.
        dtype: of the offsets.
        options: the divisor of each map, and whether its mask selects what is kept; the last map first.
        operands: the value and the mask of each.
    """
    device = next(x.device for x in operands if isinstance(x, Tensor) and x.numel() == classes)
    offsets = torch.zeros(classes, dtype=dtype, device=device)
    masked = torch.zeros(classes, dtype=torch.bool, device=device)
    for (divisor, keeps), value, mask in zip(options, operands[::2], operands[1::2], strict=True):
        value = value.flatten().to(device, dtype) if isinstance(value, Tensor) else value
        assert value is not None
        chosen = ~masked
        if isinstance(mask, Tensor):
            selected = mask.flatten().bool() ^ keeps
            masked, chosen = masked | selected, chosen & selected
        offsets = torch.where(chosen, offsets + value / divisor, offsets)
    return [offsets, masked]
