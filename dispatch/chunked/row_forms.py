"""Values that are simple functions of a softmax, whose sums over the classes are statistics of rows.

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

from subtensors.dispatch.chunked.lazy_graph import LazyValue
from subtensors.dispatch.chunked.logit_maps import ClassOffset
from subtensors.dispatch.chunked.match_logits import SCALINGS, carries_gradient, match_transforms, widens
from subtensors.dispatch.chunked.row_statistics import has_rows

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


LOG_SUM_EXPS: weakref.WeakKeyDictionary[LazyValue, LazyValue] = weakref.WeakKeyDictionary()
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
        inner, number, is_quotient = row_form(first, depth - 1), float(args[1]), SCALINGS[op] == "div"
        if inner is None or (is_quotient and not number):
            return None
        return inner.scaled(1 / number if is_quotient else number)
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
    logits = LOG_SUM_EXPS.get(second)
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
