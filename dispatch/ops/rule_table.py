"""One registration mechanism for every tensor type: overload, then op, then class, then refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class, overload_name

Key = OpOverload | OpOverloadPacket | OpClass
Rule = Callable[..., Any]
RuleT = TypeVar("RuleT", bound=Rule)

# What to do when a type has no rule, where the type doesn't say it better.
ADVICE: Mapping[OpClass, str] = {
    OpClass.POINTWISE: "call it on the plain tensor values",
    OpClass.REDUCTION: "reduce the plain tensor values",
    OpClass.VIEW: "take the view before wrapping the values, or of the plain tensor after",
    OpClass.CONTRACTION: "multiply the plain tensor values",
    OpClass.FACTORY: "make the tensor from explicit sizes",
    OpClass.RANDOM: "draw the numbers as a plain tensor and wrap them",
    OpClass.COPY: "rearrange the values before wrapping them",
    OpClass.NORMALISATION: "normalise the plain tensor values",
    OpClass.SCAN: "scan the plain tensor values",
    OpClass.SORT_SELECT: "sort or select from the plain tensor values",
    OpClass.SCATTER_GATHER: "index the plain tensor values",
    OpClass.OTHER: "call it on the plain tensor values, or register a rule for this very op",
}


class RuleTable:
    """The rules of one tensor type: what it does when it meets an op.

    A key is an overload (`aten.add.Tensor`), an op with all its overloads (`aten.add`) or a class of ops
    (`OpClass.POINTWISE`). The nearest key wins: overload, then op, then class.

    Args:
        type_name: the type, as messages name it.
        advice: for some classes, what to do when there is no rule; `ADVICE` says it for the others.

    Example:
        >>> import torch
        >>> table = RuleTable("Loud")
        >>> @table.register(OpClass.POINTWISE)
        ... def shout(op, *args):
        ...     return f"{op}!"
        >>> table.lookup(torch.ops.aten.add.Tensor)("add")
        'add!'
        >>> table.explain(torch.ops.aten.add.Tensor)
        'aten.add.Tensor on a Loud: shout, registered for every pointwise op'
    """

    def __init__(self, type_name: str, advice: Mapping[OpClass, str] | None = None) -> None:
        self.type_name = type_name
        self.advice = {**ADVICE, **(advice or {})}
        self._rules: dict[Key, Rule] = {}
        self.resolved: dict[OpOverload, Rule] = {}
        """The rule of each overload that was looked up before."""

    def register(self, *keys: Key) -> Callable[[RuleT], RuleT]:
        """Register the decorated function for one or more keys.

        Args:
            keys: overloads, ops or classes; at least one.

        Returns:
            A decorator that registers its function and returns it unchanged.

        Raises:
            TypeError: a key of another kind, or none.
            ValueError: a key that has a rule already; the message names both functions, and nothing is registered.

        Example:
            >>> table = RuleTable("Loud")
            >>> @table.register(OpClass.VIEW)
            ... def look(op): ...
            >>> @table.register(OpClass.VIEW)
            ... def stare(op): ...
            Traceback (most recent call last):
            ValueError: Loud: every view op has the rule look already, so stare can't be registered
        """
        if not keys:
            raise TypeError("register needs at least one key: an overload, an op or an OpClass")
        for key in keys:
            if not isinstance(key, Key):
                raise TypeError(f"a rule's key is an OpOverload, an OpOverloadPacket or an OpClass, not {key!r}")

        def add(rule: RuleT) -> RuleT:
            for position, key in enumerate(keys):
                owner = rule if key in keys[:position] else self._rules.get(key)
                if owner is not None:
                    raise ValueError(
                        f"{self.type_name}: {_described(key)} has the rule {_called(owner)} already, "
                        f"so {_called(rule)} can't be registered"
                    )
            self._rules.update(dict.fromkeys(keys, rule))
            self.resolved.clear()
            return rule

        return add

    def lookup(self, op: OpOverload) -> Rule:
        """The rule for an op.

        Args:
            op: the overload that was called.

        Returns:
            The function registered for the overload, else for its op, else for its class.

        Raises:
            RuleError: there is none; the message names the op, its class, the type and what to do instead.

        Example:
            >>> import torch
            >>> RuleTable("Loud").lookup(torch.ops.aten.cumsum.default)
            Traceback (most recent call last):
            subtensors.RuleError: Loud has no rule for aten.cumsum.default (class scan): scan the \
plain tensor values
        """
        rule = self.resolved.get(op)
        if rule is None:
            key = self._matching_key(op)
            if key is None:
                raise RuleError(self._refusal(op))
            rule = self.resolved[op] = self._rules[key]
        return rule

    def explain(self, op: OpOverload) -> str:
        """Explain which rule an op gets, and by which key.

        Args:
            op: any overload.

        Returns:
            A line naming the rule and the key that matched, or the message of the refusal.

        Example:
            >>> import torch
            >>> RuleTable("Loud").explain(torch.ops.aten.sort.default)
            'Loud has no rule for aten.sort.default (class sort_select): sort or select from the plain tensor values'
        """
        key = self._matching_key(op)
        if key is None:
            return self._refusal(op)
        return f"{_qualified(op)} on a {self.type_name}: {_called(self._rules[key])}, registered for {_described(key)}"

    def _matching_key(self, op: OpOverload) -> Key | None:
        keys: tuple[Key, ...] = (op, op.overloadpacket, op_class(op))
        return next((key for key in keys if key in self._rules), None)

    def _refusal(self, op: OpOverload) -> str:
        klass = op_class(op)
        return f"{self.type_name} has no rule for {_qualified(op)} (class {klass.value}): {self.advice[klass]}"


def _qualified(op: OpOverload) -> str:
    return f"{op.namespace}.{overload_name(op)}"


def _described(key: Key) -> str:
    if isinstance(key, OpClass):
        return f"every {key.value} op"
    return _qualified(key) if isinstance(key, OpOverload) else f"every overload of {key}"


def _called(rule: Rule) -> str:
    # An object with __call__ has no name of its own.
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))
