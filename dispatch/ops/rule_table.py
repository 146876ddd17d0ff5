"""One rule table per tensor type, with one lookup for all: overload, op, class, dimension map, refusal.

A tensor type must say what each of some two thousand aten overloads does to it. Most differ in nothing that matters to
the type: `exp`, `mul` and `where` all compute `out[i]` from the operands at `i`. So every overload has a class
(`op_classes.py`), an algebraic property that tests prove on values, and a rule is written for the class. Where one op,
or one overload of it, is special, it gets a rule of its own, and the most specific rule wins:

    x.add_(1), x of a type with rules in `table`

    table.lookup(aten.add_.Tensor)
      1. aten.add_.Tensor     the overload     special to one signature, such as `out=`
      2. aten.add_            the op           special to one op, in all its overloads
      3. sample_dims.loss     its map          right for every op with the dimension map of this function
      4. OpClass.POINTWISE    its class        right for every op of the class
      5. DimMap               any map          right for every op whose dims have labels (`dims.py`)
      6. RuleError            refusal          names the op, its class, the type, and what to do instead

The rule for `DimMap` is a type's interpreter of dimension maps. It serves all calls that leave the type's own dims
alone; for the others the table has rules that were registered with `across=True`, found by overload, op, map or class.

All types share this lookup. A rule takes a call, and after it any of the op's arguments by name:

    @table.register(aten.flip, across=True)
    def flip(call: PaddedCall, x: PaddedValue, dims: list[int]) -> PaddedValue: ...

To register a key twice is an error, so the order of imports never decides which rule runs.
To have no rule is an error too, which a type may answer with a logged fallback to plain tensors, but never silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from subtensors.dispatch.ops.bound_call import by_name
from subtensors.dispatch.ops.dims import DimMap, MapFunction, is_map, map_function
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class, overload_name
from subtensors.dispatch.ops.tree import PyTree

Key = OpOverload | OpOverloadPacket | OpClass | MapFunction | type[DimMap]
Rule = Callable[..., PyTree]
RuleT = TypeVar("RuleT", bound=Rule)

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
"""Advice for a call that a type has no rule for, unless the type gives advice of its own."""


class RuleTable:
    """The rules of one tensor type, by op.

    A key is an overload (`aten.add.Tensor`), an op with all its overloads (`aten.add`), the function that gives some
    ops their dimension map, a class of ops (`OpClass.POINTWISE`) or `DimMap`, for every op that has a dimension map.
    The nearest key wins, in this order.

    Args:
        type_name: the type, as messages name it.
        advice: for some classes, what to do when there is no rule; `ADVICE` has the rest.

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
        self._rules: dict[tuple[Key, bool], Rule] = {}
        """The rule of each key, for calls across the type's own dims and for others."""
        self.resolved: dict[OpOverload, Rule] = {}
        """The rule of each overload that was looked up before."""
        self.resolved_across: dict[OpOverload, Rule | None] = {}
        """The same for calls across the type's own dims."""

    def register(self, *keys: Key, across: bool = False) -> Callable[[RuleT], RuleT]:
        """Register the decorated function for one or more keys.

        Args:
            keys: overloads, ops, dimension maps, classes or `DimMap`; at least one.
            across: whether the rule is for calls that combine positions of the type's own dims, by their dimension map.

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
            if not (key is DimMap or isinstance(key, OpOverload | OpOverloadPacket | OpClass) or is_map(key)):
                raise TypeError(f"a rule's key is an OpOverload, an OpOverloadPacket or an OpClass, not {key!r}")

        def add(rule: RuleT) -> RuleT:
            for position, key in enumerate(keys):
                owner = rule if key in keys[:position] else self._rules.get((key, across))
                if owner is not None:
                    raise ValueError(
                        f"{self.type_name}: {_describe_key(key)} has the rule {_rule_name(owner)} already, "
                        f"so {_rule_name(rule)} can't be registered"
                    )
            self._rules.update({(key, across): rule for key in keys})
            self.resolved.clear()
            self.resolved_across.clear()
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
            key = self.key_of(op)
            if key is None:
                raise RuleError(self._refusal(op))
            rule = self.resolved[op] = by_name(self._rules[key, False], op)
        return rule

    def lookup_across(self, op: OpOverload) -> Rule | None:
        """The rule for calls of an op that combine positions of the type's own dims; None if there is none."""
        if op not in self.resolved_across:
            key = self.key_of(op, across=True)
            self.resolved_across[op] = None if key is None else by_name(self._rules[key, True], op)
        return self.resolved_across[op]

    def key_of(self, op: OpOverload, across: bool = False) -> Key | None:
        """Return the key by which an op has its rule, or its rule across the type's dims; None if there is none."""
        found = map_function(op)
        mapped: tuple[Key, ...] = () if found is None else (found, DimMap)
        keys: tuple[Key, ...] = (op, op.overloadpacket, *mapped[:1], op_class(op), *mapped[1:])
        return next((key for key in keys if (key, across) in self._rules), None)

    def explain(self, op: OpOverload, across: bool = False) -> str:
        """Explain which rule an op gets, and by which key.

        Args:
            op: any overload.
            across: whether the call combines positions of the type's own dims.

        Returns:
            A line naming the rule and the key that matched, or the message of the refusal.

        Example:
            >>> import torch
            >>> RuleTable("Loud").explain(torch.ops.aten.sort.default)
            'Loud has no rule for aten.sort.default (class sort_select): sort or select from the plain tensor values'
        """
        key = self.key_of(op, across)
        if key is None:
            return self._refusal(op)
        rule = _rule_name(self._rules[key, across])
        where = " across its own dims" if across else ""
        return f"{_qualified(op)} on a {self.type_name}: {rule}, registered for {_describe_key(key)}{where}"

    def _refusal(self, op: OpOverload) -> str:
        cls = op_class(op)
        return f"{self.type_name} has no rule for {_qualified(op)} (class {cls.value}): {self.advice[cls]}"


def _qualified(op: OpOverload) -> str:
    return f"{op.namespace}.{overload_name(op)}"


def _describe_key(key: Key) -> str:
    if isinstance(key, OpClass):
        return f"every {key.value} op"
    if key is DimMap:
        return "every op with a dimension map"
    if is_map(key):
        return f"every op with the dimension map {key.__name__}"
    return _qualified(key) if isinstance(key, OpOverload) else f"every overload of {key}"


def _rule_name(rule: Rule) -> str:
    # An object with __call__ has no name of its own.
    return str(getattr(rule, "__qualname__", type(rule).__qualname__))
