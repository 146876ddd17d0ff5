"""The lookup of the rule for a call on padded values; rules call each other through `apply`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class, overload_name
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.dispatch.ops.tree import tree_find, tree_map_only
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes, together
from subtensors.dispatch.torch_internals.ops import schema_of

table = RuleTable("PaddedTensor")
"""Rules take the op, then its arguments by their schema's names with `PaddedValue` in place of tensors."""

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
    """Return whether anything records which rules run."""
    return bool(_observers)


class PaddedCall:
    """One call of an overload, its arguments by name.

    Args:
        op: the overload.
        args, kwargs: as it was called, with `PaddedValue` in place of tensors.
    """

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.unchanged: Any = None
        """What the op gave when it was run on the operands' storages as they are."""
        names, defaults, self._positional = _parameters(op)
        self.named: dict[str, Any] = dict(zip(names, args, strict=False))
        for name in names[len(args) :]:
            if name in kwargs:
                self.named[name] = kwargs[name]
            elif name in defaults:
                self.named[name] = defaults[name]
            else:
                raise TypeError(f"{op} needs {name}")
        self.values: list[PaddedValue] = tree_find(PaddedValue, self.named)
        """The tensors among the arguments."""

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or a default where the overload has none of this name."""
        return self.named.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def replace(self, name: str, value: Any) -> None:
        """Go on as if this had been given for an argument."""
        self.named[name] = value
        self.values = tree_find(PaddedValue, self.named)

    def dense(self, changed: Mapping[str, Any] | None = None) -> Any:
        """Run the op on the storage.

        Args:
            changed: arguments to give it instead of those of the call.

        Returns:
            What the op gives: tensors, not `PaddedValue`.
        """
        given = self.named if not changed else {name: changed.get(name, x) for name, x in self.named.items()}
        dense = tree_map_only(PaddedValue, _dense_of, list(given.values()))
        count = self._positional
        out = self.op(*dense[:count], **dict(zip([*given][count:], dense[count:], strict=True)))
        if not changed or all(map(_is_own, self.named.values(), dense)):
            self.unchanged = out
        return out

    def sizes(self) -> TrueSizes | None:
        """The true sizes of all operands."""
        return together([x.sizes for x in self.values if x.sizes is not None])


@functools.cache
def _parameters(op: OpOverload) -> tuple[list[str], dict[str, Any], int]:
    """The names of an op's arguments, the defaults of those that have one, and how many of them have a position."""
    arguments = schema_of(op).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return [a.name for a in arguments], defaults, sum(not a.kwarg_only for a in arguments)


def _dense_of(x: PaddedValue) -> Tensor:
    return x.dense


def _is_own(x: Any, dense: Any) -> bool:
    return dense is (x.dense if isinstance(x, PaddedValue) else x)


Rule = Callable[[PaddedCall], Any]


def run(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op on padded values by its rule.

    Args:
        op: the overload; one that writes to no argument.
        args, kwargs: its arguments, with `PaddedValue` in place of every tensor.

    Returns:
        What the op returns, with `PaddedValue` in place of every tensor.

    Raises:
        RuleError: there is no rule.
        Inexpressible: there is a rule, which doesn't cover this call.
    """
    return run_call(PaddedCall(op, args, kwargs))


def run_call(call: PaddedCall) -> Any:
    """`run`, of a call."""
    op = call.op
    if not any(x.padded_dims for x in call.values):
        out = _wrapped(call.dense())
        return _as_view(out, call) if op_class(op) is OpClass.VIEW else out
    rule = table.lookup(op)
    asked = [x.arrival for x in call.values if x.arrival is not None]
    for arrival in asked:
        arrival.uses += 1
    try:
        answer = rule(call)
    except RuleError as refusal:
        if str(refusal).startswith(_REFUSED):
            raise
        raise refuse(call, str(refusal)) from refusal
    for lines in _observers:
        lines.append(table.explain(op))
    is_view = op_class(op) is OpClass.VIEW
    if asked:
        # An operand that comes back is another value from here on.
        answer = tree_map_only(PaddedValue, lambda x: replace(x, arrival=None) if x.arrival in asked else x, answer)
        if is_view:
            answer = _sent_as_they_come(answer, call)
    return _as_view(answer, call) if is_view else answer


def _sent_as_they_come(out: Any, call: PaddedCall) -> Any:
    """The results of a view, whose padding is the only one that padding of the operand went to."""
    if any(x.shape[d] == 1 for x in call.values for d in x.padded_dims):
        return out
    out = tree_map_only(PaddedValue, lambda x: x if x.arrival is not None else x.gradient_noted(), out)
    for x in call.values:
        x.sends_zero(*tree_find(PaddedValue, out))
    return out


def _as_view(out: Any, call: PaddedCall) -> Any:
    """The results of a view, which say so: whoever writes to one writes to what it views, or must not."""
    copied = any(x.view == "copy" for x in call.values)
    return tree_map_only(PaddedValue, lambda x: x.as_view("copy" if copied or x.view == "copy" else "alias"), out)


def apply(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`run`, called as the op is."""
    return run(op, args, kwargs)


def _wrapped(out: Any) -> Any:
    from subtensors.dispatch.padded.padded_value import plain

    return tree_map_only(Tensor, plain, out)


def refuse(call: PaddedCall, why: str, kind: type[UnsupportedCall] = UnsupportedCall) -> UnsupportedCall:
    """The exception for a call that a rule doesn't cover, or not where it is padded."""
    dims = sorted({str(size) for x in call.values for d in x.padded_dims for size in [*map(_size, x.dims[d])]})
    name = f"{call.op.namespace}.{overload_name(call.op)}"
    return kind(f"{_REFUSED} {name} (class {op_class(call.op).value}) padded on {', '.join(dims)}: {why}")


def _size(factor: Any) -> str:
    return str(factor.size)
