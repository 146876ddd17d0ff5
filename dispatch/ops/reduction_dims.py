"""The dimension maps of reductions, scans, softmaxes, sorts and norms, and the monoids that reductions combine by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.dims import DimMap, Operand, carried, dim_rule, labels_of, listed, normalized
from subtensors.kernels.runtime.custom_ops import max_value, min_value

aten = torch.ops.aten


class Monoid(NamedTuple):
    """The operation that a reduction repeats: it is associative, and any order of its operands gives the same.

    Args:
        neutral: returns the element of a dtype that changes nothing.
        combine: reduces a dim of a tensor of parts, as the op would reduce what they are parts of.
        has_identity: whether torch reduces no elements to the neutral element; an error otherwise.
    """

    neutral: Callable[[torch.dtype], float]
    combine: Callable[[Tensor, int], Tensor]
    has_identity: bool = True


SUM = Monoid(lambda dtype: 0, torch.sum)
PROD = Monoid(lambda dtype: 1, torch.prod)
ANY = Monoid(lambda dtype: 0, torch.any)
ALL = Monoid(lambda dtype: 1, torch.all)
MAX = Monoid(min_value, torch.amax, has_identity=False)
MIN = Monoid(max_value, torch.amin, has_identity=False)
LOGSUMEXP = Monoid(min_value, torch.logsumexp)

REDUCED_BY: dict[OpOverload | OpOverloadPacket, Monoid] = {
    **dict.fromkeys([aten.sum, aten.nansum, aten.count_nonzero], SUM),
    **dict.fromkeys([aten.any, aten._is_any_true], ANY),
    **dict.fromkeys([aten.all, aten._is_all_true], ALL),
    **dict.fromkeys([aten.amax, aten.max.default, aten.max.dim], MAX),
    **dict.fromkeys([aten.amin, aten.min.default, aten.min.dim], MIN),
    aten.prod: PROD,
    aten.logsumexp: LOGSUMEXP,
}
"""The monoid of each reduction that has one. Of equal elements max.dim and min.dim give the first."""

SCANNED_BY: dict[OpOverload | OpOverloadPacket, Monoid] = {
    aten.cumsum: SUM,
    aten.cumprod: PROD,
    aten.cummax: MAX,
    aten.cummin: MIN,
    **dict.fromkeys([aten.logcumsumexp, aten._logcumsumexp], LOGSUMEXP),
}
"""The monoid of each scan."""

_MONOIDS = {**REDUCED_BY, **SCANNED_BY}


def monoid_of(op: OpOverload) -> Monoid | None:
    """Return the monoid that an op reduces or scans by; None if it has none."""
    return _MONOIDS.get(op) or _MONOIDS.get(op.overloadpacket)


@dim_rule(*REDUCED_BY, aten.mean, aten.nanmean, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.norm,
          aten.linalg_vector_norm, aten.linalg_matrix_norm, aten.native_norm, aten.frobenius_norm, aten.argmax,
          aten.argmin, aten.aminmax, aten._aminmax, aten.median, aten.nanmedian, aten.mode, aten.kthvalue)  # fmt: skip
def reduction(x: Operand, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DimMap:
    """Some dims reduced, all of them if none are named."""
    reduced = listed(dim, x.ndim)
    if keepdim:
        return carried(x, [None if d in reduced else d for d in labels_of(x)], moves=False)
    return carried(x, [d for d in labels_of(x) if d not in reduced], moves=False)


@dim_rule(*SCANNED_BY, aten.sort, aten.topk, aten.argsort)
def along(x: Operand, dim: int = -1) -> DimMap:
    """Every dim, with one of them in which positions depend on each other."""
    return carried(x, labels_of(x), [normalized(dim, x.ndim)] if x.ndim else [], moves=False)


@dim_rule(aten._softmax, aten._log_softmax, aten.softmax.int, aten.log_softmax.int, aten._safe_softmax,
          aten.special_softmax, aten.special_log_softmax)  # fmt: skip
def softmax(x: Operand, dim: int) -> DimMap:
    """Every dim, with exponentials divided by their sum along one of them."""
    return along(x, dim)


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
