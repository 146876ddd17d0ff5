"""Values that are simple functions of a softmax, and their sums over the classes as statistics of rows.

With the logits z of a row, L their log-sum-exp, l = z - L and p = exp(l), a value of the form

    a l + b L + c    or    p (a l + b L + c)    or    c p v    for a vector v over the classes

is recognized by looking back through the ops that computed it. So `-(p * lp).sum(-1)`, `Categorical.entropy` and
`logsumexp(z) - (softmax(z) * z).sum(-1)` are all the same statistic, and no chunk ever holds l or p:

    sum p (a l + b L + c) = a P + b L + c,    P = sum p l the negative entropy
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch

from subtensors.dispatch.chunked.lazy_graph import LazyValue, recording
from subtensors.dispatch.chunked.logit_maps import ClassOffset
from subtensors.dispatch.chunked.match_logits import (
    SCALINGS,
    carries_gradient,
    match_linear_logits,
    match_transforms,
    widens,
)
from subtensors.dispatch.chunked.record import record
from subtensors.dispatch.chunked.row_statistics import Kind, has_rows, record_statistic
from subtensors.dispatch.chunked.rules.reductions import cast

aten = torch.ops.aten


@dataclass(frozen=True)
class RowForm:
    """A value of one of the forms above.

    Args:
        logits: z.
        is_softmax: whether p is a factor.
        log_p, log_sum_exp, constant: a, b and c.
        vector: (V,), v; None without it.
        is_clamped: whether l is clamped to finite numbers, so that p l is 0 where p is.
    """

    logits: LazyValue
    is_softmax: bool
    log_p: float = 0.0
    log_sum_exp: float = 0.0
    constant: float = 0.0
    vector: LazyValue | None = None
    is_clamped: bool = False

    @property
    def is_log_softmax(self) -> bool:
        """Return whether it is l."""
        return not self.is_softmax and (self.log_p, self.log_sum_exp, self.constant) == (1, 0, 0)

    @property
    def is_constant(self) -> bool:
        """Return whether it is c, or c p."""
        return self.log_p == self.log_sum_exp == 0 and self.vector is None

    def scaled(self, factor: float) -> RowForm:
        """Return a multiple of it."""
        log_p, log_sum_exp, constant = factor * self.log_p, factor * self.log_sum_exp, factor * self.constant
        return replace(self, log_p=log_p, log_sum_exp=log_sum_exp, constant=constant)

    def plus(self, other: RowForm, factor: float) -> RowForm | None:
        """Return its sum with a multiple of another form."""
        if not _same_logits(self.logits, other.logits) or self.vector is not other.vector is not None:
            return None
        if self.is_softmax != other.is_softmax or (self.vector is None) != (other.vector is None):
            return None
        if self.is_clamped != other.is_clamped and self.log_p and other.log_p:
            return None
        return replace(
            self,
            log_p=self.log_p + factor * other.log_p,
            log_sum_exp=self.log_sum_exp + factor * other.log_sum_exp,
            constant=self.constant + factor * other.constant,
            is_clamped=self.is_clamped or other.is_clamped,
        )


_log_sum_exps: weakref.WeakKeyDictionary[LazyValue, LazyValue] = weakref.WeakKeyDictionary()
"""Recorded log-sum-exps (..., 1) by value: of which logits."""

MAX_DEPTH = 12
"""The most ops that are looked back through."""


def row_form(value: LazyValue, depth: int = MAX_DEPTH) -> RowForm | None:
    """Return the form of a value (..., V); None where the ops don't show one."""
    node = value.node
    if node is None or value.tensor is not None or value.layout is None or not node.args or not depth:
        return None
    op, args = node.op, node.args
    first = args[0]
    if not isinstance(first, LazyValue) or first.shape[-1:] != value.shape[-1:]:
        return None
    if not carries_gradient(value, node.operands()):
        return None
    if op in _SOFTMAX:
        if args[1] % value.ndim != value.ndim - 1 or not has_rows(first):
            return None
        # A number of the row changes no softmax: normalized logits have that of the logits.
        inner = row_form(first, depth - 1)
        shifted = inner is not None and not inner.is_softmax and inner.vector is None and inner.log_p == 1
        logits = inner.logits if inner is not None and shifted else first
        return RowForm(logits, True, constant=1.0) if _SOFTMAX[op] else RowForm(logits, False, log_p=1.0)
    if op is aten.add.Tensor or op is aten.sub.Tensor:
        sign = 1 if op is aten.add.Tensor else -1
        return _sum_form(first, args[1], sign * float(node.kwargs.get("alpha", 1)), depth - 1)
    if op in SCALINGS and isinstance(args[1], (int, float)):
        inner = row_form(first, depth - 1)
        factor = _factor(SCALINGS[op], float(args[1]))
        return None if inner is None or factor is None else inner.scaled(factor)
    if op is aten.mul.Tensor and isinstance(args[1], LazyValue):
        return _product_form(first, args[1], depth)
    inner = row_form(first, depth - 1)
    if inner is None:
        return None
    if op is aten.exp.default:
        return RowForm(inner.logits, True, constant=1.0) if inner.is_log_softmax else None
    if op is aten.neg.default:
        return inner.scaled(-1.0)
    if op is aten.special_entr.default:
        is_softmax = inner.is_softmax and inner.is_constant and inner.constant == 1
        # The gradient of a class that is masked is 0 * inf.
        maps = match_transforms(inner.logits, maps=True).maps
        is_finite = is_softmax and not any(isinstance(m, ClassOffset) for m in maps)
        return RowForm(inner.logits, True, log_p=-1.0, is_clamped=True) if is_finite else None
    if op in _COPIES and first.shape == value.shape:
        return inner
    if op is aten._to_copy.default:
        return inner if widens(first, value) else None
    if op in (aten.clamp.default, aten.clamp_min.default) and _keeps_all(value, *args[1:]):
        return replace(inner, is_clamped=True)
    return None


_SOFTMAX = {aten._softmax.default: True, aten._log_softmax.default: False}


def _factor(kind: str, number: float) -> float | None:
    """Return the factor that a product with a number or a quotient has; None for a division by zero."""
    if kind == "mul":
        return number
    return 1 / number if number else None


_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default)


def _keeps_all(value: LazyValue, low: object = None, high: object = None) -> bool:
    """Return whether a clamp changes -inf at most, whose share of a softmax is 0."""
    return high is None and isinstance(low, (int, float)) and low <= torch.finfo(value.dtype).min


def _logits_form(value: LazyValue, logits: LazyValue) -> RowForm | None:
    """Return the form of logits themselves: l + L."""
    same = _same_logits(value, logits)
    return RowForm(logits, False, log_p=1.0, log_sum_exp=1.0) if same else None


def _same_logits(a: LazyValue, b: LazyValue) -> bool:
    if a is b:
        return True
    same_gradient = carries_gradient(a, [b]) and carries_gradient(b, [a])
    return same_gradient and a.shape == b.shape and match_transforms(a, maps=True) == match_transforms(b, maps=True)


def _sum_form(first: LazyValue, second: object, factor: float, depth: int) -> RowForm | None:
    """Return the form of first + factor * second."""
    if not isinstance(second, LazyValue):
        return None
    logits = _log_sum_exps.get(second)
    if logits is not None and carries_gradient(second, [logits]):
        left = row_form(first, depth) or _logits_form(first, logits)
        return None if left is None else left.plus(RowForm(logits, False, log_sum_exp=1.0), factor)
    a, b = row_form(first, depth), row_form(second, depth)
    if a is None and b is not None:
        a = _logits_form(first, b.logits)
    if b is None and a is not None:
        b = _logits_form(second, a.logits)
    return None if a is None or b is None else a.plus(b, factor)


def _product_form(first: LazyValue, second: LazyValue, depth: int) -> RowForm | None:
    """Return the form of a product of a softmax with another form, or with a vector."""
    a, b = row_form(first, depth - 1), row_form(second, depth - 1)
    for left, right, other in ((a, b, second), (b, a, first)):
        if left is None or not left.is_softmax or not left.is_constant:
            continue
        right = right or _logits_form(other, left.logits)
        if right is not None and not right.is_softmax and _same_logits(left.logits, right.logits):
            return replace(right.scaled(left.constant), is_softmax=True)
        is_vector = other.layout is None and other.ndim == 1 and other.dtype.is_floating_point and not other.needs_grad
        if right is None and is_vector and other.shape[0] == left.logits.shape[-1]:
            return replace(left, vector=other)
    return None


def largest_class(value: LazyValue) -> LazyValue | None:
    """Record the class of the largest of values (..., V) that grow with a linear layer's logits; None for others.

    Of log-probabilities or probabilities that are the same but for rounding it is that of the largest logit.
    """
    with recording(False):  # a position has no gradient
        form = row_form(value)
    if form is not None and form.vector is None:
        grows = form.constant > 0 and form.is_constant if form.is_softmax else form.log_p > 0
        value = form.logits if grows else value
    elif value.node is not None and value.tensor is None and value.node.op is aten.detach.default:
        (value,) = value.node.args
    return None if match_linear_logits(value, maps=True) is None else record_statistic(value, "argmax")


def class_sum(value: LazyValue, dtype: torch.dtype) -> LazyValue | None:
    """Record the sum over the classes of a value (..., V) with a softmax as its factor, in a dtype; None for others."""
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
    return cast(_linear_combination(terms, 0.0 if form.vector is not None else form.constant), dtype)


def _linear_combination(terms: list[tuple[float, LazyValue | None]], constant: float) -> LazyValue:
    """Record the sum of factors times values, and a constant."""
    total: LazyValue | None = None
    for factor, term in terms:
        part = term if factor == 1 else record(aten.mul.Tensor, term, factor)
        total = part if total is None else record(aten.add.Tensor, total, part)
    assert total is not None
    out: LazyValue = record(aten.add.Tensor, total, constant) if constant else total
    return out


def log_sum_exp(logits: LazyValue, keepdim: bool) -> LazyValue | None:
    """Record the log-sum-exp of the classes of logits (..., V), in their dtype; None where kernels don't take it."""
    value = record_statistic(logits, "log_sum_exp")
    if value is None:
        return None
    value = cast(value, logits.dtype)
    if keepdim:
        value = record(aten.unsqueeze.default, value, -1)
        _log_sum_exps[value] = logits
    return value


def gathered(scores: LazyValue, index: LazyValue) -> LazyValue | None:
    """Record log-probabilities or probabilities of given classes, or logits of a linear layer.

    Args:
        scores: (..., V), chunked along another dim than the last.
        index: (..., T), the classes of each row.

    Returns:
        (..., T), chunked, in the dtype of the scores; None where those are none of these.
    """
    form = row_form(scores)
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
