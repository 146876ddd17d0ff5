"""The functions that act on each stored value alone, so that they may run on one flat arena of many tensors.

Between the tensors of an arena lie gaps of a few unused values. A function belongs here when the values in a gap can
change neither a result nor whether an error is raised: the pointwise ops of the class table, with few exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch._ops import OpOverload

from subtensors.dispatch.ops.op_classes import OpClass, op_class

# Pointwise ops that can't run on an arena.
_UNFIT = {
    "mvlgamma": "checks the range of its values",
    "special_multigammaln": "checks the range of its values",
    "max": "a reduction unless it has two operands; maximum is the pointwise one",
    "min": "a reduction unless it has two operands; minimum is the pointwise one",
    "floor_divide": "an integer division by the zero of a gap raises",
    "fmod": "an integer division by the zero of a gap raises",
    "remainder": "an integer division by the zero of a gap raises",
}

# Ops of other classes, and functions that are no aten ops: each value keeps its place, or is made there.
_IN_PLACE = frozenset(
    """
    zeros_like ones_like full_like empty_like detach alias lift_fresh positive
    to float double half bfloat16 int long bool short cpu cuda type_as
    """.split()
)

_OPERATORS = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__rsub__": "rsub", "__rdiv__": "reciprocal", "__rpow__": "pow",
    "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
}  # fmt: skip

# Options that make a function read strides, draw random numbers, divide integers or start an autograd graph.
UNSUPPORTED_OPTIONS = {"memory_format", "layout", "generator", "rounding_mode", "pin_memory", "requires_grad"}


@cache
def acts_on_values(func: Callable[..., object]) -> bool:
    """Return whether a torch function or method acts on each value alone, as `torch.add` does."""
    name = getattr(func, "__name__", "")
    if any(getattr(owner, name, None) is func for owner in (torch.Tensor, torch, torch.nn.functional)):
        return _packet_acts_on_values(_OPERATORS.get(name, name))
    if name.startswith("special_") and getattr(torch.special, name[8:], None) is func:
        return _packet_acts_on_values(name) or _packet_acts_on_values(name[8:])
    return False


@cache
def overload_acts_on_values(overload: OpOverload) -> bool:
    """Return whether an aten overload acts on each value alone."""
    name = overload._schema.name.split("::")[-1]
    bare = name.rstrip("_") or name
    return bare not in _UNFIT and (bare in _IN_PLACE or op_class(overload) is OpClass.POINTWISE)


@cache
def _packet_acts_on_values(name: str) -> bool:
    if name.rstrip("_") in _IN_PLACE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    # Private functions have conventions of their own; the names of operators only look private.
    is_private = name.startswith("_") and not name.startswith("__")
    if is_private or not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = [getattr(packet, o) for o in packet.overloads()]
    return any(isinstance(o, OpOverload) and overload_acts_on_values(o) for o in overloads)
