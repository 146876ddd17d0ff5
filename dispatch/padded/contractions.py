"""Contractions: products summed over shared positions, where padding counts as zero in both operands.

Both must be filled: 0 * NaN is NaN. The gradient of an operand sums over the dims that it lacks, so if one requires
grad the other is filled along those dims too, and the result's gradient is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from subtensors.dispatch.ops.dims import Label, map_function
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.carried_dims import MAX_PLANS, carry, dims_by_label, lacks
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, FINITE_FILL, Fill, PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast_dim
from subtensors.dispatch.padded.positions import with_factors
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, padded_dim, size_of

aten = torch.ops.aten


@table.register(OpClass.CONTRACTION, aten.cdist, aten._cdist_forward)
def contraction(call: PaddedCall) -> PyTree:
    """Fill the factors with zeros where needed, run the op, and mask the result's gradient where needed."""
    if map_function(call.op) is None:
        raise UnsupportedCall("its dims are not named")
    sizes, tracked = call.sizes(), call.is_tracked
    shown = tuple([(x.dims, x.is_tracked) for x in call.values] if tracked else [x.dims for x in call.values])
    key = call.op, shown, None if sizes is None else sizes.key
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _planned(call, sizes)
    if not plan.names:
        return carry(call)
    operands = [call[name] for name in plan.names]
    added = None if plan.added is None else call.values[plan.added]
    if tracked and plan.kept is not None and operands[plan.kept].padding_is_finite:
        x = operands[plan.kept]
        fill = EDGE_FILL if x.fill == EDGE_FILL else _fill_after(operands, added)
        product = result(call.dense(), plan.out, sizes, fill).gradient_masked()
        x.gradient_is_zero_if(product)
        return product
    changed: dict[str, Tensor] = {}
    for name, x, filling in zip(plan.names, operands, plan.fillings, strict=True):
        filled = _filled(x, filling, sizes)
        if filled is not x.dense:
            changed[name] = filled
        if filling.is_complete:
            x.gradient_is_zero_if()
    product = result(call.dense(changed), plan.out, sizes, _fill_after(operands, added))
    return product.gradient_masked() if plan.is_summed else product


class _Filling(NamedTuple):
    """The part of an operand that is filled with zeros.

    Args:
        wanted: the dims along which it is filled.
        assumed: the operand's dims, with those of another operand where that is padded; None if they are its own.
        is_complete: whether these are all of its padded dims.
    """

    wanted: list[int]
    assumed: tuple[Factors, ...] | None
    is_complete: bool


class _Plan(NamedTuple):
    """The part of a contraction that depends only on the dims of its operands, and on whether they require grad.

    Args:
        names: of the factors; none if the op is no product.
        added: the index of an operand that is added.
        out: the dims of the result.
        fillings: of each factor.
        is_summed: whether a requested gradient sums over padded positions of the result.
        kept: the factor that alone is padded, along dims of the result that no other operand has. Its padded rows are
            rows of the result; they are combined with gradients only, which are zero there.
    """

    names: tuple[str, ...] = ()
    added: int | None = None
    out: tuple[Factors, ...] = ()
    fillings: Sequence[_Filling] = ()
    is_summed: bool = False
    kept: int | None = None


_plans: dict[tuple[object, ...], _Plan] = {}


def _planned(call: PaddedCall, sizes: TrueSizes | None) -> _Plan:
    found = call.dims()
    (out,) = found.results
    if not found.combined.isdisjoint(out):
        return _Plan()
    named = [name for name, x in call.arguments.items() if isinstance(x, PaddedValue)]
    factors = [i for i in range(len(named)) if i != found.added]
    labels = [found.operands[i] for i in factors]
    operands = [call.values[i] for i in factors]
    dims = {label: broadcast_dim(each, sizes) for label, each in dims_by_label(call.values, found).items()}
    added = None if found.added is None else (call.values[found.added], found.operands[found.added])
    padded = {label for label, factors in dims.items() if is_padded(factors)}
    sums = [x.is_tracked and lacks(x, at, dims, padded & {*out}) for x, at in zip(operands, labels, strict=True)]
    fillings = []
    for i, (x, at) in enumerate(zip(operands, labels, strict=True)):
        to_fill = {*at} if any(sums[:i] + sums[i + 1 :]) else {*at} - {*out}
        assumed = tuple(
            dims[label] if label in to_fill and bucket_of(own) == bucket_of(dims[label]) else own
            for own, label in zip(x.dims, at, strict=True)
        )
        is_complete = to_fill.issuperset(at[d] for d in x.padded_dims)
        wanted = [d for d, label in enumerate(at) if label in to_fill]
        fillings.append(_Filling(wanted, None if assumed == x.dims or sizes is None else assumed, is_complete))
    is_summed = any(sums)
    shared: set[Label] = set()
    if added is not None:
        is_summed = is_summed or (added[0].is_tracked and lacks(*added, dims, padded & {*out}))
        shared = {label for label, n in zip(added[1], added[0].shape, strict=True) if n != 1}
    kept = [i for i, x in enumerate(operands) if x.padded_dims]
    if len(kept) == 1:
        own_labels = {labels[kept[0]][d] for d in operands[kept[0]].padded_dims}
        others = {label for i, at in enumerate(labels) if i != kept[0] for label in at}
        kept = kept if own_labels == padded and padded <= {*out} - others - shared else []
    names = tuple(named[i] for i in factors)
    own_kept = kept[0] if len(kept) == 1 else None
    return _Plan(names, found.added, tuple(dims[label] for label in out), fillings, is_summed, own_kept)


@table.register(aten.cov)
def covariance(
    call: PaddedCall, x: PaddedValue, correction: int, fweights: PaddedValue | None, aweights: PaddedValue | None
) -> PaddedValue:
    """Products of deviations from the row means, divided by the number of valid columns minus the correction."""
    if fweights is not None or aweights is not None or not x.dense.is_floating_point():
        raise UnsupportedCall("its columns have weights, or it is not floating point")
    rows = x if x.dim() == 2 else apply(aten.unsqueeze.default, x, 0)
    distance = apply(aten.sub.Tensor, rows, apply(aten.mean.dim, rows, [1], True))
    product = apply(aten.matmul.default, distance, apply(aten.t.default, distance))
    out = product.dense / (rows.valid_count([1]) - correction).clamp(min=0)
    return product.like(out) if rows.shape[0] > 1 else unpadded_value(out.reshape(()))


@table.register(aten._grouped_mm)
def grouped_mm(call: PaddedCall, x: PaddedValue, mat2: PaddedValue, offs: PaddedValue | None) -> PaddedValue:
    """A product for each group of rows, which end where `offs` says: no group has the padding, so nothing reads it."""
    if x.dim() != 2 or mat2.dim() != 3 or x.is_padded(1) or mat2.padded_dims or offs is None or offs.padded_dims:
        raise UnsupportedCall("it has padding elsewhere than in the rows of its groups")
    x = with_factors(x, 0, padded_dim(x.shape[0], size_of(x.dims[0])))
    return result(call.dense({"self": x.dense}), [x.dims[0], mat2.dims[2]], call.sizes())


def _fill_after(operands: Sequence[PaddedValue], added: PaddedValue | None) -> Fill | None:
    """Return the known fill: products with zeros are zeros if the other factors are finite; addends keep theirs."""
    is_zero = all(x.fill == 0 for x in operands if x.padded_dims)
    return FINITE_FILL if is_zero and (added is None or not added.padded_dims or added.fill is not None) else None


def _filled(x: PaddedValue, filling: _Filling, sizes: TrueSizes | None) -> Tensor:
    """Return the operand's storage with zeros in the padding of some dims, the other operand's padding included."""
    if filling.assumed is None:
        return x.filled(0, filling.wanted)
    try:
        return replace(x, dims=filling.assumed, sizes=sizes, fill=None).filled(0, filling.wanted)
    except UnsupportedCall:
        # Without the rows of a ragged batch there is nothing to fill: the zeros of the other operand suffice.
        return x.filled(0, filling.wanted)
