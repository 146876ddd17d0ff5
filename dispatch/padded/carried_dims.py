"""The interpreter of dimension maps: padding is carried along the dims that an op leaves alone.

Along a parallel dim an op computes each position for itself, so padded positions stay in the padding of the results,
whatever they hold. Only gradients may mix: that of an operand which lacks a padded dim sums over all of its positions.
Then padded positions get valid values, and a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from subtensors.dispatch.ops.dims import DimMap, Label, Labels
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import PyTree, tree_has, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, refuse, table
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import Fill, PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim, is_padded_alike
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, static_dims


@table.register(DimMap)
def carry(call: PaddedCall) -> PyTree:
    """Carry the padding of each dim along, where the op combines no positions of it."""
    found, values = call.dims(), call.values
    dims, sizes = label_dims(values, found)
    padded = {label for label, factors in dims.items() if is_padded(factors)}
    if not padded.isdisjoint(found.combined) or tree_has(PaddedSize, call.arguments):
        rule = table.lookup_across(call.op)
        if rule is None:
            raise refuse(call, "it combines valid positions with padding")
        return rule(call)
    # An index must be in range, and an op that is not defined everywhere gets values that it is defined for.
    is_read = len(values) > 1 and op_class(call.op) is OpClass.SCATTER_GATHER
    sums = len(values) > 1 and any(x.is_tracked and _lacks(x, own, dims, padded) for x, own in _pairs(values, found))
    safe: dict[int, Tensor] = {}
    for x in values:
        if x.padded_dims and is_read and not x.dense.is_floating_point():
            safe[id(x)] = x.filled(0)
        elif x.padded_dims and (found.partial or (sums and not found.moves)):
            safe[id(x)] = x.edge_filled()
    changed = tree_map_only(PaddedValue, lambda x: safe.get(id(x), x), call.arguments) if safe else None
    outs = carried(call.dense(changed), found, dims, sizes, _fill_after(values) if found.moves else None)
    return tree_map_only(PaddedValue, PaddedValue.gradient_masked, outs) if sums or is_read else outs


def label_dims(values: Sequence[PaddedValue], found: DimMap) -> tuple[dict[Label, Factors], TrueSizes | None]:
    """Return the dim of each label, and the true sizes behind them."""
    if len(values) == 1:
        return dict(zip(found.operands[0], values[0].dims, strict=True)), values[0].sizes
    from subtensors.dispatch.padded.true_sizes import merge_sizes

    sizes = merge_sizes([x.sizes for x in values if x.sizes is not None])
    candidates: dict[Label, list[Factors]] = {}
    for x, labels in _pairs(values, found):
        for label, factors in zip(labels, x.dims, strict=True):
            candidates.setdefault(label, []).append(factors)
    return {
        label: broadcast_dim(each, sizes) if label not in found.combined else _joined(each)
        for label, each in candidates.items()
    }, sizes


def _joined(candidates: Sequence[Factors]) -> Factors:
    """Return a padded dim among some that need not agree, or any."""
    return next((factors for factors in candidates if is_padded(factors)), candidates[0])


def carried(
    out: PyTree, found: DimMap, dims: Mapping[Label, Factors], sizes: TrueSizes | None, fill: Fill | None = None
) -> PyTree:
    """Return the results of an op as values with the dims that its map gives them.

    Args:
        out: the results of the op on storages.
        found: its map.
        dims: the dim of each label; one that changes its size is not padded.
        sizes: the true sizes.
        fill: the fill of the results.
    """
    index = iter(range(1 << 30))

    def value(t: Tensor) -> PaddedValue:
        return result(t, _dims_of(found.of_result(next(index)), t, dims), sizes, fill)

    return tree_map_only(Tensor, value, out)


def _dims_of(labels: Labels, t: Tensor, dims: Mapping[Label, Factors]) -> list[Factors]:
    if labels and labels[-1] is ...:
        labels = (*labels[:-1], *[None] * (t.dim() - len(labels) + 1))
    own = [dims.get(label) for label in labels]
    return [
        static_dims([size])[0] if factors is None or not is_padded(factors) else factors
        for factors, size in zip(own, t.shape, strict=True)
    ]


def _pairs(values: Sequence[PaddedValue], found: DimMap) -> Iterable[tuple[PaddedValue, Labels]]:
    return zip(values, found.operands, strict=True)


def _lacks(x: PaddedValue, labels: Labels, dims: Mapping[Label, Factors], padded: set[Label]) -> bool:
    """Return whether the gradient of an operand sums over padding, or takes all of it as valid."""
    return any(label not in labels or not is_padded_alike(x.dims[labels.index(label)], dims[label]) for label in padded)


def _fill_after(values: Sequence[PaddedValue]) -> Fill | None:
    """Return the known fill of elements that were only moved."""
    fills = {x.fill if x.padded_dims else None for x in values}
    return fills.pop() if len(fills) == 1 else None
