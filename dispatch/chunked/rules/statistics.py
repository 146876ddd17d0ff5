"""Statistics of the rows of logits, found in plain code: see `row_forms.py` and `row_statistics.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from subtensors.dispatch.chunked.lazy_graph import LazyValue, NeedsMaterialize, recording
from subtensors.dispatch.chunked.match_logits import match_linear_logits
from subtensors.dispatch.chunked.record import RULES, ChunkedCall, record
from subtensors.dispatch.chunked.row_forms import LOG_SUM_EXPS, row_form
from subtensors.dispatch.chunked.row_statistics import Kind, has_rows, record_statistic
from subtensors.dispatch.chunked.rules.carried_dims import carry
from subtensors.dispatch.chunked.rules.reductions import cast
from subtensors.dispatch.ops.dims import listed
from subtensors.dispatch.ops.tree import PyTree

aten = torch.ops.aten

Rule = Callable[[ChunkedCall, LazyValue], LazyValue | None]


def _over_classes(op: OpOverload) -> Callable[[Rule], Rule]:
    """Register a rule for an op over the last dim of rows; its dimension map records it where that returns None."""

    def register(rule: Rule) -> Rule:
        def recorded(call: ChunkedCall, x: LazyValue, dim: int | Sequence[int] | None) -> PyTree:
            found = None
            if dim is not None and listed(dim, x.ndim) == [x.ndim - 1] and has_rows(x):
                with contextlib.suppress(NeedsMaterialize):  # op by op it may be recorded
                    found = rule(call, x)
            return carry(call) if found is None else found

        recorded.__name__, recorded.__qualname__ = rule.__name__, rule.__qualname__  # as messages call it
        RULES.register(op)(recorded)
        return rule

    return register


def _kept(call: ChunkedCall, value: LazyValue) -> LazyValue:
    """Return a value of rows with a dim for the classes, where the call keeps it."""
    out: LazyValue = record(aten.unsqueeze.default, value, -1) if call["keepdim"] else value
    return out


@_over_classes(aten.logsumexp.default)
def log_sum_exp(call: ChunkedCall, logits: LazyValue) -> LazyValue | None:
    """Record the log-sum-exp of the classes, in the dtype of the logits."""
    value = record_statistic(logits, "log_sum_exp")
    if value is None:
        return None
    value = _kept(call, cast(value, logits.dtype))
    if call["keepdim"]:
        LOG_SUM_EXPS[value] = logits
    return value


@_over_classes(aten.argmax.default)
def largest_class(call: ChunkedCall, value: LazyValue) -> LazyValue | None:
    """Record the class of the largest of values (..., V) that grow with a linear layer's logits.

    Of log-probabilities or probabilities that are the same but for rounding it is that of the largest logit.
    """
    with recording(False):  # a position has no gradient
        form = row_form(value)
    if form is not None and form.vector is None:
        grows = form.constant > 0 and form.is_constant if form.is_softmax else form.log_p > 0
        value = form.logits if grows else value
    elif value.node is not None and value.tensor is None and value.node.op is aten.detach.default:
        (value,) = value.node.args
    found = None if match_linear_logits(value, maps=True) is None else record_statistic(value, "argmax")
    return None if found is None else _kept(call, found)


@_over_classes(aten.sum.dim_IntList)
def class_sum(call: ChunkedCall, value: LazyValue) -> LazyValue | None:
    """Record the sum over the classes of a value (..., V) with a softmax as its factor."""
    form = row_form(value)
    if form is None or not form.is_softmax:
        return None
    if form.vector is not None:
        terms = [(form.constant, record_statistic(form.logits, "expectation", form.vector))]
    else:
        kinds: tuple[Kind, Kind] = ("finite_entropy" if form.is_clamped else "negative_entropy", "log_sum_exp")
        factors = zip((form.log_p, form.log_sum_exp), kinds, strict=True)
        terms = [(factor, record_statistic(form.logits, kind)) for factor, kind in factors if factor]
    if not terms or any(term is None for _, term in terms):
        return None
    total = _linear_combination(terms, 0.0 if form.vector is not None else form.constant)
    return _kept(call, cast(total, call.infer().dtype))


def _linear_combination(terms: list[tuple[float, LazyValue | None]], constant: float) -> LazyValue:
    """Record the sum of factors times values, and a constant."""
    total: LazyValue | None = None
    for factor, term in terms:
        part = term if factor == 1 else record(aten.mul.Tensor, term, factor)
        total = part if total is None else record(aten.add.Tensor, total, part)
    assert total is not None
    out: LazyValue = record(aten.add.Tensor, total, constant) if constant else total
    return out


@_over_classes(aten.gather.default)
def gathered(call: ChunkedCall, scores: LazyValue) -> LazyValue | None:
    """Record log-probabilities or probabilities of a few classes a row, or logits of a linear layer."""
    form, index = row_form(scores), call["index"]
    if form is None:
        if match_linear_logits(scores, maps=True) is None:
            return None
        value = record_statistic(scores, "logit", index)
    elif (form.is_log_softmax and not form.is_clamped) or (form.is_softmax and form.is_constant and form.constant == 1):
        value = record_statistic(form.logits, "log_probability", index)
    else:
        return None
    if value is None:
        return None
    if form is not None and form.is_softmax:
        value = record(aten.exp.default, value)
    return cast(value, scores.dtype)
