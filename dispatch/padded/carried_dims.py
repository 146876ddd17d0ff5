"""The interpreter of dimension maps: padding is carried along the dims that an op leaves alone.

Along a parallel dim an op computes each position for itself, so padded positions stay in the padding of the results,
whatever they hold. Only gradients may mix: that of an operand which lacks a padded dim sums over all of its positions.
Then padded positions get valid values, and a gradient of zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch
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

MAX_MAPS = 4096
"""The most calls whose labelled dims are cached."""


class LabelledDims(NamedTuple):
    """The dims of a call by label, which depend on the dims of its operands and on its arguments, not on true sizes.

    Args:
        found: the op's map.
        dims: of each label; one that changes its size is not padded.
        padded: the labels that are.
        lacking: whether each operand of several lacks a padded dim along which the op is parallel.
    """

    found: DimMap
    dims: dict[Label, Factors]
    padded: frozenset[Label]
    lacking: tuple[bool, ...]


_labelled: dict[tuple[object, ...], LabelledDims] = {}


@table.register(DimMap)
def carry(call: PaddedCall) -> PyTree:
    """Carry the padding of each dim along, where the op combines no positions of it."""
    values = call.values
    sizes = values[0].sizes if len(values) == 1 else call.sizes()
    labelled = labelled_dims(call, sizes)
    if labelled is None:
        return _run_across(call)
    found, dims, padded, lacking = labelled
    if not padded.isdisjoint(found.combined):
        regrouped = _regrouped(values[0], found)
        if regrouped is None:
            return _run_across(call, dims)
        return result(call.dense(), regrouped, sizes, _fill_after(values) if found.moves else None)
    # An index, whose padding must be in range, may be shorter than what it indexes, and its bucket as long.
    is_read = len(values) > 1 and op_class(call.op) is OpClass.SCATTER_GATHER
    if is_read and _lacks(values[0], found.operands[0], dims, padded.intersection(found.operands[0])):
        return _run_across(call, dims)
    is_lacking = any(lacking)
    fill = _fill_after(values) if found.moves and not is_lacking else None
    sums = is_lacking and any(x.is_tracked for x, lacks_dim in zip(values, lacking, strict=True) if lacks_dim)
    safe: dict[int, Tensor] = {}
    for x in values[is_read:] if is_read or sums or found.partial else ():
        if is_read and x.padded_dims:
            # The gradients of reads and writes don't depend on values.
            safe[id(x)] = x.dense if x.dense.is_floating_point() or x.dense.is_complex() else x.filled(0)
        elif x.padded_dims and (found.partial or not found.moves):
            safe[id(x)] = x.edge_filled()
    changed = tree_map_only(PaddedValue, lambda x: safe.get(id(x), x), call.arguments) if safe else None
    labels = iter(found.results) if len(found.results) > 1 else itertools.repeat(found.results[0])
    is_masked = is_read or sums

    def value(t: Tensor) -> PaddedValue:
        own = [*static_dims(t.shape)]
        for d, label in enumerate(next(labels)):
            if label in padded:
                own[d] = dims[label]
        out = result(t, own, sizes, fill)
        return out.gradient_masked() if is_masked else out

    return tree_map_only(Tensor, value, call.dense(changed))


def _run_across(call: PaddedCall, dims: Mapping[Label, Factors] | None = None) -> PyTree:
    """Run the rule for an op that combines positions of a padded dim, or takes a padded size."""
    rule = table.resolved_across.get(call.op) or table.lookup_across(call.op)
    if rule is None:
        raise UnsupportedCall("it combines valid positions with padding")
    call.is_across, call.label_dims = True, dims or {}
    return rule(call)


def labelled_dims(call: PaddedCall, sizes: TrueSizes | None, agree: bool = False) -> LabelledDims | None:
    """Return the dims of a call by label, broadcast over its operands; None where a padded size is an argument.

    Args:
        call: a call of an op that has a map.
        sizes: the true sizes of its operands.
        agree: whether the operands have the same dim along a combined label, too.

    Raises:
        ScatteredDim: an operand is not flattened in a dim as another is.
        UnsupportedCall: the sizes differ.
    """
    key = _key(call, sizes, agree)
    found = _labelled.get(key) if key is not None else None
    if found is None and key is not None:
        if len(_labelled) >= MAX_MAPS:
            _labelled.clear()
        joined = frozenset() if agree else call.dims().combined
        dims = _broadcast(call, sizes, joined)
        padded = frozenset(label for label, factors in dims.items() if is_padded(factors))
        parallel = padded - call.dims().combined if len(call.values) > 1 else frozenset()
        lacking = tuple(_lacks(x, own, dims, parallel) for x, own in _with_labels(call))
        found = _labelled[key] = LabelledDims(call.dims(), dims, padded, lacking)
    if found is not None:
        call.found = found.found
    return found


def _key(call: PaddedCall, sizes: TrueSizes | None, agree: bool) -> tuple[object, ...] | None:
    """Return the arguments that labelled dims depend on; None where one is a padded size, which rules of ops take."""
    # The dims of a single operand hold all there is to know.
    key: list[object] = [call.op, agree, None if sizes is None or len(call.values) == 1 else sizes.key]
    for x in call.arguments.values():
        kind = type(x)
        if kind is PaddedValue:
            key += (x.dims, x.dense.dtype)
        elif kind is list or kind is tuple:
            kinds = {*map(type, x)}
            if PaddedSize in kinds:
                return None
            key.append(tuple([(y.dims, y.dense.dtype) if type(y) is PaddedValue else y for y in x]))
        elif kind is PaddedSize:
            return None
        elif kind is float or kind is torch.SymFloat:
            # No map reads one, and compiled code must not make a constant of it.
            key.append(float)
        else:
            key.append(x)
    return tuple(key)


def _broadcast(call: PaddedCall, sizes: TrueSizes | None, joined: frozenset[Label]) -> dict[Label, Factors]:
    """Return the dim of each label; those that are `joined` need not agree."""
    candidates: dict[Label, list[Factors]] = {}
    for x, labels in _with_labels(call):
        for label, factors in zip(labels, x.dims, strict=True):
            candidates.setdefault(label, []).append(factors)
    try:
        return {
            label: broadcast_dim(each, sizes) if label not in joined else next(filter(is_padded, each), each[0])
            for label, each in candidates.items()
        }
    except UnsupportedCall:
        for label in candidates.keys() - joined:
            raise_if_scattered([(x, own.index(label)) for x, own in _with_labels(call) if label in own], sizes)
        raise


def _with_labels(call: PaddedCall) -> Iterator[tuple[PaddedValue, Labels]]:
    return zip(call.values, call.dims().operands, strict=True)


def _regrouped(x: PaddedValue, found: DimMap) -> Sequence[Factors] | None:
    """Return the dims of a reshape that keeps each padded dim in one piece; None of anything else."""
    if found.shape is None or 0 in x.shape:
        return None
    try:
        return reshaped(x.dims, tuple(map(int, found.shape)))
    except RuleError:
        return None


def _lacks(x: PaddedValue, labels: Labels, dims: Mapping[Label, Factors], padded: Set[Label]) -> bool:
    """Return whether the gradient of an operand sums over padding, or takes all of it as valid."""
    return any(label not in labels or not is_padded_alike(x.dims[labels.index(label)], dims[label]) for label in padded)


def _fill_after(values: Sequence[PaddedValue]) -> Fill | None:
    """Return the known fill of elements that were only moved."""
    if len(values) == 1:
        return values[0].fill
    fills = {x.fill if x.padded_dims else None for x in values}
    return fills.pop() if len(fills) == 1 else None
