"""The interpreter of dimension maps: padding is carried along the dims that an op leaves alone.

Along a parallel dim an op computes each position for itself, so padded positions stay in the padding of the results,
whatever they hold. Only gradients may mix: that of an operand which lacks a padded dim sums over all of its positions.
Then padded positions get valid values, and a gradient of zero.

A plan depends on the dims of the operands and on the arguments, not on true sizes, so it is made once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from subtensors.dispatch.ops.dims import DimMap, Label, Labels
from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import PyTree, tree_map_only
from subtensors.dispatch.padded.interpreter import PaddedCall, table
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import Fill, PaddedValue, result
from subtensors.dispatch.padded.pointwise import broadcast_dim, is_padded_alike, raise_if_scattered
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, reshaped, static_dims

MAX_PLANS = 4096
"""The most calls whose plans are cached."""


@dataclass
class CarryPlan:
    """The part of a call that depends only on the dims of its operands and on its other arguments.

    Args:
        across: whether the op combines positions of a padded dim: then a rule for that runs.
        dims: of each label; one that changes its size is not padded.
        found: the op's map.
        is_read: whether the call reads at an index, whose padding must be in range.
        sums: whether the gradient of an operand sums over padding.
        has_fill: whether the padding of the results is padding of the operands.
        regrouped: of a reshape that merges or splits padded dims, the dims of its result.
        results: the dims of each result, once they are known.
    """

    across: bool
    dims: dict[Label, Factors]
    found: DimMap
    is_read: bool = False
    sums: bool = False
    has_fill: bool = False
    regrouped: Sequence[Factors] | None = None
    results: list[tuple[Factors, ...]] | None = None


_plans: dict[tuple[object, ...], CarryPlan] = {}


@table.register(DimMap)
def carry(call: PaddedCall) -> PyTree:
    """Carry the padding of each dim along, where the op combines no positions of it."""
    values = call.values
    sizes = values[0].sizes if len(values) == 1 else call.sizes()
    key = _key(call, sizes)
    plan = _plans.get(key) if key is not None else None
    if plan is None and key is not None:
        plan = _planned(call, sizes)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if plan is None or plan.across:
        rule = table.resolved_across.get(call.op) or table.lookup_across(call.op)
        if rule is None:
            raise UnsupportedCall("it combines valid positions with padding")
        call.is_across = True
        if plan is not None:
            call.found, call.label_dims = plan.found, plan.dims
        return rule(call)
    found = plan.found
    fill = _fill_after(values) if plan.has_fill else None
    if plan.is_read or plan.sums or found.partial:
        safe = {id(x): _safe(x, plan) for x in values[plan.is_read :] if x.padded_dims}
        out = call.dense(tree_map_only(PaddedValue, lambda x: safe.get(id(x), x), call.arguments))
        # An index may be on the CPU.
        sizes = None if sizes is None else sizes.to(values[0].dense.device)
        outs = _as_values(out, plan, sizes, fill)
        return tree_map_only(PaddedValue, PaddedValue.gradient_masked, outs) if plan.is_read or plan.sums else outs
    return _as_values(call.dense(), plan, sizes, fill)


def _key(call: PaddedCall, sizes: TrueSizes | None) -> tuple[object, ...] | None:
    """Return the arguments that a plan depends on; None where one is a padded size, which has a rule of its own."""
    several, rows = len(call.values) > 1, None if sizes is None else sizes.rows
    # The dims of a single operand hold all there is to know, but for the rows of a ragged batch.
    key: list[object] = [call.op, sizes.key, rows] if sizes is not None and (several or rows is not None) else [call.op]
    for x in call.arguments.values():
        kind = type(x)
        if kind is PaddedValue:
            key += (x.dims, x.dense.dtype, several and x.is_tracked)
        elif kind is list or kind is tuple:
            kinds = {type(y) for y in x}
            if PaddedSize in kinds:
                return None
            if PaddedValue in kinds:
                x = [(y.dims, y.dense.dtype, several and y.is_tracked) if type(y) is PaddedValue else y for y in x]
            key.append(tuple(x))
        elif kind is PaddedSize:
            return None
        else:
            key.append(x)
    return tuple(key)


def _planned(call: PaddedCall, sizes: TrueSizes | None) -> CarryPlan:
    found, values = call.dims(), call.values
    try:
        dims = {
            label: broadcast_dim(each, sizes) if label not in found.combined else _joined(each)
            for label, each in dims_by_label(values, found).items()
        }
    except UnsupportedCall:
        pairs = [*zip(values, found.operands, strict=True)]
        for label in {label for own in found.operands for label in own} - found.combined:
            raise_if_scattered([(x, own.index(label)) for x, own in pairs if label in own], sizes)
        raise
    padded = {label for label, factors in dims.items() if is_padded(factors)}
    if not padded.isdisjoint(found.combined):
        regrouped = _regrouped(values[0], found)
        return CarryPlan(regrouped is None, dims, found, has_fill=found.moves, regrouped=regrouped)
    several = len(values) > 1
    is_read = several and op_class(call.op) is OpClass.SCATTER_GATHER
    if is_read and lacks(values[0], found.operands[0], dims, padded.intersection(found.operands[0])):
        # An index may be shorter than what it indexes, and its bucket as long.
        return CarryPlan(True, dims, found)
    lacking = [x for x, own in zip(values, found.operands, strict=True) if several and lacks(x, own, dims, padded)]
    sums = any(x.is_tracked for x in lacking)
    return CarryPlan(False, dims, found, is_read, sums, has_fill=found.moves and not lacking)


def dims_by_label(values: Sequence[PaddedValue], found: DimMap) -> dict[Label, list[Factors]]:
    """Return the dims that have each label, in the order of the operands."""
    candidates: dict[Label, list[Factors]] = {}
    for x, labels in zip(values, found.operands, strict=True):
        for label, factors in zip(labels, x.dims, strict=True):
            candidates.setdefault(label, []).append(factors)
    return candidates


def _regrouped(x: PaddedValue, found: DimMap) -> Sequence[Factors] | None:
    """Return the dims of a reshape that keeps each padded dim in one piece; None of anything else."""
    if found.shape is None or 0 in x.shape:
        return None
    try:
        return reshaped(x.dims, tuple(map(int, found.shape)))
    except RuleError:
        return None


def _joined(candidates: Sequence[Factors]) -> Factors:
    """Return a padded dim among some that need not agree, or any."""
    return next((factors for factors in candidates if is_padded(factors)), candidates[0])


def _safe(x: PaddedValue, plan: CarryPlan) -> Tensor:
    """Return an operand's storage with values in the padding that the op and its gradient can take."""
    if plan.is_read:
        # The gradients of reads and writes don't depend on values.
        return x.dense if x.dense.is_floating_point() or x.dense.is_complex() else x.filled(0)
    return x.edge_filled() if plan.found.partial or (plan.sums and not plan.found.moves) else x.dense


def _as_values(out: PyTree, plan: CarryPlan, sizes: TrueSizes | None, fill: Fill | None) -> PyTree:
    """Return the results of an op as values with the dims that its map gives them."""
    if plan.results is None:
        tensors = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
        dims = [plan.regrouped or _dims_of(plan.found.of_result(i), t, plan.dims) for i, t in enumerate(tensors)]
        plan.results = [result(t, own, sizes).dims for t, own in zip(tensors, dims, strict=True)]
    if isinstance(out, Tensor):
        return PaddedValue(out, plan.results[0], sizes, fill)
    remaining = iter(plan.results)
    return type(out)([PaddedValue(t, next(remaining), sizes, fill) if isinstance(t, Tensor) else t for t in out])


def _dims_of(labels: Labels, t: Tensor, dims: dict[Label, Factors]) -> list[Factors]:
    own = list(static_dims(t.shape))
    for d, label in enumerate(labels):
        factors = dims.get(label)
        if factors is not None and is_padded(factors):
            own[d] = factors
    return own


def lacks(x: PaddedValue, labels: Labels, dims: dict[Label, Factors], padded: set[Label]) -> bool:
    """Return whether the gradient of an operand sums over padding, or takes all of it as valid."""
    return any(label not in labels or not is_padded_alike(x.dims[labels.index(label)], dims[label]) for label in padded)


def _fill_after(values: Sequence[PaddedValue]) -> Fill | None:
    """Return the known fill of elements that were only moved."""
    if len(values) == 1:
        return values[0].fill
    fills = {x.fill if x.padded_dims else None for x in values}
    return fills.pop() if len(fills) == 1 else None
