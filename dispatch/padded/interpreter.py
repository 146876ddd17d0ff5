"""The interpreter of padded values: it finds the rule for a call of an op and runs it.

A PaddedTensor is a dense tensor of a bucket's shape. Each dim has a true size, an expression of symbols whose values
are data on the device. A rule runs dense ops on the storage and derives the result's dims from those expressions, so
one rule, one compiled program and one CUDA graph serve every true size of a bucket:

    storage (4, 8), dims (4, n)        x.sum(1)   ->  where(mask, storage, 0).sum(1)      dims (4,)
    +--------------+--------+          x[:, 2:]   ->  storage[:, 2:]                      dims (4, n - 2)
    | valid        | pad    |          x.T @ w    ->  where(mask.T, storage.T, 0) @ w     dims (n, ...)
    +--------------+--------+
    0              n        8          mask = arange(8) < n, computed on the device, kept with the sizes

Padding may hold anything, NaN included. Where an op combines positions, its rule first fills the padding with the
op's neutral element (0 for a sum, -inf for a maximum). `PaddedValue.fill` says what the padding is known to hold, so
that no fill is repeated. Gradients are torch's own: rules run on storages that autograd tracks.

    function -> replacement -> aten op -> listed composite -> rule for overload, op or class -> RuleError
                replacements.py           decomposable.py     rules.py                          states a reason

A replacement is a torch function written anew on sizes; a listed composite is decomposed into simpler ops. What ends in
an error runs on the unpadded values in eager mode. Rules call each other through `apply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.ops.bound_call import BoundCall
from subtensors.dispatch.ops.dims import Label
from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.ops.op_classes import OpClass, op_class, overload_name
from subtensors.dispatch.ops.plain_types import LAZY_TYPES
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.dispatch.ops.tree import Kwargs, PyTree, tree_find, tree_has, tree_map_only
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue, ScatteredDim, known_sizes, unpadded_value
from subtensors.dispatch.padded.positions import watching_bounds, with_factors
from subtensors.dispatch.padded.true_sizes import TrueSizes, merge_sizes
from subtensors.dispatch.sizes.dim_factors import Factors, size_of
from subtensors.dispatch.sizes.expressions import Size
from subtensors.dispatch.torch_internals.dispatcher import overrides_enabled

table = RuleTable("PaddedTensor")
"""The rules: functions from a `PaddedCall` to results, with `PaddedValue` in place of tensors."""

_REFUSED = "PaddedTensor cannot run"

_observers: list[list[str]] = []


@contextmanager
def observed() -> Iterator[list[str]]:
    """Record the rules that run inside the context, a line each.

    Example:
        >>> with observed() as lines:
        ...     pass
        >>> lines
        []
    """
    lines: list[str] = []
    _observers.append(lines)
    try:
        yield lines
    finally:
        _observers.remove(lines)


def is_observed() -> bool:
    """Return whether anything notes which rules run, or what they read."""
    return bool(_observers or watching_bounds)


class PaddedCall(BoundCall[PaddedValue]):
    """One call of an overload, with `PaddedValue` in place of every tensor."""

    def __init__(self, op: OpOverload, args: Sequence[PyTree], kwargs: Kwargs) -> None:
        super().__init__(op, args, kwargs, PaddedValue)
        self.is_across = False
        """True if the op combines positions of a padded dim, by its dimension map."""
        self.label_dims: Mapping[Label, Factors] = {}
        """The dims of each label of its map, where the op combines positions and all its sizes are plain."""
        self._merged: tuple[list[PaddedValue], TrueSizes | None] | None = None

    def dense(self, changed: Mapping[str, PyTree] | None = None) -> PyTree:
        """Run the op on the storages, some arguments changed, and return its results: tensors, not `PaddedValue`."""
        given = changed or {}
        args, kwargs = self.split({name: _dense_of(given.get(name, x)) for name, x in self.arguments.items()})
        return self.op(*args, **kwargs)

    @property
    def is_tracked(self) -> bool:
        """Return whether autograd tracks an operand."""
        return torch.is_grad_enabled() and any(x.dense.requires_grad for x in self.values)

    def sizes(self) -> TrueSizes | None:
        """The true sizes of all operands."""
        if self._merged is None or self._merged[0] is not self.values:
            self._merged = self.values, merge_sizes([x.sizes for x in self.values if x.sizes is not None])
        return self._merged[1]


def _dense_of(x: PyTree) -> PyTree:
    if type(x) is PaddedValue:
        return x.dense
    return tree_map_only(PaddedValue, _dense_of, x) if isinstance(x, tuple | list | dict) else x


def run(op: OpOverload, args: Sequence[PyTree], kwargs: Kwargs) -> PyTree:
    """Run an op that writes to no argument by its rule; arguments and results hold `PaddedValue` in place of tensors.

    Raises:
        RuleError: there is no rule.
        UnsupportedCall: there is a rule, which doesn't cover this call.
    """
    return run_call(PaddedCall(op, args, kwargs))


def run_call(call: PaddedCall) -> PyTree:
    """Run the rule for a call; see `run`. Lazy storages record the ops that the rule calls."""
    if any(type(x.dense) in LAZY_TYPES for x in call.values):
        with overrides_enabled():
            return _run_rule(call)
    return _run_rule(call)


def _run_rule(call: PaddedCall) -> PyTree:
    op = call.op
    if not any(x.padded_dims for x in call.values) and not tree_has(PaddedSize, call.arguments):
        out = tree_map_only(Tensor, unpadded_value, call.dense())
        return _mark_views(out, call) if op_class(op) is OpClass.VIEW else out
    rule = table.resolved.get(op) or table.lookup(op)
    trackers = [x.tracker for x in call.values if x.tracker is not None]
    for tracker in trackers:
        tracker.uses += 1
    try:
        results = rule(call)
    except ScatteredDim as error:
        return run_call(_with_regrouped(call, error))
    except RuleError as error:
        if str(error).startswith(_REFUSED):
            raise
        kind = type(error) if isinstance(error, UnsupportedCall) else UnsupportedCall
        raise refuse(call, str(error), kind) from error
    for lines in _observers:
        lines.append(table.explain(op, call.is_across))
    is_view = op_class(op) is OpClass.VIEW
    if trackers:
        # An operand that is returned is a new value to the caller.
        results = tree_map_only(
            PaddedValue, lambda x: replace(x, tracker=None) if x.tracker in trackers else x, results
        )
        if is_view:
            results = _track_view_gradients(results, call)
    return _mark_views(results, call) if is_view else results


def _with_regrouped(call: PaddedCall, scattered: ScatteredDim) -> PaddedCall:
    """Return a call whose rule found valid positions scattered, with that operand copied to where they lie as asked."""
    x = scattered.value
    if not any(value is x for value in call.values):
        raise refuse(call, str(scattered))
    try:
        new = with_factors(x, scattered.dim, scattered.factors)
    except UnsupportedCall as error:
        raise refuse(call, f"{scattered}, and {error}") from error
    arguments = tree_map_only(PaddedValue, lambda value: new if value is x else value, call.arguments)
    return PaddedCall(call.op, (), arguments)


def _track_view_gradients(results: PyTree, call: PaddedCall) -> PyTree:
    """Track the gradients of views, whose padding holds nothing but the operand's padding."""
    if any(x.shape[d] == 1 for x in call.values for d in x.padded_dims):
        return results
    results = tree_map_only(PaddedValue, lambda x: x if x.tracker is not None else x.gradient_tracked(), results)
    for x in call.values:
        x.gradient_is_zero_if(*tree_find(PaddedValue, results))
    return results


def _mark_views(results: PyTree, call: PaddedCall) -> PyTree:
    """Mark the results of a view op as aliases or copies, which decides whether they can be written to."""
    copied = any(x.view == "copy" for x in call.values)
    return tree_map_only(PaddedValue, lambda x: x.as_view("copy" if copied or x.view == "copy" else "alias"), results)


def apply(op: OpOverload, *args: PyTree, **kwargs: PyTree) -> PaddedValue:
    """Run an op that has a single result by its rule; called as the op is."""
    out: PaddedValue = run(op, args, kwargs)
    return out


def refuse(call: PaddedCall, reason: str, kind: type[UnsupportedCall] = UnsupportedCall) -> UnsupportedCall:
    """Return the exception for a call that a rule doesn't cover, with the reason."""
    dims = sorted({str(factor.size) for x in call.values for d in x.padded_dims for factor in x.dims[d]})
    name = f"{call.op.namespace}.{overload_name(call.op)}"
    return kind(f"{_REFUSED} {name} (class {op_class(call.op).value}) padded on {', '.join(dims)}: {reason}")


def require_size(call: PaddedCall, sizes: TrueSizes | None, size: Size, least: int) -> None:
    """Refuse a call if the host knows that a size is below the least that torch takes, in any row of a ragged batch.

    It then runs on the unpadded data, where torch raises its error. The sizes that a graph's program needs are noted,
    and compared before each replay (`SizeConditions`).
    """
    if sizes is not None and not sizes.allow(size, least):
        raise UnsupportedCall(f"a size of {size} is below {least}")


def require_elements(call: PaddedCall, x: PaddedValue, reduced: Sequence[int]) -> None:
    """Refuse a reduction without an identity over no elements.

    A row of a ragged batch that alone has no elements gives the neutral element, or NaN.
    """
    for d in filter(x.is_padded, reduced):
        size = size_of(x.dims[d])
        if x.sizes is None or not x.sizes.differs_by_row(size):
            require_size(call, x.sizes, size, 1)
        elif set(known_sizes(x, d)) == {0}:
            raise UnsupportedCall(f"dim {d} has no elements")
