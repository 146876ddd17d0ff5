"""The interpreter of dimension maps: rows are carried along the dims that an op leaves alone, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtensors.dispatch.chunked.lazy_graph import LazyValue, RowSlice, replicated
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, chunk_dim_size, record, sliced
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.ops.dims import DimMap, Label, Labels
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.tree import PyTree, tree_find

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """The rows of one call: a dim of an operand, and the dims of the other operands that share its label.

    Args:
        layout: the rows in the leader, the operand whose chunks the call is divided by.
        label: the label of that dim.
        labels: of the dims of each value, by its id.
    """

    layout: RowLayout
    label: Label
    labels: dict[int, Labels]

    def operand(self, value: LazyValue) -> LazyValue | RowSlice:
        """Return a value as a chunk reads it: its rows, or all of it where it has none or broadcasts along them."""
        labels = self.labels[id(value)]
        if self.label not in labels:
            return replicated(value)
        return sliced(value, self.layout.with_dim(labels.index(self.label)))


def rows_of(call: ChunkedCall, found: DimMap) -> Rows:
    """Return the rows that a call is divided by: those of its largest operand whose rows the op doesn't combine."""
    pairs = list(zip(call.values, found.operands, strict=True))
    labels: dict[int, Labels] = {}
    for v, own in pairs:
        if labels.setdefault(id(v), own) != own:
            # A product of a value with itself: an alias gives each factor a layout of its own.
            name = [name for name, x in call.arguments.items() if x is v][-1]
            call.replace(name, record(aten.alias.default, v))
            return rows_of(call, found)
    chunked = [(v, own[v.layout.dim]) for v, own in pairs if v.layout is not None]
    parallel = [pair for pair in chunked if pair[1] not in found.combined]

    def extent(pair: tuple[LazyValue, Label]) -> tuple[bool, int]:
        return all(pair[1] in own for own in found.operands), pair[0].meta.numel()

    leader, label = max(parallel or chunked, key=extent)
    return Rows(leader.row_layout, label, labels)


def _reads_rows(call: ChunkedCall, found: DimMap) -> bool:
    """Return whether a call reads or writes rows at an index: those of its first operand, whatever the index is."""
    layout = call.values[0].layout if op_class(call.op) is OpClass.SCATTER_GATHER else None
    return layout is not None and found.operands[0][layout.dim] in found.combined


@RULES.register(DimMap)
def carry(call: ChunkedCall) -> PyTree:
    """Run the op in each chunk, where it combines no rows."""
    found = call.dims()
    rows, rule = rows_of(call, found), RULES.lookup_across(call.op)
    if rows.label in found.combined or (rule is not None and _reads_rows(call, found)):
        if rule is None:
            raise call.unchunkable("it combines the rows")
        return rule(call)
    metas, layout = call.infer(), rows.layout
    outs = []
    for i, meta in enumerate(tree_find(Tensor, metas)):
        dim = found.of_result(i).index(rows.label)
        if meta.shape[dim] != layout.dim_size:
            raise call.unchunkable("its result is larger than its operands along the chunked dim")
        outs.append(layout.with_dim(dim))
    if found.sizes:
        (out,) = outs
        sizes = [chunk_dim_size(out) if d == out.dim else size for d, size in enumerate(metas.shape)]
        call.replace(found.sizes, sizes)
    return call.emit(outs, rows.operand, metas=metas)
