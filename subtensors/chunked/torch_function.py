"""Calls on chunked tensors: recorded op by op, given to kernels, or run on materialized values."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from subtensors.chunked.fast_path import BY_KERNELS
from subtensors.chunked.lazy_tensor import RecordedTensor, cell_of, outer, shell, show_gradient, whole_of
from subtensors.dispatch.chunked.aliasing import AliasRef
from subtensors.dispatch.chunked.bound_call import BoundCall
from subtensors.dispatch.chunked.evaluation import evaluate
from subtensors.dispatch.chunked.lazy_graph import (
    LazyValue,
    NeedsMaterialize,
    constant,
    gathered,
    leaf_value,
    recording,
)
from subtensors.dispatch.chunked.rules import record
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import functional_form, is_in_place
from subtensors.dispatch.ops.tree import tree_leaves, tree_map
from subtensors.dispatch.ops.type_interaction import MASKED_TYPES
from subtensors.dispatch.torch_internals.autograd import prepares_backward
from subtensors.dispatch.torch_internals.dispatcher import is_transformed, is_transforming
from subtensors.dispatch.torch_internals.ops import schema_of

aten = torch.ops.aten

_log = logging.getLogger("subtensors.chunked")

fallbacks: Counter[str] = Counter()
"""The number of times that each op had its operands materialized, for lack of a rule that applies."""


def is_metadata_query(func: Callable[..., Any]) -> bool:
    """Return whether a function reads only metadata, such as sizes and dtype."""
    getter = getattr(func, "__name__", "") == "__get__"
    return func in _OF_THE_TENSOR_ITSELF or (getter and func not in _GETTERS_OF_VIEWS)


def called(
    kind: type[RecordedTensor], func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function of torch with chunked tensors among its arguments.

    Args:
        kind: the type of what stays chunked.
        func, types: as torch's overriding protocol gives them.
        args, kwargs: its arguments.

    Returns:
        what it returns: chunked where it has the rows, plain where it has lost them.

    Raises:
        RuleError: it would attach something to the tensor itself that belongs to the one that was chunked, or a
            transform of torch.func would not see what comes of its tensors.
    """
    if is_transforming():
        refuse_transformed((args, kwargs))
    if len(types) > 1 and not MASKED_TYPES.isdisjoint(types):
        _note(NeedsMaterialize(getattr(func, "__name__", func), "it has an operand with rules of its own"))
        return _on_values(func, args, kwargs)
    if func in BY_KERNELS:
        try:
            result = BY_KERNELS[func](kind, *args, **kwargs)
        except NeedsMaterialize:
            result = None  # op by op it may be recorded
        if result is not None:
            return result
    if func is torch.Tensor.register_hook and prepares_backward(args[1]):
        return _prepare(*args)
    if func in _REFUSED:
        _refuse(func)
    if func in _OF_VALUES:
        return _on_values(func, args, kwargs)
    drawn = _generators(args)
    try:
        return _recorded(kind, func, args, kwargs)
    except NeedsMaterialize as missing:
        _note(missing)
    except RuntimeError as error:
        if "not allocated" not in str(error) and "data pointer" not in str(error):
            raise
        _note(NeedsMaterialize(getattr(func, "__name__", func), "it reads its operand's memory"))
    for put_back, state in drawn:  # what was recorded before may have drawn random numbers
        put_back(state)
    return _on_values(func, args, kwargs)


def _recorded(
    kind: type[RecordedTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function of torch with every op in it recorded, and evaluate those of its results that are whole."""
    grad = torch.is_grad_enabled()
    users: dict[int, RecordedTensor] = {}
    borrowed: dict[int, RecordedTensor] = {}
    lent: dict[int, Tensor] = {}

    def lower(x: Any) -> Any:
        if isinstance(x, RecordedTensor):
            cell = cell_of(x)
            users[id(cell)] = x
            return shell(kind, cell)
        if isinstance(x, Tensor) and ((grad and x.requires_grad) or func in _MATHS_ON_TARGETS):
            # Ops on it inside the function must be recorded too, or its gradient would be lost there, or its rows.
            if id(x) not in borrowed:
                borrowed[id(x)] = shell(kind, AliasRef(constant(whole_of(x)), borrowed=True))
                lent[id(borrowed[id(x)]._cell)] = x
            return borrowed[id(x)]
        return whole_of(x) if isinstance(x, Tensor) else x

    call: Any = (args, kwargs)
    inner_args, inner_kwargs = tree_map(call, lower)
    writes = {key: cell_of(x).writes for key, x in users.items()}
    with torch.no_grad(), recording(grad), torch._C.DisableTorchFunctionSubclass():
        out = func(*inner_args, **inner_kwargs)
    for key, x in users.items():
        if cell_of(x).writes != writes[key]:
            show_gradient(x)

    def lift(x: Any) -> Any:
        if not isinstance(x, RecordedTensor):
            return x
        key = id(x._cell)
        if key in users:
            return users[key]
        if key in lent:
            return lent[key]
        # A view that has lost the rows may yet be written through.
        is_plain = x._cell.value.layout is None and x._cell.base is None
        return evaluate(x._cell.value) if is_plain else outer(kind, x._cell)

    return tree_map(out, lift)


def dispatched(kind: type[RecordedTensor], op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one op, beneath autograd."""
    if is_in_place(op):
        return _write(op, args, kwargs)
    if op is aten._local_scalar_dense.default:
        return evaluate(args[0]._cell.value).item()
    if functional_form(op) is not op:
        raise NeedsMaterialize(op, "it writes to a tensor that it is given")
    if torch.is_inference_mode_enabled():
        # There composite ops arrive as they are called.
        with torch._C.DisableTorchFunctionSubclass():
            decomposed = op.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    values, named = _values(args), _values(kwargs)
    try:
        results = record(op, *values, **named)
    except NeedsMaterialize as missing:
        if not op.is_view or op.overloadpacket is aten.as_strided:
            raise
        # A view of the gathered value may be written through; a materialized copy may not.
        _note(missing)
        results = record(op, *(gathered(v) if isinstance(v, LazyValue) else v for v in values), **named)
    cells = tree_map(results, lambda v: AliasRef(v) if isinstance(v, LazyValue) else v)
    if op.is_view and args and isinstance(args[0], RecordedTensor):
        made = [c for c in tree_leaves(cells) if isinstance(c, AliasRef)]
        for place, cell in enumerate(made):
            cell.view_of(args[0]._cell, op, _values(args[1:]), _values(kwargs), place)
    return tree_map(cells, lambda c: shell(kind, c) if isinstance(c, AliasRef) else c)


def _values(tree: Any) -> Any:
    def value(x: Any) -> Any:
        return x._cell.value if isinstance(x, RecordedTensor) else x

    return tree_map(tree, value)


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an in-place op as its functional form, whose result replaces the value of the first operand."""
    functional = functional_form(op)
    target = args[0] if args else None
    if functional is None or not isinstance(target, RecordedTensor):
        raise NeedsMaterialize(op, "it writes to a plain tensor")
    old = target._cell.value
    if op is aten.copy_.default:
        source = record(aten._to_copy.default, _values(args[1]), dtype=old.dtype, device=old.device)
        new = record(aten.expand.default, source, list(old.shape))
    else:
        # By name: the functional form may order them otherwise, or lack a default.
        call = BoundCall(op, _values(args), _values(kwargs))
        given = {a.name: call[a.name] for a in call.arguments}
        new = record(functional, **{a.name: given[a.name] for a in schema_of(functional).arguments if a.name in given})
    if not isinstance(new, LazyValue) or new.shape != old.shape:
        raise NeedsMaterialize(op, "it has several results, or changes sizes")
    if new.dtype != old.dtype:
        new = record(aten._to_copy.default, new, dtype=old.dtype)
    target._cell.write(new)
    return target


def _generators(args: tuple[Any, ...]) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """The states of the generators that a call may draw from, and how each is put back."""
    states: list[tuple[Callable[[Tensor], None], Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for x in args:
        if isinstance(x, Tensor) and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            states.append((partial(torch.cuda.set_rng_state, device=x.device), torch.cuda.get_rng_state(x.device)))
            break
    return states


def _note(missing: NeedsMaterialize) -> None:
    fallbacks[missing.op] += 1
    if fallbacks[missing.op] == 1:
        _log.warning("%s on a ChunkedTensor: %s; its operands are realized", missing.op, missing.reason)


def is_unchunkable_type(x: Any) -> bool:
    """Return whether a tensor's type has rules of its own, which chunks can't run; log it the first time."""
    if type(x) not in MASKED_TYPES:
        return False
    fallbacks["chunk"] += 1
    if fallbacks["chunk"] == 1:
        _log.warning("chunk of a %s, which has rules of its own: what follows runs whole", type(x).__name__)
    return True


def _on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch on materialized operands; one that it writes to is chunked as before."""
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem__"))
    realised: dict[int, tuple[RecordedTensor, Tensor, int]] = {}

    def dense(x: Any) -> Any:
        if not isinstance(x, RecordedTensor):
            return x
        if id(x._cell) not in realised:
            tensor = x.realize()
            tensor = tensor.clone() if writes else tensor
            realised[id(x._cell)] = (x, tensor, 0 if tensor.is_inference() else tensor._version)
        return realised[id(x._cell)][1]

    call: Any = (args, kwargs)
    plain_args, plain_kwargs = tree_map(call, dense)
    out = func(*plain_args, **plain_kwargs)
    if not writes:
        return out
    users: dict[int, RecordedTensor] = {}
    for x, tensor, version in realised.values():
        layout = x._cell.value.layout
        if tensor.is_inference() or tensor._version != version:
            value = constant(tensor)
            if layout is not None:
                axis = layout.axis.again(tensor.shape[layout.dim], tensor.numel())
                value = leaf_value(tensor, layout.dim, axis)
            try:
                x._cell.write(value)
            except NeedsMaterialize as missing:
                advice = "write to what it is a view of"
                raise RuleError(f"{name} on a view of a ChunkedTensor: {missing}; {advice}") from None
            show_gradient(x)
            users[id(tensor)] = x
    return tree_map(out, lambda y: users.get(id(y), y))


def _prepare(x: RecordedTensor, hook: Callable[[Tensor], Tensor]) -> None:
    """A hook that waits for backward to come, whatever its gradient is: it will come by what is made of these rows."""
    layout = x._cell.value.layout
    if layout is not None:
        layout.axis.prepare(hook)


def refuse_transformed(tree: Any) -> None:
    """Refuse what a transform hands to its function, or has a tangent: chunks run autograd of their own."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and not isinstance(x, RecordedTensor) and is_transformed(x):
            raise RuleError(
                "chunked tensors inside torch.func transforms (grad, vmap, jvp) and forward-mode differentiation have "
                "no rule: differentiate with torch.autograd, or transform the function of plain tensors"
            )


def _refuse(func: Callable[..., Any]) -> NoReturn:
    raise RuleError(
        f"{func.__name__} on a ChunkedTensor: its gradient goes to the tensor that was chunked; call it on that, or on "
        f"realize()"
    )


# Answered by the tensor's own metadata, without its values.
_OF_THE_TENSOR_ITSELF = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}

_GETTERS_OF_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

# Asks for the memory or for numbers.
_OF_VALUES = {
    torch.Tensor.backward,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__dlpack__,
    torch.Tensor.__iter__,
    torch.Tensor.__contains__,
}

# What they make of their targets alone is as wide as these.
_MATHS_ON_TARGETS = {F.kl_div, torch.kl_div, torch.cosine_similarity, F.cosine_similarity}

_REFUSED = {
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}
