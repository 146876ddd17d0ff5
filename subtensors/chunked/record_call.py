"""A call of torch on chunked tensors, recorded op by op, or run on materialized values where an op has no rule.

`record_call` runs the function on tensors without memory, with autograd off, so that composite functions decompose into
aten ops beneath it. Each op arrives at `handle_torch_dispatch`, which records it by the rule of its class.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from subtensors.chunked.lazy_tensor import (
    AliasRef,
    LazyTensor,
    alias_ref,
    inner_tensor,
    update_requires_grad,
    user_tensor,
)
from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import (
    LazyValue,
    NeedsMaterialize,
    constant,
    is_recording,
    leaf_value,
    recording,
    replicated,
)
from subtensors.dispatch.chunked.record import ChunkedCall
from subtensors.dispatch.chunked.rules import record
from subtensors.dispatch.chunked.sharded_head import full_tensor, gathered, is_distributed
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import functional_form, is_in_place
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_map_only
from subtensors.dispatch.torch_internals.autograd import is_transformed
from subtensors.dispatch.torch_internals.dispatcher import has_dispatch_mode, without_dispatch_modes
from subtensors.dispatch.torch_internals.ops import schema_of

aten = torch.ops.aten

_log = logging.getLogger("subtensors.chunked")

fallbacks: Counter[str] = Counter()
"""The number of times that each op had its operands materialized, for lack of a rule that applies."""

# Losses that compute on their targets alone: those ops are recorded too, since their results are as wide.
_RECORDS_TARGETS = {F.kl_div, torch.kl_div, torch.cosine_similarity, F.cosine_similarity}


def record_call(kind: type[LazyTensor], func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Call a function of torch with every op in it recorded, and evaluate those results that don't have the rows.

    Raises:
        NeedsMaterialize: an op can't be recorded.
    """
    grad = torch.is_grad_enabled()
    users: dict[int, Tensor] = {}
    borrowed: dict[int, LazyTensor] = {}

    def lower(x: Tensor) -> Tensor:
        if isinstance(x, LazyTensor):
            ref = alias_ref(x)
            users[id(ref)] = x
            return inner_tensor(kind, ref)
        is_sharded = is_distributed(x) and x.dtype.is_floating_point
        if (grad and x.requires_grad) or func in _RECORDS_TARGETS or is_sharded:
            # Ops on it inside the function must be recorded too, or its gradient would be lost there, or its rows.
            if id(x) not in borrowed:
                value = gathered(x, grad) if is_distributed(x) and is_sharded else constant(full_tensor(x))
                borrowed[id(x)] = inner_tensor(kind, AliasRef(value, borrowed=True))
                users[id(borrowed[id(x)]._ref)] = x
            return borrowed[id(x)]
        return full_tensor(x)

    inner_args, inner_kwargs = tree_map_only(Tensor, lower, (args, kwargs))
    writes = [(x, alias_ref(x).writes) for x in users.values() if isinstance(x, LazyTensor)]
    records_first = _RecordsFirst(kind) if has_dispatch_mode() else nullcontext()
    with torch.no_grad(), recording(grad), torch._C.DisableTorchFunctionSubclass(), records_first:
        out = func(*inner_args, **inner_kwargs)
    for x, count in writes:
        if alias_ref(x).writes != count:
            update_requires_grad(x)

    def lift(x: LazyTensor) -> Tensor:
        if id(x._ref) in users:
            return users[id(x._ref)]
        # A view without the rows may still be written through.
        is_plain = x._ref.value.layout is None and x._ref.base is None
        return kind.result_of(x._ref.value) if is_plain else user_tensor(kind, x._ref)

    return tree_map_only(LazyTensor, lift, out)


class _RecordsFirst(TorchDispatchMode):
    """A mode around which other modes see no op on lazy tensors: they see the ops of each chunk instead."""

    def __init__(self, kind: type[LazyTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(
        self, func: OpOverload, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        kwargs = kwargs or {}
        if not any(issubclass(t, LazyTensor) for t in types):
            return func(*args, **kwargs)
        # A number is read of the chunks' results, which is computed here.
        with nullcontext() if func is aten._local_scalar_dense.default else without_dispatch_modes():
            return handle_torch_dispatch(self._kind, func, args, kwargs)


def handle_torch_dispatch(kind: type[LazyTensor], op: OpOverload, args: Args, kwargs: Kwargs) -> PyTree:
    """Record one op, beneath autograd."""
    if not is_recording() and torch.is_grad_enabled() and not op.is_view:
        _check_no_gradient_is_lost(op, (args, kwargs))
    if is_in_place(op):
        return _record_write(op, args, kwargs)
    if op is aten._local_scalar_dense.default:
        return evaluate(args[0]._ref.value).item()
    if functional_form(op) is not op:
        raise NeedsMaterialize(op, "it writes to a tensor that it is given")
    if torch.is_inference_mode_enabled():
        # In inference mode composite ops arrive undecomposed.
        with torch._C.DisableTorchFunctionSubclass():
            decomposed = op.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    is_view, op = op.is_view, _WITHOUT_BITS.get(op, op)
    values, named = _values(args), _values(kwargs)
    try:
        results = record(op, *values, **named)
    except NeedsMaterialize as missing:
        if not is_view or op.overloadpacket is aten.as_strided:
            raise
        # A view of the replicated value may be written through; a materialized copy may not.
        results = record(op, *(replicated(v) if isinstance(v, LazyValue) else v for v in values), **named)
        log_fallback(missing)
    refs = tree_map_only(LazyValue, AliasRef, results)
    if is_view and args and isinstance(args[0], LazyTensor):
        for index, ref in enumerate(tree_find(AliasRef, refs)):
            ref.make_view_of(args[0]._ref, op, _values(args[1:]), _values(kwargs), index)
    return tree_map_only(AliasRef, lambda ref: inner_tensor(kind, ref), refs)


def _check_no_gradient_is_lost(op: OpOverload, tree: PyTree) -> None:
    """Raise RuleError for an op that another type calls on a tensor that requires grad, which it took as its memory."""
    if any(x._ref.is_of_gradients for x in tree_find(LazyTensor, tree)):
        raise RuleError(
            f"{op} on a ChunkedTensor inside a tensor of another type: its gradient would not come back; make that "
            f"tensor of realize()"
        )


# A lazy tensor has no conjugate bit, by which `resolve_conj` and `view_as_real` would tell a lazy conjugate.
_WITHOUT_BITS: dict[OpOverload, OpOverload] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def _values(tree: PyTree) -> PyTree:
    """Return a pytree with the values of lazy tensors in their place."""
    return tree_map_only(LazyTensor, lambda x: x._ref.value, tree)


def _record_write(op: OpOverload, args: Args, kwargs: Kwargs) -> LazyTensor:
    """Record an in-place op as its functional form, whose result replaces the value of the first operand."""
    functional = functional_form(op)
    target = args[0] if args else None
    if functional is None or not isinstance(target, LazyTensor):
        raise NeedsMaterialize(op, "it writes to a plain tensor")
    old = target._ref.value
    if op is aten.copy_.default:
        source = record(aten._to_copy.default, _values(args[1]), dtype=old.dtype, device=old.device)
        new = record(aten.expand.default, source, list(old.shape))
    else:
        # By name: the functional form may order its arguments differently, or lack a default.
        call = ChunkedCall(op, _values(args), _values(kwargs))
        accepted = {a.name for a in schema_of(functional).arguments}
        new = record(functional, **{name: x for name, x in call.arguments.items() if name in accepted})
    if not isinstance(new, LazyValue) or new.shape != old.shape:
        raise NeedsMaterialize(op, "it has several results, or changes sizes")
    if not torch.can_cast(new.dtype, old.dtype):
        raise RuntimeError(f"result type {new.dtype} can't be cast to the desired output type {old.dtype}")
    if new.dtype != old.dtype:
        new = record(aten._to_copy.default, new, dtype=old.dtype)
    target._ref.write(new)
    return target


def detach_in_place(kind: type[LazyTensor], input: LazyTensor) -> LazyTensor:
    """`Tensor.detach_`, which arrives at no op.

    Raises:
        RuleError: the tensor is a view.
    """
    ref = alias_ref(input)
    if ref.base is not None:
        raise RuleError("detach_ on a view of a ChunkedTensor: take what detach returns")
    ref.write(record(aten.detach.default, ref.value))
    update_requires_grad(input)
    return input


def generator_states(args: Args) -> list[tuple[torch.Generator, Tensor]]:
    """Return the generators that a call may draw from, and their states."""
    gpu = next((x.device for x in args if isinstance(x, Tensor) and x.is_cuda), None)
    generators = [torch.default_generator]
    if gpu is not None and not torch.cuda.is_current_stream_capturing():
        generators.append(capture.generator_of(gpu))
    return [(generator, generator.get_state()) for generator in generators]


def call_materialized(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Call a function of torch on materialized operands; one that it writes to is rechunked."""
    name = getattr(func, "__name__", "")
    is_write = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem__"))
    materialized: dict[int, tuple[LazyTensor, Tensor, int]] = {}

    def materialize(x: LazyTensor) -> Tensor:
        if id(x._ref) not in materialized:
            tensor = x.realize()
            tensor = tensor.clone() if is_write else tensor
            materialized[id(x._ref)] = (x, tensor, 0 if tensor.is_inference() else tensor._version)
        return materialized[id(x._ref)][1]

    plain_args, plain_kwargs = tree_map_only(LazyTensor, materialize, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if not is_write:
        return out
    users: dict[int, LazyTensor] = {}
    for x, tensor, version in materialized.values():
        layout = x._ref.value.layout
        if tensor.is_inference() or tensor._version != version:
            value = constant(tensor)
            if layout is not None:
                value = leaf_value(tensor, layout.dim, layout.axis.selection(tensor, layout.dim))
            try:
                x._ref.write(value)
            except NeedsMaterialize as missing:
                advice = "write to what it is a view of"
                raise RuleError(f"{name} on a view of a ChunkedTensor: {missing}; {advice}") from None
            update_requires_grad(x)
            users[id(tensor)] = x
    return tree_map_only(Tensor, lambda y: users.get(id(y), y), out)


def check_not_transformed(tree: PyTree) -> None:
    """Raise RuleError for tensors that a transform wraps, or that have a tangent: chunks run autograd themselves."""
    for x in tree_find(Tensor, tree):
        if not isinstance(x, LazyTensor) and is_transformed(x):
            raise RuleError(
                "chunked tensors inside torch.func transforms (grad, vmap, jvp) and forward-mode differentiation have "
                "no rule: differentiate with torch.autograd, or transform the function of plain tensors"
            )


def log_fallback(missing: NeedsMaterialize) -> None:
    """Count an op whose operands are materialized, and log it the first time."""
    fallbacks[missing.op] += 1
    if fallbacks[missing.op] == 1:
        _log.warning("%s on a ChunkedTensor: %s; its operands are realized", missing.op, missing.reason)
