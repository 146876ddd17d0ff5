"""Rows selected by a mask or an index, such as the tokens that a loss counts, and single rows: they are rechunked.

The number of selected rows in each chunk depends on the values of the index. But the input that was chunked is in
memory in full: its rows are selected by torch, and are chunked like those they come from. Logits that are a linear
layer of the input are handled alike: the layer is applied to the selected rows. A sequence of a batch is chunked along
its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.chunked.lazy_tensor import RecordedTensor, cell_of, outer, whole_of
from subtensors.dispatch.chunked.aliasing import AliasRef
from subtensors.dispatch.chunked.lazy_graph import LazyValue, leaf_value, recording
from subtensors.dispatch.chunked.match_logits import LinearLogits, is_input, linear_logits, whole_input
from subtensors.dispatch.chunked.row_layout import RowLayout
from subtensors.dispatch.chunked.rules.table import record

aten = torch.ops.aten


def picked_rows(kind: type[RecordedTensor], x: Any, key: Any) -> Tensor | None:
    """`x[key]` where a mask or an index picks from the dims that hold the rows; None where it is something else."""
    first, *rest = key if isinstance(key, tuple) else (key,)
    if type(first) is int and not rest:
        return one_row(kind, x, 0, first)
    is_plain = isinstance(x, RecordedTensor) and isinstance(first, Tensor) and not isinstance(first, RecordedTensor)
    if not is_plain or any(k is not Ellipsis and k != slice(None) for k in rest):
        return None
    value, first = cell_of(x).value, whole_of(first)
    layout, dims = value.layout, first.ndim if first.dtype == torch.bool else 1
    fits = first.shape == value.shape[:dims] if first.dtype == torch.bool else first.ndim == 1
    if layout is None or layout.dim >= dims or not fits or first.dtype not in (torch.bool, torch.int64):
        return None
    grad = torch.is_grad_enabled() and value.needs_grad
    with recording(grad), torch.set_grad_enabled(grad):
        if is_input(value):
            picked = _chunked_again(whole_input(value)[first], layout, dims, value)
        else:
            layer = linear_logits(value) if dims < value.ndim else None
            if layer is None:
                return None
            hidden = layer.rows_of(whole_input(layer.hidden)).view(*value.shape[:-1], -1)[first]
            picked = _logits(layer, _chunked_again(hidden, layout, dims, value), value.dtype)
    return outer(kind, AliasRef(picked))


def _logits(layer: LinearLogits, rows: LazyValue, dtype: torch.dtype) -> LazyValue:
    """The logits of a linear layer for other rows, or for sequences of rows."""
    *sizes, width = rows.shape
    flat = rows if len(sizes) == 1 else record(aten.reshape.default, rows, [math.prod(sizes), width])
    if layer.bias is None:
        product = record(aten.mm.default, flat, layer.weight)
    else:
        product = record(aten.addmm.default, layer.bias, flat, layer.weight)
    logits = layer.squashed.again(product, dtype)
    return logits if len(sizes) == 1 else record(aten.reshape.default, logits, [*sizes, logits.shape[-1]])


def one_row(kind: type[RecordedTensor], x: Any, dim: Any, index: Any) -> Tensor | None:
    """`x[index]`, a sequence of a batch; None where it is something else."""
    rows = _sequences(kind, x, dim, lambda hidden: {index: hidden[index]}) if type(index) is int else None
    return None if rows is None else rows[0]


def each_row(kind: type[RecordedTensor], x: Any, dim: Any = 0) -> tuple[Tensor, ...] | None:
    """`x.unbind()`, the sequences of a batch; None where it is something else."""
    return _sequences(kind, x, dim, lambda hidden: dict(enumerate(hidden.unbind())))


def _sequences(
    kind: type[RecordedTensor], x: Any, dim: Any, taken: Callable[[Tensor], dict[int, Tensor]]
) -> tuple[Tensor, ...] | None:
    """Sequences of a batch that is chunked along the batch, each chunked along its tokens: views, as torch gives them.

    Args:
        kind: the type of what stays chunked.
        x: (B, S, ...), perhaps.
        dim: of which one position is taken.
        taken: positions and sequences of what was chunked.
    """
    value = cell_of(x).value if isinstance(x, RecordedTensor) else None
    layout = None if value is None else value.layout
    if value is None or layout is None or dim != 0 or layout.dim != 0 or layout.outer != 1 or value.ndim != 3:
        return None
    policy = layout.axis.policy
    if policy.rows is not None:  # sequences side by side hold as much as chunks of the batch
        policy = replace(policy, rows=max(1, policy.rows * value.shape[1] // max(value.shape[0], 1)))
    grad = torch.is_grad_enabled() and value.needs_grad
    with recording(grad), torch.set_grad_enabled(grad):
        layer = None if is_input(value) else linear_logits(value)
        if layer is None and not is_input(value):
            return None
        hidden = whole_input(value) if layer is None else layer.rows_of(whole_input(layer.hidden))
        cells = []
        for place, sequence in taken(hidden.view(*value.shape[:-1], -1)).items():
            rows = leaf_value(sequence, 0, layout.axis.again(sequence.shape[0], sequence.numel(), policy))
            cell = AliasRef(rows if layer is None else _logits(layer, rows, value.dtype))
            cells.append(cell.view_of(cell_of(x), aten.select.int, (0, place), {}, 0))
    return tuple([outer(kind, cell) for cell in cells])


def _chunked_again(rows: Tensor, layout: RowLayout, dims: int, of: LazyValue) -> LazyValue:
    """Picked rows, chunked like the first dims of the value that they are of."""
    policy = layout.axis.policy
    if policy.rows is not None:
        together = math.prod(of.shape[:dims]) / max(layout.axis.size, 1)
        policy = replace(policy, rows=max(1, int(policy.rows * together)))
    return leaf_value(rows, 0, layout.axis.again(rows.shape[0], rows.numel(), policy))


def selected_rows(kind: type[RecordedTensor], x: Any, dim: Any, index: Any) -> Tensor | None:
    """`index_select` of the first dim."""
    is_first = isinstance(dim, int) and isinstance(x, RecordedTensor) and dim % max(x.ndim, 1) == 0
    return picked_rows(kind, x, index) if is_first and isinstance(index, Tensor) and index.ndim == 1 else None
