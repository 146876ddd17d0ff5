"""A fast path for torch functions that are a single op: their rule runs directly.

Any other call goes through torch's dispatcher, which decomposes it into ops. For that every tensor is put into a shell
and taken out again, which takes the host longer than the op itself. These functions are known to be one op where their
arguments are of the plain types that the op takes; and with autocast and every mode off, nothing between the function
and the rule can change the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.interpreter import PaddedCall
from subtensors.dispatch.padded.padded_value import PaddedValue, unpadded_value
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.dispatch.torch_internals.ops import schema_of
from subtensors.padded.autograd import followed, wrapped
from subtensors.padded.outcome_cache import seen
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.views import remember

aten = torch.ops.aten

OP_OF: dict[Callable[..., Any], OpOverload] = {
    functional.linear: aten.linear.default,
    functional.layer_norm: aten.layer_norm.default,
    functional.gelu: aten.gelu.default,
    functional.scaled_dot_product_attention: aten.scaled_dot_product_attention.default,
    Tensor.transpose: aten.transpose.int,
    Tensor.unsqueeze: aten.unsqueeze.default,
    Tensor.contiguous: aten.contiguous.default,
    torch.addmm: aten.addmm.default,
    **dict.fromkeys([torch.matmul, Tensor.matmul], aten.matmul.default),
    **dict.fromkeys([torch.add, Tensor.add], aten.add.Tensor),
    **dict.fromkeys([torch.sub, Tensor.sub], aten.sub.Tensor),
    **dict.fromkeys([torch.mul, Tensor.mul], aten.mul.Tensor),
    **dict.fromkeys([torch.pow, Tensor.pow, Tensor.__pow__], aten.pow.Tensor_Scalar),
    **dict.fromkeys([torch.neg, Tensor.neg, Tensor.__neg__], aten.neg.default),
    **dict.fromkeys([torch.relu, Tensor.relu], aten.relu.default),
    **dict.fromkeys([torch.tanh, Tensor.tanh], aten.tanh.default),
    **dict.fromkeys([torch.sigmoid, Tensor.sigmoid], aten.sigmoid.default),
    **dict.fromkeys([torch.rsqrt, Tensor.rsqrt], aten.rsqrt.default),
}
"""The single op of each function; their arguments agree, but for the name of the tensor."""

OP_OF_SIZES: dict[Callable[..., Any], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    Tensor.permute: aten.permute.default,
    Tensor.expand: aten.expand.default,
}
"""The same for functions that also take a tuple as separate arguments."""

OP_UNLESS_IN_PLACE: dict[Callable[..., Any], OpOverload] = {
    functional.relu: aten.relu.default,
    functional.silu: aten.silu.default,
}
"""The same for functions that can be told to write to their argument."""


def _drops_nothing(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


IDENTITY_CALLS: dict[Callable[..., Any], Callable[..., bool]] = {functional.dropout: _drops_nothing}
"""Functions that may return their first argument, each with the condition under which they do."""

Kinds = frozenset[type]

_NUMBER: Kinds = frozenset([int, float])
_SEQUENCE: Kinds = frozenset([tuple, list, torch.Size])
_NONE: Kinds = frozenset([type(None)])
_KINDS: dict[str, Kinds] = {
    "int": frozenset([int]),
    "float": _NUMBER,
    "number": _NUMBER,
    "bool": frozenset([bool]),
    "str": frozenset([str]),
    "List[int]": _SEQUENCE,
}
"""The Python types that an argument of each schema type may have without torch having to choose an overload."""


def directly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call by the rule of its single op; return NotImplemented where it may be something else."""
    op = OP_OF.get(func)
    if op is not None:
        pass
    elif (op := OP_OF_SIZES.get(func)) is not None:
        if len(args) > 1 and type(args[1]) is int:
            args = args[0], args[1:]
    elif (op := OP_UNLESS_IN_PLACE.get(func)) is not None:
        if kwargs.get("inplace") is False:
            kwargs = {name: x for name, x in kwargs.items() if name != "inplace"}
    elif func in IDENTITY_CALLS and IDENTITY_CALLS[func](*args, **kwargs):
        return args[0]
    else:
        return NotImplemented
    if not _takes(op, args, kwargs) or dispatcher.is_intercepted() or dispatcher.is_transforming():
        return NotImplemented
    asked = seen(op, args, kwargs)
    answer = asked.answer() if asked is not None else None
    if answer is not None:
        return answer
    values: dict[int, PaddedValue] = {}

    def inner(x: Any) -> Any:
        kind = type(x)
        if kind is PaddedTensor:
            if id(x) not in values:
                values[id(x)] = followed(x)
            return values[id(x)]
        return unpadded_value(x) if kind in PLAIN_TYPES else x

    # A view that is older than the last write to its base is retaken here, by a call of its own.
    inner_args, inner_kwargs = [*map(inner, args)], {name: inner(x) for name, x in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        call = PaddedCall(op, inner_args, inner_kwargs)
        out: PaddedValue = rules.run_call(call)
    if asked is not None:
        asked.note(call, out)
    result = wrapped(out)
    is_plain_view = out.view == "alias" and not isinstance(result, PaddedTensor)
    remember(func, args, kwargs, result, [result] if is_plain_view else [])
    return result


def _takes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments are of types for which torch can only choose this op."""
    positional, named, least = _parameters(op)
    if not least <= len(args) <= len(positional):
        return False
    for x, kinds in zip(args, positional, strict=False):
        kind = type(x)
        if kind not in kinds or (kind in _SEQUENCE and not all(type(n) is int for n in x)):
            return False
    return all(type(x) in named.get(name, ()) and type(x) not in _SEQUENCE for name, x in kwargs.items())


@functools.cache
def _parameters(op: OpOverload) -> tuple[list[Kinds], dict[str, Kinds], int]:
    """The types that each argument may have, by position and by name; the number that must be given by position."""
    arguments = schema_of(op).arguments
    named = {a.name: _kinds(a.name, str(a.type)) for a in arguments}
    positional = [named[a.name] for a in arguments if not a.kwarg_only]
    return positional, named, sum(not a.has_default_value() for a in arguments)


def _kinds(name: str, written: str) -> Kinds:
    """The Python types that an argument of this schema type may have."""
    whole = written.removeprefix("Optional[").removesuffix("]") if written.startswith("Optional[") else written
    kinds = _KINDS.get(whole, frozenset())
    if whole == "Tensor":
        tensors: Kinds = frozenset([PaddedTensor, *PLAIN_TYPES])
        kinds = tensors | _NUMBER if name == "other" else tensors
    return kinds if whole is written else kinds | _NONE
