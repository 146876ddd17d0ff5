"""Private torch APIs of ops, shards and the compiler: one function each, with the versions checked."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FrameType, MethodDescriptorType

import torch
from torch._ops import OpOverload
from torch.optim import optimizer as _optimizers

from subtensors.dispatch.torch_internals.requires import requires


@requires("torch._decomp.decomposition_table", "torch._ops.OpOverload._can_decompose")
def decomposition_of(op: OpOverload) -> Callable[..., object] | None:
    """Return torch's own decomposition of `op` into simpler ops; None if it has none. Checked on 2.11, 2.13."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(op) or (op.decompose if op._can_decompose() else None)


@requires("torch._C._len_torch_function_stack", otherwise=lambda: torch.get_default_device())
def default_device() -> torch.device | None:
    """Return the default device of new tensors; None for the CPU. Checked on 2.11, 2.13."""
    # Only modes set one; torch's own function takes longer than this check that there is none.
    if not torch._C._len_torch_function_stack():
        return None
    device = torch.get_default_device()
    return None if device.type == "cpu" else device  # other modes set none


@requires("torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND", "torch._prims_common.elementwise_dtypes")
def computation_dtype(*args: torch.Tensor | float | None) -> torch.dtype:
    """Return the dtype that torch promotes tensors and numbers to before it compares them. Checked on 2.11, 2.13."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    _, promoted = elementwise_dtypes(*args, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)
    return promoted


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return an overload's schema: its argument names, types and what it writes to. Checked on 2.13."""
    return op._schema


def binding_of(func: Callable[..., object], kwargs: Mapping[str, object]) -> Callable[..., object]:
    """Return a faster function than an overload for the same arguments; any other function itself. Checked on 2.13.

    Torch's own bindings for Python read arguments in half the time of an overload, and choose the overload by them.
    """
    if not isinstance(func, OpOverload):
        return func
    # The dispatcher hands on memory formats as ints.
    return _callee(func) if isinstance(kwargs.get("memory_format"), int) else _binding(func)


@cache
def _binding(func: OpOverload) -> Callable[..., object]:
    name = func.name().removeprefix("aten::").partition(".")[0]
    differs = any(  # by another default, and in what is taken by position
        x.name == "reduction" or ("MemoryFormat" in str(x.real_type) and not x.kwarg_only)
        for x in func._schema.arguments
    )
    bindings = [] if differs else [getattr(owner, name, None) for owner in (torch, torch.Tensor)]
    return next((f for f in bindings if isinstance(f, _BINDINGS)), _callee(func))


def _callee(func: OpOverload) -> Callable[..., object]:
    """Return what an overload calls, in one frame less."""
    return getattr(func, "_op", func)


_BINDINGS = (BuiltinFunctionType, MethodDescriptorType)


_local_tensor, _placements = attrgetter("_local_tensor"), attrgetter("_spec.placements")


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor that each DTensor stores. Checked on 2.11, 2.13.

    `to_local` returns the same where autograd records nothing; this reads a whole list from C.
    """
    try:
        parts = list(map(_local_tensor, tensors))
    except AttributeError:  # another torch may store it elsewhere
        return [t.to_local() for t in tensors]  # type: ignore[attr-defined]
    if set(map(type, parts)) <= {torch.Tensor}:
        return parts
    return [t.to_local() for t in tensors]  # type: ignore[attr-defined]  # a collective may still write one


def have_same_placements(tensors: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> bool:
    """Return whether each of these DTensors has the placements of its reference. Checked on 2.11, 2.13."""
    try:
        # FSDP2 gives a gradient its parameter's placements object, and lists compare by identity first.
        return list(map(_placements, tensors)) == list(map(_placements, references))
    except AttributeError:  # a plain tensor
        return False


@requires(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch._C._autograd._profiler_enabled",
    otherwise=lambda optimizer: True,
)
def has_step_observers(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook or a profiler observes this optimizer's step. Checked on 2.11, 2.13."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _optimizers._global_optimizer_pre_hooks
        or _optimizers._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


@requires("torch._guards.CompileContext.current_compile_id", otherwise=torch.compiler.is_compiling)
def is_in_compiler() -> bool:
    """Return whether torch.compile is compiling something now. Checked on 2.11, 2.13."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id() is not None


@requires("torch._C._get_fp32_precision_getter", otherwise=lambda: torch.backends.cuda.matmul.fp32_precision)
def matmul_precision() -> str:
    """Return in which precision a GPU multiplies float32 matrices; torch's older getter may raise. Checked on 2.13."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul")  # type: ignore[attr-defined, no-any-return]


@requires("torch._C._len_torch_dispatch_stack", otherwise=lambda: False)
def has_dispatch_mode() -> bool:
    """Return whether a mode that sees each op, such as `FlopCounterMode`, is active. Checked on 2.11, 2.13."""
    return torch._C._len_torch_dispatch_stack() > 0


@requires("torch._guards.detect_fake_mode", otherwise=torch.compiler.is_exporting)
def is_exporting() -> bool:
    """Return whether torch.export is at work, the reading of its arguments included. Checked on 2.11, 2.13."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode()
    return torch.compiler.is_exporting() or (mode is not None and mode.fake_tensor_converter.export)


@cache
def enable_foreach_paths(kind: type[torch.Tensor]) -> None:
    """Make torch.optim take its foreach and fused paths for tensors of a subclass, as for plain tensors.

    Called for a type that is read as a plain tensor, when the first tensor of it is made. Checked on 2.11 - 2.15.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        known = getattr(module, "_foreach_supported_types", None)
        if known is not None and kind not in known:
            known.append(kind)


@requires("torch._guards._TLS", otherwise=torch.compiler.is_compiling)
def is_tracing() -> bool:
    """Return whether the compiler is tracing, or the caller's caller is its own code. Checked on 2.11, 2.13."""
    # Models read shapes all the time, and an attribute that a threading.local lacks takes long to be found missing.
    if torch._guards._TLS.__dict__.get("tracing_context") is not None:
        return True
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back  # a mode's, such as that of torch.set_default_device
    return caller is not None and _is_compiler(str(caller.f_globals.get("__name__")))


def is_in_compiled_function() -> bool:
    """Return whether a function of torch.compile is being called, which may run eagerly. Checked on 2.13."""
    frames = traceback.walk_stack(sys._getframe(1))
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == _COMPILED_CALL for frame, _ in frames)


def is_asked_for_names_only() -> bool:
    """Return whether the calling `__tensor_flatten__` was itself called for the attribute names alone.

    The compiler does so beside a guard that checks the context, or after it. Checked on 2.11, 2.13.
    """
    caller = sys._getframe(2)
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) in _CALLERS_FOR_NAMES


_CALLERS_FOR_NAMES = {
    ("torch._dynamo.guards", "<lambda>"),
    ("torch._functorch._aot_autograd.subclass_utils", "flatten_subclass"),
}

_COMPILED_CALL = ("torch._dynamo.eval_frame", "compile_wrapper")

_COMPILER = ("torch._dynamo.", "torch._functorch.", "torch._subclasses.", "torch._inductor.", "torch.fx.experimental.")


@cache
def _is_compiler(module: str) -> bool:
    """Return whether a module of this name belongs to the compiler."""
    return module.startswith(_COMPILER)
