"""Contractions: products summed over shared positions, where padding counts as zero in both operands.

Both must be filled: 0 * NaN is NaN. The gradient of an operand sums over the dims that it lacks, so if one requires
grad the other is filled along those dims too, and the result's gradient is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from subtensors.dispatch.ops.dims import Label, Labels, map_function
from subtensors.dispatch.ops.errors import UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.carried_dims import carry, labelled_dims
from subtensors.dispatch.padded.interpreter import PaddedCall, apply, table
from subtensors.dispatch.padded.padded_value import EDGE_FILL, FINITE_FILL, Fill, PaddedValue, result, unpadded_value
from subtensors.dispatch.padded.positions import with_factors
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, bucket_of, is_padded, padded_dim, size_of

aten = torch.ops.aten


@table.register(OpClass.CONTRACTION, aten.cdist, aten._cdist_forward)
def contraction(call: PaddedCall) -> PyTree:
    """Fill the factors with zeros where needed, run the op, and mask the result's gradient where needed."""
    if map_function(call.op) is None:
        raise UnsupportedCall("its dims are not named")
    sizes = call.sizes()
    labelled = labelled_dims(call, sizes, agree=True)
    assert labelled is not None, "products take no sizes"
    found, dims, padded, lacking = labelled
    (out,) = found.results
    if not found.combined.isdisjoint(out):
        return carry(call)
    shown = padded.intersection(out)
    names = [name for name, x in call.arguments.items() if isinstance(x, PaddedValue)]
    factors = [*zip(names, call.values, found.operands, strict=True)]
    sums = [x.is_tracked and lacks for x, lacks in zip(call.values, lacking, strict=True)]
    is_summed = any(sums)
    added = None if found.added is None else factors.pop(found.added)
    out_dims, operands = [dims[label] for label in out], [x for _, x, _ in factors]
    fill = _fill_after(operands, None if added is None else added[1])
    if call.is_tracked:
        x = _kept(factors, added, padded, shown)
        if x is not None and x.padding_is_finite:
            fill = EDGE_FILL if x.fill == EDGE_FILL else fill
            product = result(call.dense(), out_dims, sizes, fill).gradient_masked()
            x.gradient_is_zero_if(product)
            return product
    if found.added is not None:
        del sums[found.added]
    changed: dict[str, Tensor] = {}
    for i, (name, x, at) in enumerate(factors):
        to_fill = {*at} if any(sums[:i] + sums[i + 1 :]) else {*at} - {*out}
        filled = _filled(x, at, to_fill, dims, sizes)
        if filled is not x.dense:
            changed[name] = filled
        if to_fill.issuperset(at[d] for d in x.padded_dims):
            x.gradient_is_zero_if()
    product = result(call.dense(changed), out_dims, sizes, fill)
    return product.gradient_masked() if is_summed else product


def _kept(
    factors: Sequence[_Operand], added: _Operand | None, padded: Set[Label], shown: Set[Label]
) -> PaddedValue | None:
    """Return the factor that alone is padded, along dims of the result that no other operand has.

    Its padded rows are rows of the result; they are combined with gradients only, which are zero there.
    """
    found = [(x, {at[d] for d in x.padded_dims}) for _, x, at in factors if x.padded_dims]
    if len(found) != 1:
        return None
    [(kept, own)] = found
    others = {label for _, x, at in factors if x is not kept for label in at}
    if added is not None:
        others |= {label for label, n in zip(added[2], added[1].shape, strict=True) if n != 1}
    return kept if own == padded == shown and own.isdisjoint(others) else None


_Operand = tuple[str, PaddedValue, Labels]
"""The name, the value and the labels of an operand."""


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


def _filled(
    x: PaddedValue, at: Labels, to_fill: Set[Label], dims: Mapping[Label, Factors], sizes: TrueSizes | None
) -> Tensor:
    """Return the operand's storage with zeros in the padding of some dims, the other operand's padding included."""
    wanted = [d for d, label in enumerate(at) if label in to_fill and (is_padded(dims[label]) or x.is_padded(d))]
    if not wanted:
        return x.dense
    assumed = tuple(
        dims[label] if label in to_fill and bucket_of(own) == bucket_of(dims[label]) else own
        for own, label in zip(x.dims, at, strict=True)
    )
    if assumed == x.dims or sizes is None:
        return x.filled(0, wanted)
    try:
        return replace(x, dims=assumed, sizes=sizes, fill=None).filled(0, wanted)
    except UnsupportedCall:
        # Without the rows of a ragged batch there is nothing to fill: the zeros of the other operand suffice.
        return x.filled(0, wanted)
