"""Functions of torch that are one op: their rule is run at once.

Any other call goes through torch's dispatcher, which says what ops it is made of. To get there and back every tensor is
put into a shell and taken out again, for which the host takes longer than for the op. What these functions are made of
is known, where their arguments are of the plain kinds that the op takes; and with autocast and every mode off, nobody
between the function and the rule has a say in it.
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
from subtensors.dispatch.padded.padded_value import PaddedValue, plain
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
"""Functions by the op that they are, whose arguments theirs are, the tensor perhaps by another name."""

OP_OF_SIZES: dict[Callable[..., Any], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    Tensor.permute: aten.permute.default,
    Tensor.expand: aten.expand.default,
}
"""Those that also take a tuple as so many arguments."""

OP_UNLESS_IN_PLACE: dict[Callable[..., Any], OpOverload] = {
    functional.relu: aten.relu.default,
    functional.silu: aten.silu.default,
}
"""Those that can be told to write to their argument."""


def _drops_nothing(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


IDENTITY_CALLS: dict[Callable[..., Any], Callable[..., bool]] = {functional.dropout: _drops_nothing}
"""Functions that give their first argument back, and when."""

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
"""The types of arguments that a schema's may be given as, without torch having to choose."""


def directly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives by the rule of the op that it is; NotImplemented where it may be something else."""
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
        return plain(x) if kind in PLAIN_TYPES else x

    # A view that is behind its whole is taken again here, by a call of its own.
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
    """Are the arguments such that torch can only mean this op?"""
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
    """What each argument may be, by position and by name; how many have to be given by position."""
    arguments = schema_of(op).arguments
    named = {a.name: _kinds(a.name, str(a.type)) for a in arguments}
    positional = [named[a.name] for a in arguments if not a.kwarg_only]
    return positional, named, sum(not a.has_default_value() for a in arguments)


def _kinds(name: str, written: str) -> Kinds:
    """Those of an argument whose type is written so in its schema."""
    whole = written.removeprefix("Optional[").removesuffix("]") if written.startswith("Optional[") else written
    kinds = _KINDS.get(whole, frozenset())
    if whole == "Tensor":
        tensors: Kinds = frozenset([PaddedTensor, *PLAIN_TYPES])
        kinds = tensors | _NUMBER if name == "other" else tensors
    return kinds if whole is written else kinds | _NONE
