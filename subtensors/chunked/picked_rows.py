"""Rows that a mask or an index picks, as of the tokens that count: they are chunked again.

Which chunk has how many of them is not known before the index is. But what was chunked is there in full: its rows are
picked as torch picks them, and are chunked like those they come from. So are logits that are a linear layer of it: a
layer of picked rows is the layer's picked rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subtensors.chunked.recorded_tensor import RecordedTensor, cell_of, outer, whole_of
from subtensors.dispatch.region.axis import Axis, Layout
from subtensors.dispatch.region.cells import Cell
from subtensors.dispatch.region.graph import Value, leaf_value, recording
from subtensors.dispatch.region.lowering import is_input, linear_logits, whole_input
from subtensors.dispatch.region.rules.table import record

aten = torch.ops.aten


def picked_rows(kind: type[RecordedTensor], x: Any, key: Any) -> Tensor | None:
    """`x[key]` where a mask or an index picks from the dims that hold the rows; None where it is something else."""
    first, *rest = key if isinstance(key, tuple) else (key,)
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
            rows = _chunked_again(hidden, layout, dims, value)
            if layer.bias is None:
                picked = record(aten.mm.default, rows, layer.weight)
            else:
                picked = record(aten.addmm.default, layer.bias, rows, layer.weight)
            picked = layer.squashed.again(picked, value.dtype)
    return outer(kind, Cell(picked))


def _chunked_again(rows: Tensor, layout: Layout, dims: int, of: Value) -> Value:
    """Picked rows, chunked like the first dims of the value that they are of."""
    policy = layout.axis.policy
    if policy.rows is not None:
        together = math.prod(of.shape[:dims]) / max(layout.axis.size, 1)
        policy = replace(policy, rows=max(1, int(policy.rows * together)))
    return leaf_value(rows, 0, Axis(rows.shape[0], policy, rows.numel()))


def selected_rows(kind: type[RecordedTensor], x: Any, dim: Any, index: Any) -> Tensor | None:
    """`index_select` of the first dim."""
    is_first = isinstance(dim, int) and isinstance(x, RecordedTensor) and dim % max(x.ndim, 1) == 0
    return picked_rows(kind, x, index) if is_first and isinstance(index, Tensor) and index.ndim == 1 else None
