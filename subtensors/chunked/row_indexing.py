"""Rows selected by a mask or an index, such as the tokens that a loss counts, and single rows: they are rechunked.

The number of selected rows in each chunk depends on the values of the index. But the input that was chunked is in
memory in full: its rows are selected by torch, and are chunked like those they come from. Logits that are a linear
layer of the input are handled alike: the layer is applied to the selected rows. A sequence of a batch is chunked along
its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.chunked.lazy_tensor import AliasRef, LazyTensor, alias_ref, user_tensor
from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import LazyValue, leaf_value, recording, replicated
from subtensors.dispatch.chunked.match_logits import LinearLogits, is_input, match_linear_logits
from subtensors.dispatch.chunked.record import record
from subtensors.dispatch.chunked.sharded_head import full_tensor

aten = torch.ops.aten


def indexed_rows(kind: type[LazyTensor], x: object, key: object) -> Tensor | None:
    """`x[key]` where a mask or an index selects from the dims that hold the rows; None for other keys."""
    first, *rest = key if isinstance(key, tuple) else (key,)
    if type(first) is int and not rest:
        return select_row(kind, x, 0, first)
    if not isinstance(x, LazyTensor) or not isinstance(first, Tensor) or isinstance(first, LazyTensor):
        return None
    if any(k is not Ellipsis and k != slice(None) for k in rest):
        return None
    value, first = alias_ref(x).value, full_tensor(first)
    layout, dims = value.layout, first.ndim if first.dtype == torch.bool else 1
    fits = first.shape == value.shape[:dims] if first.dtype == torch.bool else first.ndim == 1
    if layout is None or layout.dim >= dims or not fits or first.dtype not in (torch.bool, torch.int64):
        return None
    grad = torch.is_grad_enabled() and value.needs_grad
    with recording(grad), torch.set_grad_enabled(grad):
        found = _input_of(value)
        if found is None or (found[1] is not None and dims == value.ndim):
            return None
        hidden, layer = found
        rows, per_row = hidden[first], Fraction(math.prod(value.shape[:dims]), max(layout.axis.size, 1))
        leaf = leaf_value(rows, 0, layout.axis.selection(rows, 0, per_row))
        selected = _of_other_rows(layer, leaf, value.dtype)
    return user_tensor(kind, AliasRef(selected))


def _input_of(value: LazyValue) -> tuple[Tensor, LinearLogits | None] | None:
    """Return the input (..., H) that a value (..., H or V) is, or is a linear layer of, and the layer."""
    layer = None if is_input(value) else match_linear_logits(value)
    if layer is not None:
        hidden = layer.rows_of(evaluate(replicated(layer.hidden, through_casts=True)), OpOverload.__call__)
        return hidden.view(*value.shape[:-1], hidden.shape[-1]), layer
    return (evaluate(replicated(value, through_casts=True)), None) if is_input(value) else None


def _of_other_rows(layer: LinearLogits | None, rows: LazyValue, dtype: torch.dtype) -> LazyValue:
    """Record the logits of a linear layer for other rows, or for sequences of rows; without a layer return the rows."""
    if layer is None:
        return rows
    *sizes, width = rows.shape
    flat = rows if len(sizes) == 1 else record(aten.reshape.default, rows, [math.prod(sizes), width])
    if layer.bias is None:
        product = record(aten.mm.default, flat, layer.weight)
    else:
        product = record(aten.addmm.default, layer.bias, flat, layer.weight)
    logits = layer.transforms.apply_to(product, dtype)
    return logits if len(sizes) == 1 else record(aten.reshape.default, logits, [*sizes, logits.shape[-1]])


def select_row(kind: type[LazyTensor], x: object, dim: object, index: object) -> Tensor | None:
    """`x.select(dim, index)` where that is a sequence of a batch; None for other calls."""
    if type(index) is not int:
        return None
    place = index
    rows = _sequences(kind, x, dim, lambda hidden: {place: hidden[place]})
    return None if rows is None else rows[0]


def unbind_rows(kind: type[LazyTensor], x: object, dim: object = 0) -> tuple[Tensor, ...] | None:
    """`x.unbind(dim)` where that gives the sequences of a batch; None for other calls."""
    return _sequences(kind, x, dim, lambda hidden: dict(enumerate(hidden.unbind())))


def _sequences(
    kind: type[LazyTensor], x: object, dim: object, select: Callable[[Tensor], dict[int, Tensor]]
) -> tuple[Tensor, ...] | None:
    """Return sequences of a batch that is chunked along the batch as views, each chunked along its tokens.

    Args:
        kind: the type of the results.
        x: (B, S, ...); None is returned for anything else.
        dim: the dim that is indexed.
        select: returns indices and sequences of the tensor that was chunked.
    """
    value = alias_ref(x).value if isinstance(x, LazyTensor) else None
    layout = None if value is None else value.layout
    if value is None or layout is None or dim != 0 or layout.dim != 0 or layout.runs != 1 or value.ndim != 3:
        return None
    assert isinstance(x, LazyTensor)
    # Chunks of all sequences together hold as much as chunks of the batch.
    per_row = Fraction(value.shape[1], max(value.shape[0], 1))
    grad = torch.is_grad_enabled() and value.needs_grad
    with recording(grad), torch.set_grad_enabled(grad):
        found = _input_of(value)
        if found is None:
            return None
        refs = []
        for index, sequence in select(found[0]).items():
            axis = layout.axis.selection(sequence, 0, per_row)
            ref = AliasRef(_of_other_rows(found[1], leaf_value(sequence, 0, axis), value.dtype))
            refs.append(ref.make_view_of(alias_ref(x), aten.select.int, (0, index), {}, 0))
    return tuple([user_tensor(kind, ref) for ref in refs])


def index_select_rows(kind: type[LazyTensor], x: object, dim: object, index: object) -> Tensor | None:
    """`x.index_select(dim, index)` of the first dim; None for other dims."""
    is_first = isinstance(dim, int) and isinstance(x, LazyTensor) and dim % max(x.ndim, 1) == 0
    return indexed_rows(kind, x, index) if is_first and isinstance(index, Tensor) and index.ndim == 1 else None
