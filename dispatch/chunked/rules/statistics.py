"""Statistics of the rows of logits, found in plain code: see `row_forms.py` and `row_statistics.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record
from subtensors.dispatch.chunked.row_forms import class_sum, gathered, largest_class, log_sum_exp
from subtensors.dispatch.chunked.row_statistics import has_rows
from subtensors.dispatch.chunked.rules.carried_dims import carry
from subtensors.dispatch.ops.dims import listed
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten


def _unless_carried(
    call: ChunkedCall,
    x: LazyValue,
    dim: int | Sequence[int] | None,
    statistic: Callable[[], LazyValue | None],
    keepdim: bool = False,
) -> PyTree:
    """Record a statistic of the last dim of rows, or the op by its dimension map where it is none."""
    if dim is not None and listed(dim, x.ndim) == [x.ndim - 1] and has_rows(x):
        try:
            found = statistic()
        except NeedsMaterialize:
            found = None  # op by op it may be recorded
        if found is not None:
            return record(aten.unsqueeze.default, found, -1) if keepdim else found
    return carry(call)


@RULES.register(aten.logsumexp.default)
def record_log_sum_exp(call: ChunkedCall, x: LazyValue, dim: Sequence[int], keepdim: bool) -> PyTree:
    """Record a log-sum-exp over the classes as a statistic."""
    return _unless_carried(call, x, dim, lambda: log_sum_exp(x, keepdim))


@RULES.register(aten.sum.dim_IntList)
def record_class_sum(call: ChunkedCall, x: LazyValue, dim: Sequence[int] | None, keepdim: bool) -> PyTree:
    """Record a sum over the classes with a softmax as its factor as a statistic."""
    return _unless_carried(call, x, dim, lambda: class_sum(x, call.infer().dtype), keepdim)


@RULES.register(aten.argmax.default)
def record_argmax(call: ChunkedCall, x: LazyValue, dim: int | None, keepdim: bool) -> PyTree:
    """Record the largest class of a linear layer's logits, or of what grows with them, as a statistic."""
    return _unless_carried(call, x, dim, lambda: largest_class(x), keepdim)


@RULES.register(aten.gather.default)
def record_gather(call: ChunkedCall, x: LazyValue, dim: int, index: LazyValue) -> PyTree:
    """Record log-probabilities of a few classes a row as a statistic."""
    return _unless_carried(call, x, dim, lambda: gathered(x, index))
