"""The dimension maps of reductions, scans, softmaxes, sorts and norms, and the monoids that reductions combine by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.dims import DimMap, Operand, carried, dim_rule, labels_of, listed, normalized

aten = torch.ops.aten

Number = int | float | bool


def min_value(dtype: torch.dtype) -> Number:
    """Return the lower bound of the values of a dtype."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def max_value(dtype: torch.dtype) -> Number:
    """Return the upper bound of the values of a dtype."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclass(frozen=True)
class Monoid:
    """The operation that a reduction repeats: it is associative, and any order of its operands gives the same.

    Args:
        neutral: returns the element of a dtype that changes nothing.
        combine: reduces parts, stacked along dim 0, as the op would reduce what they are parts of.
        has_identity: whether torch reduces no elements to the neutral element; an error otherwise.
    """

    neutral: Callable[[torch.dtype], Number]
    combine: Callable[[Tensor], Tensor]
    has_identity: bool = True


def _constant(value: int) -> Callable[[torch.dtype], Number]:
    return lambda dtype: value


def _sum(parts: Tensor) -> Tensor:
    return parts.sum(0)


def _prod(parts: Tensor) -> Tensor:
    return parts.prod(0)


def _any(parts: Tensor) -> Tensor:
    return parts.any(0)


def _all(parts: Tensor) -> Tensor:
    return parts.all(0)


def _max(parts: Tensor) -> Tensor:
    return parts.amax(0)


def _min(parts: Tensor) -> Tensor:
    return parts.amin(0)


def _logsumexp(parts: Tensor) -> Tensor:
    return parts.logsumexp(0)


SUM, PROD = Monoid(_constant(0), _sum), Monoid(_constant(1), _prod)
ANY, ALL = Monoid(_constant(0), _any), Monoid(_constant(1), _all)
MAX, MIN = Monoid(min_value, _max, has_identity=False), Monoid(max_value, _min, has_identity=False)
LOGSUMEXP = Monoid(min_value, _logsumexp)

MONOIDS: dict[OpOverload | OpOverloadPacket, Monoid] = {
    aten.sum: SUM,
    aten.nansum: SUM,
    aten.count_nonzero: SUM,
    aten.any: ANY,
    aten._is_any_true: ANY,
    aten.all: ALL,
    aten._is_all_true: ALL,
    aten.prod: PROD,
    aten.amax: MAX,
    aten.amin: MIN,
    aten.max.default: MAX,
    aten.min.default: MIN,
    aten.max.dim: MAX,
    aten.min.dim: MIN,
    aten.logsumexp: LOGSUMEXP,
    aten.cumsum: SUM,
    aten.cumprod: PROD,
    aten.logcumsumexp: LOGSUMEXP,
    aten._logcumsumexp: LOGSUMEXP,
    aten.cummax: MAX,
    aten.cummin: MIN,
}
"""The monoid of each reduction and scan that has one. Of equal elements max.dim and min.dim give the first."""


def monoid_of(op: OpOverload) -> Monoid | None:
    """Return the monoid that an op reduces or scans by; None if it has none."""
    return MONOIDS.get(op) or MONOIDS.get(op.overloadpacket)


@dim_rule(aten.sum, aten.nansum, aten.count_nonzero, aten.any, aten._is_any_true, aten.all, aten._is_all_true,
          aten.prod, aten.amax, aten.amin, aten.max.default, aten.min.default, aten.max.dim, aten.min.dim,
          aten.logsumexp, aten.mean, aten.nanmean, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.norm,
          aten.linalg_vector_norm, aten.linalg_matrix_norm, aten.native_norm, aten.frobenius_norm, aten.argmax,
          aten.argmin, aten.aminmax, aten._aminmax, aten.median, aten.nanmedian)  # fmt: skip
def reduction(x: Operand, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DimMap:
    """Some dims reduced, all of them if none are named."""
    reduced = listed(dim, x.ndim)
    if keepdim:
        return carried(x, [None if d in reduced else d for d in labels_of(x)], moves=False)
    return carried(x, [d for d in labels_of(x) if d not in reduced], moves=False)


@dim_rule(aten.mode, aten.kthvalue)
def selection(x: Operand, dim: int, keepdim: bool = False) -> DimMap:
    """An element of each slice along a dim."""
    return reduction(x, dim, keepdim)


@dim_rule(aten._softmax, aten._log_softmax, aten.softmax.int, aten.log_softmax.int, aten._safe_softmax,
          aten.special_softmax, aten.special_log_softmax, aten.cumsum, aten.cumprod, aten.cummax,
          aten.cummin, aten.logcumsumexp, aten._logcumsumexp, aten.sort, aten.topk, aten.argsort)  # fmt: skip
def along(x: Operand, dim: int = -1) -> DimMap:
    """Every dim, with one of them in which positions depend on each other."""
    return carried(x, labels_of(x), [normalized(dim, x.ndim)] if x.ndim else [], moves=False)


@dim_rule(aten.msort)
def along_first(x: Operand) -> DimMap:
    """Every dim, sorted along the first."""
    return along(x, 0)


@dim_rule(aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def along_some(x: Operand, dim: Sequence[int]) -> DimMap:
    """Every dim, with some of them transformed."""
    return carried(x, labels_of(x), [normalized(d, x.ndim) for d in dim], moves=False)


@dim_rule(aten.layer_norm, aten.native_layer_norm, aten.rms_norm, aten._fused_rms_norm)
def layer_norm(
    x: Operand, normalized_shape: Sequence[int], weight: Operand | None, bias: Operand | None = None
) -> DimMap:
    """Statistics over the last dims, which weight and bias have."""
    own, first = labels_of(x), x.ndim - len(normalized_shape)
    given = tuple(own[first:] for y in (weight, bias) if y is not None)
    statistics = (*own[:first], ...)
    return DimMap((own, *given), (own, statistics, statistics), frozenset(own[first:]))


@dim_rule(aten.group_norm)
def group_norm(x: Operand, weight: Operand | None, bias: Operand | None) -> DimMap:
    """Statistics of each sample."""
    own = labels_of(x)
    given = tuple(own[1:2] for y in (weight, bias) if y is not None)
    return DimMap((own, *given), (own,), frozenset(own[1:]))
