"""Calls on chunked tensors that are given to kernels, or recorded without going through torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subtensors.chunked.lazy_tensor import RecordedTensor, cell_of, outer, whole_of
from subtensors.chunked.row_indexing import each_row, one_row, picked_rows, selected_rows
from subtensors.dispatch.chunked.aliasing import AliasRef, LazyLinear
from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize, constant, recording
from subtensors.dispatch.chunked.lower_cross_entropy import cross_entropy_of_layer, loss_dtype, lowered_cross_entropy
from subtensors.dispatch.chunked.row_losses import (
    logits_of,
    recorded_cross_entropy,
    recorded_log_probabilities,
    recorded_log_sum_exp,
)
from subtensors.dispatch.chunked.rules import record
from subtensors.dispatch.chunked.rules.contractions import linear_layer
from subtensors.dispatch.ops import linear_cross_entropy as torchs
from subtensors.dispatch.ops.plain_types import PLAIN_TYPES

aten = torch.ops.aten

Kind = type[RecordedTensor]


def _is_recorded_loss(input: Any, target: Any, size_average: Any, reduce: Any, reduction: str) -> bool:
    """Return whether this is a loss of recorded scores against a tensor, without torch's deprecated reductions."""
    is_known = size_average is reduce is None and reduction in ("mean", "sum", "none")
    return is_known and isinstance(input, RecordedTensor) and isinstance(target, Tensor)


def _cross_entropy(
    kind: Kind,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy`: with the head, where logits are a linear layer of what was chunked; otherwise by rows."""
    if not _is_recorded_loss(input, target, size_average, reduce, reduction):
        return None
    cell = cell_of(input)
    if type(cell) is LazyLinear and weight is None and type(target) is Tensor:
        loss = cross_entropy_of_layer(cell, target, ignore_index, reduction, label_smoothing)
        if loss is not None:
            return loss
    return _entropy_of(kind, cell.value, target, weight, reduction, ignore_index, label_smoothing)


def _linear_cross_entropy(
    kind: Kind,
    input: Any,
    linear_weight: Any,
    target: Any,
    **named: Any,
) -> Tensor | None:
    """`F.linear_cross_entropy`: a linear layer and its cross entropy, in chunks of the rows whatever `options` say."""
    try:
        return torchs.composed(input, linear_weight, target, **named)
    except torchs.NotComposed:
        return None


def _nll_loss(
    kind: Kind,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    """`F.nll_loss` of a log-softmax: a cross entropy."""
    if not _is_recorded_loss(input, target, size_average, reduce, reduction):
        return None
    scores = cell_of(input).value
    logits = logits_of(scores)
    if logits is scores or logits.dtype != scores.dtype or target.ndim != 1:
        return None
    return _entropy_of(kind, logits, target, weight, reduction, ignore_index, 0.0)


def _entropy_of(
    kind: Kind,
    logits: LazyValue,
    target: Tensor,
    weight: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor | None:
    if isinstance(weight, RecordedTensor) or not logits.dtype.is_floating_point:
        return None
    wanted = cell_of(target).value if isinstance(target, RecordedTensor) else whole_of(target)
    whole = wanted.tensor if isinstance(wanted, LazyValue) else wanted
    options: dict[str, Any] = {"class_weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    options |= {"label_smoothing": label_smoothing, "grad": torch.is_grad_enabled()}
    if whole is not None and reduction != "none":
        loss = lowered_cross_entropy(logits, whole, **options)
        if loss is not None:
            return loss
    dtype = loss_dtype(logits.dtype, logits.device.type)
    return _shown(kind, lambda: recorded_cross_entropy(logits, wanted, dtype=dtype, **options))


def _logsumexp(kind: Kind, input: Any, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor | None:
    """`torch.logsumexp` over the classes."""
    dims = [dim] if isinstance(dim, int) else dim
    if (
        not isinstance(input, RecordedTensor)
        or keepdim
        or others
        or not isinstance(dims, (list, tuple))
        or len(dims) != 1
    ):
        return None
    value = cell_of(input).value
    return _shown(kind, lambda: recorded_log_sum_exp(value, dims[0], torch.is_grad_enabled()))


def _gather(kind: Kind, input: Any, dim: Any, index: Any, **others: Any) -> Tensor | None:
    """`torch.gather` of a log-softmax, one class a row: the log-probabilities of tokens."""
    if not isinstance(input, RecordedTensor) or not isinstance(index, Tensor) or others or not isinstance(dim, int):
        return None
    value = cell_of(input).value
    wanted = cell_of(index).value if isinstance(index, RecordedTensor) else whole_of(index)
    return _shown(kind, lambda: recorded_log_probabilities(value, dim, wanted, torch.is_grad_enabled()))


def _shown(kind: Kind, recorded: Callable[[], LazyValue | None]) -> Tensor | None:
    """Record a value and return the tensor that its user sees; None if it can't be recorded."""
    try:
        value = recorded()
    except NeedsMaterialize:
        return None
    if value is None:
        return None
    return evaluate(value) if value.layout is None else outer(kind, AliasRef(value))


def _linear(kind: Kind, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """`F.linear`, recorded without going through torch, and only once anything but its cross entropy is asked for."""
    if type(weight) not in PLAIN_TYPES or (bias is not None and type(bias) not in PLAIN_TYPES):
        return None
    if not isinstance(input, RecordedTensor) or torch.is_autocast_enabled(weight.device.type):
        return None
    rows, sizes = cell_of(input).value, weight.shape
    layout, like = rows.layout, rows.like
    dims = like.ndim
    if layout is None or layout.dim == dims - 1 or len(sizes) != 2 or sizes[1] != like.shape[-1]:
        return None
    if bias is not None and (bias.shape != sizes[:1] or bias.dtype is not like.dtype or bias.device != rows.device):
        return None
    if weight.dtype is not like.dtype or weight.device != rows.device:
        return None
    grad = torch.is_grad_enabled()
    try:
        head = constant(weight), None if bias is None else constant(bias)
        if dims == 2:
            return outer(kind, LazyLinear(rows, *head, grad))
        with recording(grad):
            flat = record(aten.reshape.default, rows, [math.prod(rows.shape[:-1]), rows.shape[-1]])
            if flat.layout is None or flat.layout.dim != 0:
                return None
            out = record(aten.reshape.default, linear_layer(flat, *head, grad), [*rows.shape[:-1], sizes[0]])
    except NeedsMaterialize:
        return None
    return outer(kind, AliasRef(out)) if out.layout is not None else None


def _to(kind: Kind, input: Any, *args: Any, **named: Any) -> Tensor | None:
    """`Tensor.to` a wider dtype, of a linear layer that isn't recorded."""
    cell = cell_of(input) if isinstance(input, RecordedTensor) else None
    dtype = args[0] if len(args) == 1 and not named else named.get("dtype") if not args and len(named) == 1 else None
    if type(cell) is not LazyLinear or cell.is_recorded or dtype not in _WIDER.get(cell.dtype, ()):
        return None
    return outer(kind, cell.to(dtype, torch.is_grad_enabled()))


_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def _float(kind: Kind, input: Any, **named: Any) -> Tensor | None:
    return None if named else _to(kind, input, torch.float32)


BY_KERNELS: dict[Any, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **({} if torchs.FUNCTION is None else {torchs.FUNCTION: _linear_cross_entropy}),
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    torch.special.logsumexp: _logsumexp,
    Tensor.to: _to,
    Tensor.float: _float,
    torch.gather: _gather,
    Tensor.gather: _gather,
    Tensor.__getitem__: picked_rows,
    torch.index_select: selected_rows,
    Tensor.index_select: selected_rows,
    torch.select: one_row,
    Tensor.select: one_row,
    torch.unbind: each_row,
    Tensor.unbind: each_row,
}
"""Functions by the torch function that they replace; each returns None where the call is recorded op by op."""
