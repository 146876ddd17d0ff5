"""Calls of torch functions on PaddedTensors: how a call reaches the rules, and how its result is wrapped.

A rule computes on dense storages that autograd tracks, so its backward is torch's own. For that a call runs below
autograd, on *shells*: PaddedTensors whose storage autograd tracks although it doesn't track the shells themselves. Each
op that torch makes of the call reaches `dispatch` with shells, which puts autograd back and runs the rule. Plain
tensors among the arguments are put in shells as well, so that every op on them is recorded too. The results of the call
are wrapped, by an autograd function whose backward unwraps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.linear_cross_entropy import TooManyDims
from subtensors.dispatch.ops.op_classes import OpClass, functional_form, is_in_place, op_class
from subtensors.dispatch.ops.tree import tree_find, tree_map_only
from subtensors.dispatch.padded import decomposable, rules
from subtensors.dispatch.padded.errors import UnsupportedCall
from subtensors.dispatch.padded.padded_value import PaddedValue, unpadded_value
from subtensors.dispatch.padded.pointwise import broadcast
from subtensors.dispatch.sizes.dim_factors import is_padded, size_of
from subtensors.dispatch.torch_internals import dispatcher, ops
from subtensors.dispatch.torch_internals.autograd import run_backward
from subtensors.padded.autograd import followed, wrapped
from subtensors.padded.fast_path import directly
from subtensors.padded.inplace import copied_whole, write_back, write_real
from subtensors.padded.padded_tensor import PaddedTensor, value_of, wrap
from subtensors.padded.replacements import REWRITTEN
from subtensors.padded.size_debug import PaddedSize, is_watching, watched_shape
from subtensors.padded.views import refresh_copies, remember

# Questions about a tensor itself, which its wrapper answers, and what drives autograd.
_OF_THE_WRAPPER = frozenset(
    """size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_complex
    is_floating_point is_signed is_conj is_neg is_inference is_coalesced is_same_size is_shared is_pinned
    is_distributed data_ptr untyped_storage storage storage_type get_device register_hook
    register_post_accumulate_grad_hook retain_grad requires_grad_ type __len__ __hash__ __dlpack_device__
    _is_view _is_zerotensor has_names dim_order is_set_to sym_size _backward_hooks _typed_storage
    is_tensor is_nonzero_ result_type can_cast""".split()
)
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


_OFTEN_ASKED = frozenset(
    getattr(Tensor, name).__get__ for name in "shape dtype device ndim requires_grad is_cuda grad_fn is_leaf".split()
)
"""Getters that models call all the time, answered by the wrapper, and by torch without a warning."""

# What autograd's engine and the compiler do with tensors themselves.
_BELOW_AUTOGRAD = frozenset(
    f"aten::{name}"
    for name in """add.Tensor add_.Tensor clone copy_ _to_copy zeros_like ones_like empty_like new_empty new_zeros
    new_empty_strided zero_ isnan _is_any_true""".split()
)

RAW_MEMORY_FUNCTIONS = frozenset(["apply_", "map_"])
"""Functions that access their first argument's memory directly: a shell has none, and their writes go unnoticed."""


fallbacks: Counter[str] = Counter()
"""The number of times that each function ran on unpadded data."""


class _State(threading.local):
    def __init__(self) -> None:
        self.calls: list[CallFrame] = []


class CallFrame:
    """One call under way: the keys of torch's dispatcher as they were outside, and the arguments' shells."""

    def __init__(self) -> None:
        self.keys = dispatcher.dispatch_keys()
        self.shells: dict[int, PaddedTensor] = {}
        self.outer: dict[int, Tensor] = {}
        self.written: dict[int, PaddedTensor] = {}
        self.plain_views: list[Tensor] = []
        self.overwritten: list[Any] = []

    def shell(self, x: Tensor) -> Tensor:
        """The shell that stands for an argument below autograd; one an argument."""
        if id(x) not in self.shells:
            new = wrap(followed(x) if isinstance(x, PaddedTensor) else unpadded_value(x))
            self.shells[id(x)] = new
            self.outer[id(new)] = x
        return self.shells[id(x)]


_state = _State()


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that has a PaddedTensor among its arguments."""
    if func in _OFTEN_ASKED and not is_watching():
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    try:
        answer = directly(func, args, kwargs)
    except RuleError as missing:
        return _fallen_back(func, args, kwargs, missing)
    if answer is not NotImplemented:
        return answer
    name = getattr(func, "__name__", "")
    if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
        return run_backward(func, args, kwargs)
    if name in _OF_THE_WRAPPER or (name in ("__get__", "__set__", "__delete__") and not _gives_tensor(func)):
        if name == "__get__" and _attribute(func) == "layout":
            # Two frames up, past `__torch_function__`, is who asks.
            decomposable.check_caller(sys._getframe(2), lambda mask: _is_padded_as(args[0], mask))
        with torch._C.DisableTorchFunctionSubclass():
            out = _quietly(func, args, kwargs) if ops.is_tracing() else func(*args, **kwargs)
        if is_watching() and isinstance(args[0], PaddedTensor):
            if name in ("numel", "nelement") and value_of(args[0]).padded_dims:
                return PaddedSize(out, "all dims")
            if name == "size" or isinstance(out, torch.Size):
                return _watched_size(args[0], args[1:], kwargs)
        return out
    if dispatcher.is_transforming():
        raise RuleError(
            f"{name} on a PaddedTensor has no rule inside a transform of torch.func or forward-mode differentiation: "
            f"unpad before it"
        )
    if name == "copy_" and len(args) > 1 and copied_whole(args[0], args[1]):
        return args[0]
    try:
        if isinstance(func, (torch.ScriptMethod, torch.ScriptFunction)):
            return _scripted(func, args, kwargs)
        return REWRITTEN[func](*args, **kwargs) if func in REWRITTEN else _by_rules(func, args, kwargs)
    except TooManyDims:
        raise
    except RuleError as missing:
        if name == "__setitem__" and isinstance(args[0], PaddedTensor):
            from subtensors.padded.setitem import assign

            with contextlib.suppress(UnsupportedCall):
                return assign(*args)
        return _fallen_back(func, args, kwargs, missing)


def _fallen_back(func: Callable[..., Any], args: Any, kwargs: Any, missing: RuleError) -> Any:
    from subtensors.padded.fallback import on_logical_data

    return on_logical_data(func, args, kwargs, missing)


def _quietly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a getter without warnings: the compiler reads every tensor's .grad, and torch warns if it can't have one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return func(*args, **kwargs)


def _watched_size(x: PaddedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    true = [str(size_of(factors)) if is_padded(factors) else None for factors in x._dims]
    shape = watched_shape(x._dense.shape, true)
    dim = args[0] if args else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _is_padded_as(x: PaddedTensor, other: Any) -> bool:
    """Return whether `other`, which broadcasts to `x`, is a PaddedTensor with the same dims wherever `x` is padded."""
    dims = [d - x.dim() for d in value_of(x).padded_dims]
    return isinstance(other, PaddedTensor) and all(other.dim() >= -d and other._dims[d] == x._dims[d] for d in dims)


def _attribute(func: Any) -> str:
    """The name of the attribute that a `__get__` or `__set__` belongs to."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _gives_tensor(func: Any) -> bool:
    return _attribute(func) in _TENSOR_ATTRIBUTES


def _by_rules(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(func, FunctionType):
        decomposable.check_function(func, args, kwargs)
    if getattr(func, "__name__", "") in RAW_MEMORY_FUNCTIONS:
        raise RuleError(f"PaddedTensor has no rule for {func.__name__}, which reads memory by itself")
    running = CallFrame()
    shells = tree_map_only(Tensor, running.shell, (args, kwargs))
    _state.calls.append(running)
    try:
        with torch._C.DisableTorchFunctionSubclass(), dispatcher.below_autograd():
            out = func(*shells[0], **shells[1])
    finally:
        _state.calls.pop()
    for shell in running.written.values():
        write_back(running.outer[id(shell)], value_of(shell))
    for written in running.overwritten:
        refresh_copies(written)
    out = tree_map_only(Tensor, lambda t: _outside(t, running), out)
    remember(func, args, kwargs, out, running.plain_views)
    return out


def _scripted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run TorchScript code by rules, without its optimizer, which would fuse ops that the rules must see one by one."""
    if torch.is_grad_enabled():
        raise RuleError("PaddedTensor has no rule for the gradients of TorchScript's code: call the Python module")
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return _by_rules(func, args, kwargs)


def _outside(t: Tensor, running: CallFrame) -> Tensor:
    if not isinstance(t, PaddedTensor):
        return t
    if id(t) in running.outer:
        return running.outer[id(t)]
    outside = wrapped(value_of(t))
    if t._view == "alias" and not isinstance(outside, PaddedTensor):
        running.plain_views.append(outside)
    return outside


def dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op overload on PaddedTensors: shells of a running call, or tensors that autograd's engine handles."""
    if not isinstance(op, OpOverload):
        raise RuleError(f"PaddedTensor has no rule for the higher-order op {op}: call it on the unpadded values")
    if not _state.calls:
        if [str(returned.type) for returned in op._schema.returns] == ["bool"]:
            return op(*tree_map_only(PaddedTensor, lambda t: t._dense, args), **kwargs)
        if op.name() not in _BELOW_AUTOGRAD and op_class(op) is not OpClass.VIEW:
            raise RuleError(
                f"{op} met a PaddedTensor below autograd, where the gradients of its padding cannot be told from real "
                f"ones: torch.func transforms and ops called from C++ have no rule; unpad before them"
            )
        if op is torch.ops.aten.copy_.default and isinstance(args[0], PaddedTensor):
            args[0]._dense.copy_(args[1]._dense if isinstance(args[1], PaddedTensor) else args[1])
            return args[0]
        out = _run(op, args, kwargs)
        if op_class(op) is OpClass.REDUCTION:
            return out._dense
        if is_in_place(op) and isinstance(args[0], PaddedTensor):
            args[0]._fill = out._fill if isinstance(out, PaddedTensor) else None
        return return_and_correct_aliasing(op, args, kwargs, out) if op_class(op) is OpClass.VIEW else out
    running = _state.calls.pop()
    try:
        with dispatcher.restored_dispatch_keys(running.keys, casting=op.overloadpacket in decomposable.CAST_INSIDE):
            if is_in_place(op) or functional_form(op) is not op:
                return _mutate(op, args, kwargs, running)
            return _run(op, args, kwargs)
    except decomposable.MustDecompose:
        pass
    finally:
        _state.calls.append(running)
    # Its parts are cast by autocast as they would be without padding.
    with dispatcher.restored_autocast(running.keys):
        return decomposable.decompose(op, args, kwargs)


def _run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner_args, inner_kwargs = tree_map_only(Tensor, _inner, (args, kwargs))
    if decomposable.is_composite(op) and any(x.padded_dims for x in tree_find(PaddedValue, (inner_args, inner_kwargs))):
        raise decomposable.MustDecompose
    out = rules.run(op, inner_args, inner_kwargs)
    return tree_map_only(PaddedValue, wrap, out)


def _inner(t: Tensor) -> PaddedValue:
    return value_of(t) if isinstance(t, PaddedTensor) else unpadded_value(t)


def _mutate(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], running: CallFrame) -> Any:
    """Run an in-place op as its functional form; the shell of the argument that it writes takes the new value."""
    twin = functional_form(op)
    targets = _targets(op, args, kwargs)
    if twin is None or not targets:
        raise UnsupportedCall(f"{op} writes to its arguments, and there is no form of it that doesn't")
    recording = torch.is_grad_enabled() and any(x._dense.requires_grad for x in running.shells.values())
    if not recording and _writes_anything(op, targets, args, kwargs, running):
        op(
            *tree_map_only(PaddedTensor, lambda t: t._dense, args),
            **tree_map_only(PaddedTensor, lambda t: t._dense, kwargs),
        )
        running.overwritten.append(running.outer[id(targets[0])])
        return targets[0]
    through_views = {id(target): target for target in targets if id(target) not in running.outer and target._view}
    if recording and any(target._dense.requires_grad for target in through_views.values()):
        raise UnsupportedCall(f"{op} writes through a view of a tensor that requires grad")
    if any(target._view == "copy" for target in through_views.values()):
        raise UnsupportedCall(f"{op} writes through a view that had to be copied")
    if recording:
        for target in (t for t in targets if id(t) not in through_views):
            # The op keeps its operands for the backward, and the new value is to stand in their memory.
            target._dense = target._dense.clone()
    outs = {a.name for a in op._schema.arguments if a.is_out}
    out = _run_any(twin, args, {k: v for k, v in kwargs.items() if k not in outs}, op)
    values = tree_find(Tensor, out)
    for target, new in zip(targets, values, strict=False):
        value = value_of(new) if isinstance(new, PaddedTensor) else unpadded_value(new)
        if id(target) in through_views:
            if value.is_tracked:
                raise UnsupportedCall(f"{op} writes a tensor that requires grad through a view")
            write_real(target, value)
            continue
        if target._dense.requires_grad and not torch.is_grad_enabled() and value.shape == target.shape:
            # Outside of autograd's sight the values change and the graph behind them stays.
            target._dense.copy_(value.dense)
            continue
        if value.shape != target.shape and not outs:
            raise UnsupportedCall(f"{op} would change the shape of what it writes to")
        target._dense = value.dense.to(target.dtype)
        target._dims, target._sizes, target._fill = value.dims, value.sizes, None
        if id(target) in running.outer:
            running.written[id(target)] = target
    if not op._schema.returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


def _writes_anything(
    op: OpOverload, targets: list[PaddedTensor], args: tuple[Any, ...], kwargs: dict[str, Any], running: CallFrame
) -> bool:
    """Return whether a pointwise op may write to all of its first argument's storage: its padding is undefined."""
    target = targets[0]
    outer = running.outer.get(id(target))
    if op_class(op) is not OpClass.POINTWISE or args[0] is not target or len(targets) > 1:
        return False
    if not isinstance(outer, PaddedTensor) or outer._fill is not None or outer._view:
        return False
    return bool(broadcast([_inner(t) for t in tree_find(Tensor, (args, kwargs))])[0] == target._dims)


def _run_any(twin: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op: OpOverload) -> Any:
    names = [a.name for a in op._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    accepted = [a.name for a in twin._schema.arguments]
    try:
        return _run(twin, (), {name: named[name] for name in accepted if name in named})
    except decomposable.MustDecompose as must:
        raise UnsupportedCall(f"{op} is composite and writes to its argument") from must


def _targets(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PaddedTensor]:
    targets = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            targets += tree_find(PaddedTensor, given)
    return targets
