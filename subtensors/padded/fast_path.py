"""A fast path for torch functions that are a single op: their rule, or a cached outcome of it, runs directly.

Any other call goes through torch's dispatcher, which decomposes it into ops. For that every tensor is replaced by a
placeholder and back, which takes the host longer than the op itself. These functions are known to be one op where their
arguments are of the plain types that the op takes; and with autocast and every mode off, nothing between the function
and the rule can change the call.

A rule looks at dims, fills and dtypes, and often finds nothing to fill or to mask. If it only ran the op on its
operands' storages, a call with operands of the same dims, fills and dtypes does the same: then its `CachedOutcome` is
reused, and the call is the op and a new wrapper. That holds for ops whose rules depend on nothing else, such as true
sizes known on the host, and where autograd tracks nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from subtensors.dispatch.ops.plain_types import PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded import rules
from subtensors.dispatch.padded.interpreter import PaddedCall, is_observed
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import Fill, PaddedValue, unpadded_value
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.dispatch.torch_internals.ops import schema_of
from subtensors.padded.autograd import unwrap_with_grad, wrap_result
from subtensors.padded.padded_tensor import PaddedTensor, fill_of, make_padded

aten = torch.ops.aten

OP_OF: dict[Callable[..., PyTree], OpOverload] = {
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

OP_OF_SIZES: dict[Callable[..., PyTree], OpOverload] = {
    Tensor.view: aten.view.default,
    Tensor.reshape: aten.reshape.default,
    Tensor.permute: aten.permute.default,
    Tensor.expand: aten.expand.default,
}
"""The same for functions that also take a tuple as separate arguments."""

OP_UNLESS_IN_PLACE: dict[Callable[..., PyTree], OpOverload] = {
    functional.relu: aten.relu.default,
    functional.silu: aten.silu.default,
}
"""The same for functions with an argument `inplace`."""


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


IDENTITY_CALLS: dict[Callable[..., PyTree], Callable[..., bool]] = {functional.dropout: _drops_nothing}
"""Functions that may return their first argument, each with the condition under which they do."""

FUNCTIONS = frozenset([*OP_OF, *OP_OF_SIZES, *OP_UNLESS_IN_PLACE, *IDENTITY_CALLS])
"""The functions for which `try_fast_path` may have an answer."""

MAX_OUTCOMES = 4096
"""The most calls whose outcomes are cached."""

Kinds = frozenset[type]

_INTS: Kinds = frozenset([int, PaddedSize])
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


def try_fast_path(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a call by the rule of its single op; return NotImplemented where it may be something else."""
    op = OP_OF.get(func)
    if op is not None:
        pass
    elif (op := OP_OF_SIZES.get(func)) is not None:
        if len(args) > 1 and type(args[1]) in _INTS:
            args = args[0], args[1:]
    elif (op := OP_UNLESS_IN_PLACE.get(func)) is not None:
        if kwargs.get("inplace") is False:
            kwargs = {name: x for name, x in kwargs.items() if name != "inplace"}
    elif func in IDENTITY_CALLS and IDENTITY_CALLS[func](*args, **kwargs):
        return args[0]
    else:
        return NotImplemented
    if not _accepts(op, args, kwargs) or dispatcher.is_intercepted() or is_transforming():
        return NotImplemented
    key = outcome_key(op, args, kwargs)
    known = _outcomes.get(key.values) if key is not None else None
    if key is not None and known is not None:
        return make_padded(PaddedValue(op(*key.operands), known.dims, key.sizes, known.fill, known.view))
    values: dict[int, PaddedValue] = {}

    def inner(x: PyTree) -> PyTree:
        kind = type(x)
        if kind is PaddedTensor:
            if id(x) not in values:
                values[id(x)] = unwrap_with_grad(x)
            return values[id(x)]
        return unpadded_value(x) if kind in PLAIN_TYPES else x

    # A view that is older than the last write to its base is retaken here, by a call of its own.
    inner_args, inner_kwargs = [*map(inner, args)], {name: inner(x) for name, x in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        call = PaddedCall(op, inner_args, inner_kwargs)
        out: PaddedValue = rules.run_call(call)
    if key is not None:
        _cache_outcome(key, call, out)
    return wrap_result(out, func, args, kwargs)


def _accepts(op: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Return whether the arguments are of types for which torch can only choose this op."""
    positional, named, required = _parameters(op)
    if not required <= len(args) <= len(positional):
        return False
    for x, kinds in zip(args, positional, strict=False):
        kind = type(x)
        if kind not in kinds or (kind in _SEQUENCE and not all(type(n) in _INTS for n in x)):
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
    required = written.removeprefix("Optional[").removesuffix("]") if written.startswith("Optional[") else written
    kinds = _KINDS.get(required, frozenset())
    if required == "Tensor":
        tensors: Kinds = frozenset([PaddedTensor, *PLAIN_TYPES])
        kinds = tensors | _NUMBER if name == "other" else tensors
    return kinds if required is written else kinds | _NONE


class OutcomeKey(NamedTuple):
    """The part of a call that its outcome depends on, and the operands.

    Args:
        values: equal for calls of one outcome.
        operands: the arguments, with storages in place of PaddedTensors.
        sizes: the true sizes of all its padded operands.
    """

    values: tuple[object, ...]
    operands: list[PyTree]
    sizes: TrueSizes


class CachedOutcome(NamedTuple):
    """The properties of a result other than its storage; fields as in `PaddedValue`."""

    dims: tuple[Factors, ...]
    fill: Fill | None
    view: Literal["", "alias", "copy"]


_outcomes: dict[tuple[object, ...], CachedOutcome] = {}


def outcome_key(op: OpOverload, args: Args, kwargs: Kwargs) -> OutcomeKey | None:
    """The key of a call in the cache of outcomes; None where its outcome may depend on more."""
    if kwargs or torch.is_grad_enabled() or is_observed():
        return None
    sizes: TrueSizes | None = None
    values: list[object] = [op]
    operands: list[PyTree] = []
    for x in args:
        kind = type(x)
        if kind is PaddedTensor:
            if x._view_source is not None or x._sizes is None or (sizes is not None and x._sizes is not sizes):
                return None
            sizes, dense = x._sizes, x._dense
            values += (x._dims, dense.dtype, fill_of(x), x._view)
            operands.append(dense)
        elif kind in PLAIN_TYPES:
            values += (x.shape, x.dtype)
            operands.append(x)
        else:
            values += (kind, tuple([n.text if type(n) is PaddedSize else n for n in x]) if kind in _SEQUENCE else x)
            # Torch reads plain ints much faster.
            operands.append([*map(int, x)] if kind in _SEQUENCE else x)
    if sizes is None or sizes.rows is not None:
        return None
    # Rules compare sizes for every value up to their buckets.
    return OutcomeKey((sizes.key, *values), operands, sizes)


def _cache_outcome(key: OutcomeKey, call: PaddedCall, out: PaddedValue) -> None:
    """Cache the outcome of a call if its rule only ran the op."""
    if call.unchanged is out.dense and out.padded_dims and out.sizes is key.sizes and out.view != "copy":
        if len(_outcomes) >= MAX_OUTCOMES:
            _outcomes.clear()
        _outcomes[key.values] = CachedOutcome(out.dims, out.fill, out.view)
