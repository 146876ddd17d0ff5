"""Calls of torch functions on PaddedTensors: how a call reaches the rules, and how its result is wrapped.

    f(x)                            x: a PaddedTensor that requires grad
     |
    __torch_function__ ---------->  f is a query such as x.size() or x.dtype: the wrapper answers it
     |
    fast_path.py ---------------->  f was called like this before: the torch calls of its rules are repeated
     |
    below autograd                  tensors become placeholders, and f runs past autograd's kernels
     |
    __torch_dispatch__              each op that f consists of, composite ones in one piece
     |
    dispatch/padded/                autograd is on again: the op's rule computes on storages
     |
    Wrap                            placeholders and results become the caller's tensors; views remember their base

A rule computes on dense storages that autograd tracks, so its backward is torch's own. A *placeholder* makes that
possible: a PaddedTensor that stands for an argument, whose storage autograd tracks although it doesn't track the
placeholder itself. Plain tensors get placeholders too, so that every op on them is seen. A few functions run a
replacement that is made of functions with rules (`replacements.py`); where there is no rule, a function runs on the
unpadded data, and its result is padded again (`fallback.py`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing

from subtensors.dispatch.ops.errors import RuleError, UnsupportedCall
from subtensors.dispatch.ops.lazy_storage import is_lazy
from subtensors.dispatch.ops.linear_cross_entropy import TooManyDims
from subtensors.dispatch.ops.op_classes import OpClass, functional_form, is_in_place, op_class
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree, tree_find, tree_has, tree_map_only
from subtensors.dispatch.ops.wrappers import QUERIES
from subtensors.dispatch.padded import decomposable, rules
from subtensors.dispatch.padded.padded_size import PaddedSize
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.pointwise import broadcast, may_divide_by_zero
from subtensors.dispatch.torch_internals import dispatcher, ops
from subtensors.dispatch.torch_internals.autograd import BACKWARDS, is_transforming, run_backward
from subtensors.padded import fast_path
from subtensors.padded.autograd import wrap_with_grad
from subtensors.padded.fallback import RAW_MEMORY_FUNCTIONS, run_on_unpadded_data
from subtensors.padded.fallback import fallbacks as fallbacks  # documented under this module's name
from subtensors.padded.inplace import assign_at_index, set_layout, try_copy_storage, write_back, write_valid
from subtensors.padded.padded_tensor import PaddedTensor, handlers, make_padded, unwrap
from subtensors.padded.replacements import REPLACEMENTS
from subtensors.padded.size_debug import numel_of, shape_of
from subtensors.padded.sized_calls import run_with_sizes
from subtensors.padded.views import refresh_copies, remember_views

# Queries of a tensor itself, which its wrapper answers, and functions that control autograd.
_WRAPPER_FUNCTIONS = QUERIES | frozenset(
    """is_distributed storage storage_type register_post_accumulate_grad_hook __dlpack_device__ has_names dim_order
    is_set_to _backward_hooks _typed_storage is_tensor is_nonzero_ result_type can_cast""".split()
)
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})

_COMMON_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in "shape dtype device ndim requires_grad is_cuda grad_fn is_leaf".split()
)
"""Getters that models call all the time: the wrapper answers them, and torch has no warning for them."""

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]

# Ops that autograd's engine and the compiler call on tensors themselves.
_BELOW_AUTOGRAD = frozenset(
    f"aten::{name}"
    for name in """add.Tensor add_.Tensor clone copy_ _to_copy zeros_like ones_like empty_like new_empty new_zeros
    new_empty_strided zero_ isnan _is_any_true""".split()
)


class CallFrame:
    """A call in progress: the dispatch keys outside of it, and the placeholders of its arguments.

    Args:
        recording: notes what its rules call.
    """

    def __init__(self, recording: fast_path.CallRecording) -> None:
        self.recording = recording
        self.keys = dispatcher.dispatch_keys()
        self.placeholders: dict[int, PaddedTensor] = {}
        """The placeholder of each argument, by the argument's id."""
        self.originals: dict[int, Tensor] = {}
        """The argument of each placeholder, by the placeholder's id."""
        self.written: dict[int, PaddedTensor] = {}
        """Placeholders with a new value."""
        self.overwritten: list[Tensor] = []
        """Arguments whose storage the call wrote to directly."""
        self.plain_views: list[Tensor] = []
        """Results without a padded dim that share an argument's memory."""
        self.has_views = False
        """True if a result is a view."""

    def placeholder(self, x: Tensor) -> Tensor:
        """The placeholder of an argument, made at its first use."""
        if id(x) not in self.placeholders:
            new = make_padded(self.recording.value(x))
            self.placeholders[id(x)] = new
            self.originals[id(new)] = x
        return self.placeholders[id(x)]

    def values(self, args: Args, out: PyTree) -> list[PaddedValue | Tensor | None]:
        """Return what the call returns, as its recording takes it."""
        if self.written or any(not args or x is not args[0] for x in self.overwritten):
            return []
        outs = out if isinstance(out, tuple | list) else [out]
        if not all(t is None or isinstance(t, PaddedTensor) for t in outs):
            return []
        return [None if t is None else self.originals.get(id(t), unwrap(t)) for t in outs]

    def result(self, t: Tensor) -> Tensor:
        """The caller's tensor for a result of the call."""
        if not isinstance(t, PaddedTensor):
            return t
        original = self.originals.get(id(t))
        if original is not None:
            return original
        out = wrap_with_grad(unwrap(t))
        if t._view:
            self.has_views = True
            if t._view == "alias" and not isinstance(out, PaddedTensor):
                self.plain_views.append(out)
        return out


class _State(threading.local):
    def __init__(self) -> None:
        self.calls: list[CallFrame] = []


_state = _State()


def handle_torch_function(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run a torch function that has a PaddedTensor among its arguments."""
    is_repeated = func in fast_path.repeated_functions
    if is_repeated and (answer := fast_path.try_fast_path(func, args, kwargs)) is not NotImplemented:
        return answer
    if func is functional.dropout and _drops_nothing(*args, **kwargs):
        return args[0]
    if func in _COMMON_GETTERS:
        if func == _SHAPE and not ops.is_tracing():
            return shape_of(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is Tensor.size and type(args[0]) is PaddedTensor and not ops.is_tracing():
        # A dim that is none of its dims is torch's own error.
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        shape = shape_of(args[0])
        if dim is None or (type(dim) is int and -len(shape) <= dim < len(shape)):
            return shape if dim is None else shape[dim]
    name = getattr(func, "__name__", "")
    if func in BACKWARDS:
        return run_backward(func, args, kwargs)
    is_attribute = name in ("__get__", "__set__", "__delete__") and _attribute(func) not in _TENSOR_ATTRIBUTES
    if is_attribute or name in _WRAPPER_FUNCTIONS:
        if name == "__get__" and _attribute(func) == "layout":
            # The caller is two frames up, past `__torch_function__`.
            decomposable.check_caller(sys._getframe(2), lambda mask: _is_padded_as(args[0], mask))
        if name == "register_hook" and is_lazy(args[0]._dense):
            return args[0]._dense.register_hook(*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if ops.is_tracing():
                with warnings.catch_warnings():  # of a .grad that can't be there: the compiler reads every tensor's
                    warnings.simplefilter("ignore", UserWarning)
                    return func(*args, **kwargs)
            out = func(*args, **kwargs)
        if name in ("numel", "nelement") and isinstance(args[0], PaddedTensor):
            return numel_of(args[0], out)
        return out
    if torch.compiler.is_exporting():
        raise RuleError(
            f"{name} on a PaddedTensor has no rule under torch.export: export the program of the unpadded tensors, or "
            f"compile it with torch.compile"
        )
    if is_transforming():
        raise RuleError(
            f"{name} on a PaddedTensor has no rule inside a transform of torch.func or forward-mode differentiation: "
            f"unpad before it"
        )
    if name == "copy_" and len(args) > 1 and try_copy_storage(args[0], args[1]):
        return args[0]
    try:
        if tree_has(PaddedSize, (args, kwargs)):
            return run_with_sizes(func, args, kwargs)
        if isinstance(func, (torch.ScriptMethod, torch.ScriptFunction)):
            return _run_script(func, args, kwargs)
        return REPLACEMENTS[func](*args, **kwargs) if func in REPLACEMENTS else _run_by_rules(func, args, kwargs)
    except TooManyDims:
        raise
    except RuleError as error:
        reason = error
    if name == "__setitem__" and isinstance(args[0], PaddedTensor):
        with contextlib.suppress(UnsupportedCall):
            return assign_at_index(*args)
    # Outside of the handler: an error of the caller's own has no other error behind it.
    return run_on_unpadded_data(func, args, kwargs, reason)


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training and 0 <= p <= 1


def _is_padded_as(x: PaddedTensor, other: object) -> bool:
    """Return whether `other`, which broadcasts to `x`, is a PaddedTensor with the same dims wherever `x` is padded."""
    dims = [d - x.dim() for d in unwrap(x).padded_dims]
    return isinstance(other, PaddedTensor) and all(other.dim() >= -d and other._dims[d] == x._dims[d] for d in dims)


def _attribute(func: object) -> str:
    """The name of the attribute that a `__get__` or `__set__` belongs to."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _run_by_rules(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    if isinstance(func, FunctionType):
        decomposable.check_function(func, args, kwargs)
    if getattr(func, "__name__", "") in RAW_MEMORY_FUNCTIONS:
        raise RuleError(f"PaddedTensor has no rule for {func.__name__}, which reads memory by itself")
    recording = fast_path.CallRecording(func, args, kwargs)
    frame = CallFrame(recording)
    inner_args, inner_kwargs = tree_map_only(Tensor, frame.placeholder, (args, kwargs))
    _state.calls.append(frame)
    try:
        with torch._C.DisableTorchFunctionSubclass(), dispatcher.below_autograd():
            out = func(*inner_args, **inner_kwargs)
    except RuleError:
        recording.end([], Tensor)
        raise
    finally:
        _state.calls.pop()
    recording.end(frame.values(args, out), type(out), writes=bool(frame.overwritten))
    for placeholder in frame.written.values():
        write_back(frame.originals[id(placeholder)], unwrap(placeholder))
    for original in frame.overwritten:
        if isinstance(original, PaddedTensor):
            refresh_copies(original)
    out = tree_map_only(Tensor, frame.result, out)
    if frame.has_views:
        remember_views(func, args, kwargs, out, frame.plain_views)
    return out


def _run_script(func: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run TorchScript code by rules, without its optimizer, which would fuse ops that the rules must see one by one."""
    if torch.is_grad_enabled():
        raise RuleError("PaddedTensor has no rule for the gradients of TorchScript's code: call the Python module")
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return _run_by_rules(func, args, kwargs)


def handle_torch_dispatch(op: Callable[..., PyTree], args: Args, kwargs: Kwargs) -> PyTree:
    """Run an op overload on the placeholders of a running call, or on tensors that autograd's engine handles."""
    if not isinstance(op, OpOverload):
        raise RuleError(f"PaddedTensor has no rule for the higher-order op {op}: call it on the unpadded values")
    if not _state.calls:
        if [str(returned.type) for returned in op._schema.returns] == ["bool"]:
            return op(*tree_map_only(PaddedTensor, lambda t: t._dense, args), **kwargs)
        if op.name() not in _BELOW_AUTOGRAD and op_class(op) is not OpClass.VIEW:
            raise RuleError(
                f"{op} met a PaddedTensor below autograd, where the gradients of its padding cannot be told from valid "
                f"ones: torch.func transforms and ops called from C++ have no rule; unpad before them"
            )
        if op is torch.ops.aten.copy_.default and isinstance(args[0], PaddedTensor):
            args[0]._dense.copy_(args[1]._dense if isinstance(args[1], PaddedTensor) else args[1])
            return args[0]
        out = _run(op, args, kwargs)
        if op_class(op) is OpClass.REDUCTION:
            return out._dense
        if is_in_place(op) and isinstance(args[0], PaddedTensor):
            set_layout(args[0], args[0]._dims, out._fill if isinstance(out, PaddedTensor) else None)
        return return_and_correct_aliasing(op, args, kwargs, out) if op_class(op) is OpClass.VIEW else out
    frame = _state.calls.pop()
    try:
        with dispatcher.restored_dispatch_keys(frame.keys, casting=op.overloadpacket in decomposable.CAST_INSIDE):
            writes = is_in_place(op) or functional_form(op) is not op
            return _mutate(op, args, kwargs, frame) if writes else _run(op, args, kwargs, frame.recording)
    except decomposable.MustDecompose:
        pass
    finally:
        _state.calls.append(frame)
    # Autocast casts its parts as it would without padding.
    with dispatcher.restored_autocast(frame.keys):
        return decomposable.decompose(op, args, kwargs)


def _run(op: OpOverload, args: Args, kwargs: Kwargs, recording: fast_path.CallRecording | None = None) -> PyTree:
    if ops.is_tracing():  # the buckets are constants of the graph, also where a compiler left their sizes open
        args, kwargs = tree_map_only(torch.SymInt, int, (args, kwargs))
    inner_args, inner_kwargs = tree_map_only(Tensor, unwrap, (args, kwargs))
    if decomposable.is_composite(op) and any(x.padded_dims for x in tree_find(PaddedValue, (inner_args, inner_kwargs))):
        raise decomposable.MustDecompose
    with recording.context if recording is not None else contextlib.nullcontext():
        out = rules.run(op, inner_args, inner_kwargs)
    return tree_map_only(PaddedValue, make_padded, out)


def _mutate(op: OpOverload, args: Args, kwargs: Kwargs, frame: CallFrame) -> PyTree:
    """Run an in-place op as its functional form; the placeholder of the argument that it writes takes the new value."""
    functional = functional_form(op)
    targets = _written_arguments(op, args, kwargs)
    if functional is None or not targets:
        raise UnsupportedCall(f"{op} writes to its arguments, and has no functional form")
    records = torch.is_grad_enabled() and any(x._dense.requires_grad for x in frame.placeholders.values())
    if not records and _may_write_padding(op, targets, args, kwargs, frame):
        own_args, own_kwargs = tree_map_only(PaddedTensor, lambda t: t._dense, (args, kwargs))
        with frame.recording.context:
            op(*own_args, **own_kwargs)
        frame.overwritten.append(frame.originals[id(targets[0])])
        return targets[0]
    frame.recording.stop()
    through_views = {id(target): target for target in targets if id(target) not in frame.originals and target._view}
    if records and any(target._dense.requires_grad for target in through_views.values()):
        raise UnsupportedCall(f"{op} writes through a view of a tensor that requires grad")
    if any(target._view == "copy" for target in through_views.values()):
        raise UnsupportedCall(f"{op} writes through a view that had to be copied")
    if records:
        for target in (t for t in targets if id(t) not in through_views and not is_lazy(t._dense)):
            # The op saves its operands for the backward, and the new value overwrites their memory.
            target._dense = target._dense.clone()
    out_names = {a.name for a in op._schema.arguments if a.is_out}
    out = _run_functional(functional, args, {k: v for k, v in kwargs.items() if k not in out_names}, op)
    values = tree_find(Tensor, out)
    for target, new in zip(targets, values, strict=False):
        value = unwrap(new)
        if id(target) in through_views:
            if value.is_tracked:
                raise UnsupportedCall(f"{op} writes a tensor that requires grad through a view")
            write_valid(target, value)
            continue
        if target._dense.requires_grad and not torch.is_grad_enabled() and value.shape == target.shape:
            # With gradients disabled the values change and their autograd graph stays.
            target._dense.copy_(value.dense)
            continue
        if value.shape != target.shape and not out_names:
            raise UnsupportedCall(f"{op} would change the shape of what it writes to")
        if op_class(op) is OpClass.POINTWISE and not torch.can_cast(value.dense.dtype, target.dtype):
            raise RuntimeError(
                f"result type {value.dense.dtype} can't be cast to the desired output type {target.dtype}"
            )
        target._dense = value.dense.to(target.dtype)
        target._sizes = value.sizes
        set_layout(target, value.dims)
        if id(target) in frame.originals:
            frame.written[id(target)] = target
    if not op._schema.returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


def _may_write_padding(
    op: OpOverload, targets: list[PaddedTensor], args: Args, kwargs: Kwargs, frame: CallFrame
) -> bool:
    """Return whether a pointwise op may write to all of its first argument's storage: its padding is undefined."""
    target = targets[0]
    original = frame.originals.get(id(target))
    if op_class(op) is not OpClass.POINTWISE or args[0] is not target or len(targets) > 1:
        return False
    if not isinstance(original, PaddedTensor) or original._fill is not None or original._view or is_lazy(target._dense):
        return False
    if may_divide_by_zero(op, target._dense):
        return False
    return bool(broadcast([unwrap(t) for t in tree_find(Tensor, (args, kwargs))])[0] == target._dims)


def _run_functional(functional: OpOverload, args: Args, kwargs: Kwargs, op: OpOverload) -> PyTree:
    names = [a.name for a in op._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    accepted = [a.name for a in functional._schema.arguments]
    try:
        return _run(functional, (), {name: named[name] for name in accepted if name in named})
    except decomposable.MustDecompose as must:
        raise UnsupportedCall(f"{op} is composite and writes to its argument") from must


def _written_arguments(op: OpOverload, args: Args, kwargs: Kwargs) -> list[PaddedTensor]:
    targets = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            targets += tree_find(PaddedTensor, given)
    return targets


handlers.torch_function, handlers.torch_dispatch = handle_torch_function, handle_torch_dispatch
