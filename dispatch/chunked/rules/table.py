"""The rule table of chunked values, and how an op is recorded by it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from subtensors.dispatch.chunked.bound_call import BoundCall
from subtensors.dispatch.chunked.lazy_graph import NeedsMaterialize, constant, emit, infer
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import OpClass, op_class
from subtensors.dispatch.ops.rule_table import RuleTable
from subtensors.dispatch.ops.tree import tree_map, tree_tensors

RULES = RuleTable("ChunkedTensor", dict.fromkeys(OpClass, "realize() it first, which is what is done otherwise"))


def record(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Record an op on values and tensors.

    Args:
        op: a functional aten overload.
        args, kwargs: its arguments; tensors are constants of the region.

    Returns:
        the nest of its results, with values in place of tensors.

    Raises:
        NeedsMaterialize: the op has no rule, or its rule doesn't hold for these arguments.
    """
    args, kwargs = tree_map((args, kwargs), lambda x: constant(x) if isinstance(x, Tensor) else x)
    call = BoundCall(op, args, kwargs)
    if not call.chunked and op_class(op) is not OpClass.RANDOM:
        metas = infer(op, args, kwargs)
        return emit(op, args, kwargs, metas, [None] * len(tree_tensors(metas)), None)
    try:
        rule = RULES.lookup(op)
    except RuleError as error:
        raise NeedsMaterialize(op, str(error)) from None
    return rule(call)
