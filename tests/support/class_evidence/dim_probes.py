"""The claims of a dimension map as a probe of one recorded call: positions chosen, cut and filled along each dim."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from class_evidence.calls import Call, holds_values
from class_evidence.probes import SaysNothing, all_close
from subtensors.dispatch.ops.dims import DimMap, Labels, dim_map
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.reduction_dims import LOGSUMEXP, SUM, monoid_of


def map_of(call: Call) -> tuple[DimMap, list[torch.Tensor]]:
    """The dimension map of a call, and its tensors in the order of the schema."""
    named = call.arguments()
    tensors = [t for value in named.values() for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return dim_map(call.op, named, tensors), tensors


def acts_as_its_map_says(call: Call) -> str | None:
    """None where the map holds on the call; otherwise how it fails."""
    found, tensors = map_of(call)
    if [len(labels) for labels in found.operands] != [t.ndim for t in tensors]:
        return f"its map has the operands {found.operands}"
    outputs = results_of(call)
    if "empty" in call.op.name():
        raise SaysNothing("its values are not defined")
    for i, t in enumerate(outputs):
        labels = found.of_result(i)
        if t.ndim != len(labels) and not (labels and labels[-1] is ... and t.ndim >= len(labels) - 1):
            return f"a result of {t.ndim} dims has the labels {labels}"
    tested = False
    for label in {label for labels in found.operands for label in labels} - found.combined:
        sizes = sizes_along(label, tensors, found)
        if any(label not in found.of_result(i) for i in range(len(outputs))):
            return f"a result lacks {label}, which is not combined"
        if max(sizes, default=1) < 2:
            continue
        tested = True
        positions = torch.randint(max(sizes), (max(sizes),))
        chosen = results_of(choose(call, label, positions, tensors, found))
        wanted = [
            t.index_select(found.of_result(i).index(label), positions.to(t.device)) for i, t in enumerate(outputs)
        ]
        if not all_close(chosen, wanted):
            return f"a choice of positions along {label} gives other values"
    if found.shape is not None and not all_close([t.reshape(found.shape) for t in tensors], outputs):
        return "a reshape changes the order of the elements"
    why = moves_nothing_new(found, tensors, outputs)
    reduced = reduced_labels(call, found, tensors, outputs)
    for label in reduced:
        why = why or combines_parts(call, label, found, tensors)
    if why is None and not tested and not reduced and not found.moves:
        raise SaysNothing("no dim of more than one position is parallel")
    return why


def results_of(call: Call) -> list[torch.Tensor]:
    """The tensors that a call returns, run on copies of its arguments."""
    copied = call.with_tensors(torch.clone)
    return [t for t in tree_leaves(copied.op(*copied.args, **copied.kwargs)) if isinstance(t, torch.Tensor)]


def sizes_along(label: Any, tensors: list[torch.Tensor], found: DimMap) -> list[int]:
    """The sizes of the dims of a label."""
    pairs = zip(tensors, found.operands, strict=True)
    return [t.shape[d] for t, labels in pairs for d, own in enumerate(labels) if own == label]


def choose(call: Call, label: Any, positions: torch.Tensor, tensors: list[torch.Tensor], found: DimMap) -> Call:
    """The same call with some positions of a label, of each operand that has it and doesn't broadcast along it."""
    labels_by_id = {id(t): labels for t, labels in zip(tensors, found.operands, strict=True)}

    def change(t: torch.Tensor) -> torch.Tensor:
        labels: Labels = labels_by_id[id(t)]
        for d, own in enumerate(labels):
            if own == label and (t.shape[d] > 1 or positions.numel() == 1):
                t = t.index_select(d, positions.to(t.device))
        return t

    return call.with_tensors(change)


def moves_nothing_new(found: DimMap, tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> str | None:
    """Whether the elements of the results are elements of the operands, where the map says so."""
    if not found.moves or not outputs or not all(map(holds_values, [*tensors, *outputs])):
        return None
    given = torch.cat(
        [torch.view_as_real(t.resolve_conj()).flatten() if t.is_complex() else t.flatten() for t in tensors]
    )
    made = [torch.view_as_real(t.resolve_conj()).flatten() if t.is_complex() else t.flatten() for t in outputs]
    new = [t for t in made if not torch.isin(t[~t.isnan()], given.to(t.dtype)).all()]
    return "a result has an element that no operand has" if new else None


def reduced_labels(call: Call, found: DimMap, tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[Any]:
    """The labels along which the op reduces by a monoid, or sums products."""
    by_monoid = op_class(call.op) is OpClass.REDUCTION and monoid_of(call.op) is not None
    if not (by_monoid or op_class(call.op) is OpClass.CONTRACTION) or len(outputs) != 1:
        return []
    kept = {label for i in range(len(outputs)) for label in found.of_result(i)}
    return [label for label in found.combined - kept if max(sizes_along(label, tensors, found), default=0) > 1]


def combines_parts(call: Call, label: Any, found: DimMap, tensors: list[torch.Tensor]) -> str | None:
    """How it fails that neutral elements change nothing along a label, and that the parts combine to the whole."""
    monoid = monoid_of(call.op) or SUM
    size = max(sizes_along(label, tensors, found))
    begin, end = torch.arange(size // 2), torch.arange(size // 2, size)
    part, rest = (results_of(choose(call, label, half, tensors, found))[0] for half in (begin, end))
    labels_by_id = {id(t): labels for t, labels in zip(tensors, found.operands, strict=True)}

    def filled(t: torch.Tensor) -> torch.Tensor:
        labels = labels_by_id[id(t)]
        # No integer is neutral for logsumexp.
        t = t.double() if monoid is LOGSUMEXP and not holds_values(t) else t
        for d, own in enumerate(labels):
            t = t.index_fill(d, end, monoid.neutral(t.dtype)) if own == label else t
        return t

    if not all_close([part], results_of(call.with_tensors(filled))):
        return f"neutral elements along {label} change the result"
    whole = results_of(call)[0]
    if op_class(call.op) is OpClass.REDUCTION and not all_close(
        [monoid.combine(torch.stack([part, rest]), 0)], [whole]
    ):
        return f"parts along {label} do not combine to the whole"
    return None
