"""What torch keeps private of its compiler, symbols and promotion: one function each, with the versions checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import sympy
import torch

# Torch imports its compiler at the first op that a dispatch mode sees, some seconds on a cold machine: they
# belong to importing this package, not to the first step of a training run.
import torch._dynamo
from torch._ops import OpOverload
from torch.optim import optimizer as _optimizers


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """How torch itself writes `op` in simpler ops; None when it doesn't. Checked on 2.11, 2.13."""
    from torch._decomp import decomposition_table

    table: dict[Any, Callable[..., Any]] = decomposition_table
    return table.get(op) or (op.decompose if op._can_decompose() else None)


def computation_dtype(*args: Any) -> torch.dtype:
    """The dtype torch promotes these tensors and numbers to before it compares them. Checked on 2.11, 2.13."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    _, promoted = elementwise_dtypes(*args, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)
    return promoted


class LiveNumbers:
    """Python numbers whose values a trace must not see: torch's unbacked SymFloat and SymInt.

    Checked on 2.11, 2.13.
    """

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        # It would note and log the source line where each number was made, and import all of inductor for that.
        vars(self._env).update(
            _get_stack_summary=lambda *_, **__: (None, ""), _log_create_unbacked_symbol=lambda *_, **__: None
        )
        self.symbols: list[sympy.Symbol] = []

    def new(self, kind: type[float] | type[int]) -> torch.SymFloat | torch.SymInt:
        """A number of this kind; arithmetic on it is recorded, a decision on it raises what `undecidable()` gives."""
        number: Any = self._env.create_unbacked_symfloat() if kind is float else self._env.create_unbacked_symint()
        self.symbols.append(number.node.expr)
        return number  # type: ignore[no-any-return]

    def compile(self, expression: sympy.Expr) -> Callable[[Sequence[float]], float]:
        """A function from the numbers' values, in order, to the value of an expression of them."""
        from torch.utils._sympy.printers import PythonPrinter

        if expression in self.symbols:
            index = self.symbols.index(expression)
            return lambda values: values[index]
        names = {symbol: sympy.Symbol(f"x{i}") for i, symbol in enumerate(self.symbols)}
        source = PythonPrinter().doprint(expression.xreplace(names))
        arguments = ", ".join(f"x{i}" for i in range(len(self.symbols)))
        function = eval(f"lambda {arguments}: {source}", {"math": math, "torch": torch})
        return lambda values: function(*values)  # type: ignore[no-any-return]


def undecidable() -> type[Exception]:
    """What torch raises when a Python decision needs a live number's value. Checked on 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def expression_of(number: torch.SymFloat | torch.SymInt) -> sympy.Expr:
    """The sympy expression behind a live number. Checked on 2.11, 2.13."""
    return number.node.expr  # type: ignore[no-any-return]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """An overload's schema: its argument names, types and what it writes to. Checked on 2.13."""
    return op._schema


_local_tensor, _placements = attrgetter("_local_tensor"), attrgetter("_spec.placements")


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The part that is here of each DTensor, the very tensor it holds. Checked on 2.11, 2.13.

    As `to_local` gives it where autograd records nothing, but from C, and a list a time.
    """
    parts = list(map(_local_tensor, tensors))
    if set(map(type, parts)) <= {torch.Tensor}:
        return parts
    return [t.to_local() for t in tensors]  # type: ignore[attr-defined]  # of one that a collective still writes


def are_spread_alike(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Has each of these DTensors the placements of the one in its place? Checked on 2.11, 2.13."""
    try:
        # FSDP2 gives a gradient the very placements of its parameter, and lists compare by identity first.
        return list(map(_placements, tensors)) == list(map(_placements, others))
    except AttributeError:  # a plain tensor
        return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill a stretch of memory, each once, in some order? Checked on 2.11, 2.13."""
    import torch._prims_common as prims

    name = "is_non_overlapping_and_dense"
    known = getattr(prims, f"{name}_or_false", None) or getattr(prims, name)
    return tensor.is_contiguous() or bool(known(tensor))


def holding_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without memory, of which each lets C++ hold one of these while it lives. Checked on 2.11, 2.13.

    A tensor that only its Python object holds changes hands, with counts of both, whenever C++ takes it from a list:
    reading the addresses of a thousand and counting writes to them then take twice as long. A view holds its base.
    """
    with torch.no_grad():
        views = [t.view_as(t) for t in tensors]
    empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for view in views:
        # Not the memory, which goes when the tensor is given another by `.data`.
        kind = view.dtype, view.device
        view.data = empty.setdefault(kind, torch.empty(0, dtype=view.dtype, device=view.device))
    return views


class Sharers:
    """How many tensors, and others, hold the memory of these, themselves counted. Checked on 2.11, 2.13."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [t.untyped_storage() for t in tensors]
        self._handles = [storage._cdata for storage in self._storages]

    def counts(self) -> list[int]:
        """Of each storage, in order."""
        return list(map(torch._C._storage_Use_Count, self._handles))  # type: ignore[attr-defined]


def step_is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Does a hook or a profiler want to know of this optimizer's step? Checked on 2.11, 2.13."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _optimizers._global_optimizer_pre_hooks
        or _optimizers._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def is_in_compiler() -> bool:
    """Does torch.compile look at this process's objects just now? Checked on 2.11, 2.13."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id() is not None


def custom_allocator(allocate: Any, free: Any) -> Any:
    """An allocator for `torch.cuda.MemPool` of two C functions, made by ctypes. Checked on 2.11, 2.13.

    Args:
        allocate: `void *(ssize_t size, int device, cudaStream_t stream)`.
        free: `void (void *address, ssize_t size, int device, cudaStream_t stream)`.
    """
    import ctypes

    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, free)]
    return torch._C._cuda_customAllocator(*addresses)  # type: ignore[attr-defined, arg-type]


def use_count(tensor: torch.Tensor) -> int:
    """How many hold this tensor in C++, its Python object being one: autograd, reducers. Checked on 2.11, 2.13."""
    return int(torch.Tensor._use_count(tensor))  # type: ignore[attr-defined]


def holds_of_base(view: torch.Tensor, base: torch.Tensor) -> int:
    """How many references to its base a view holds, as another view of it would. Checked on 2.11, 2.13.

    >>> pairs = torch.zeros(2, dtype=torch.complex64)
    >>> holds_of_base(pairs[1:], pairs), holds_of_base(torch.view_as_real(pairs), pairs)
    (1, 2)
    """
    before = use_count(base)
    with torch.no_grad():
        another = torch.Tensor.view_as(view, view)
    held = use_count(base) - before
    del another
    return held


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tells the tensor's storage from all others. Checked on 2.11, 2.13."""
    return int(tensor.untyped_storage()._cdata)


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors hold the tensor's storage, in C++ and in Python. Checked on 2.11, 2.13."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


class _Nowhere(torch.Tensor):
    """A tensor on the meta device that counts as one of another device where memory is exchanged."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def take_memory(tensor: torch.Tensor, message: str) -> torch.Tensor:
    """Leave a tensor without memory, so that C++ that reads or writes it raises rather than ends the process.

    Checked on 2.11 with CUDA, and 2.13 without. There the tensor is on the meta device meanwhile; errors are torch's.
    A leaf whose gradient a graph is to accumulate stays as it is there: the gradient would follow it to the device.

    Args:
        tensor: of any class that has a storage.
        message: of the error.

    Returns:
        The memory, to be given back with `give_memory`.

    >>> t = torch.ones(2)
    >>> memory = take_memory(t, "it is away")
    >>> torch.func.vmap(torch.neg)(t)
    Traceback (most recent call last):
    ...
    RuntimeError: ...
    >>> give_memory(t, memory)
    >>> t
    tensor([1., 1.])
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        memory = torch.Tensor.detach(tensor)
        if (release := getattr(torch._C, "_set_storage_access_error_msg", None)) is not None:
            release(tensor, message)
        elif not _awaits_gradient(tensor):
            count = memory.untyped_storage().nbytes() // memory.element_size()
            nothing = torch.empty(count, dtype=memory.dtype, device="meta")
            nothing = nothing.as_strided(memory.shape, memory.stride(), memory.storage_offset())
            nowhere = torch.Tensor._make_subclass(_Nowhere, nothing, False, device_for_backend_keys=memory.device)
            give_memory(tensor, nowhere)
        return memory


def _awaits_gradient(tensor: torch.Tensor) -> bool:
    """Does a graph, or whoever hooked it, hold the node that accumulates this leaf's gradient? Checked on 2.13."""
    if not (tensor.is_leaf and tensor.requires_grad):
        return False

    def notes() -> dict[str, bool]:
        with torch.enable_grad():
            node: Any = torch.Tensor.view_as(tensor, tensor).grad_fn
        return node.next_functions[0][0].metadata  # type: ignore[no-any-return]

    notes()["asked"] = True  # of a node that nobody holds, nothing is left
    return notes().pop("asked", False)


def give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor the memory that was taken from it, with its place there."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, memory)  # type: ignore[attr-defined]


def treat_as_plain(kind: type[torch.Tensor]) -> None:
    """Count a subclass that is read as a plain tensor among the types that torch treats as one.

    Compiled code checks the types that it hands to aten ops at its first call, and refuses others (2.13; 2.11 does not
    check); torch.optim takes its foreach and fused paths for some types alone. Checked on 2.11, 2.13.
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    optimizer._foreach_supported_types.append(kind)
    _foreach_utils._foreach_supported_types.append(kind)  # type: ignore[arg-type]
    known = getattr(runtime_wrappers, "HANDLED_TYPES", None)
    if known is not None:
        runtime_wrappers.HANDLED_TYPES = (*known, kind)  # type: ignore[attr-defined]


def is_tracing() -> bool:
    """Is the compiler tracing a function, or is the caller's caller code of its own? Checked on 2.11, 2.13."""
    from torch._guards import TracingContext

    if TracingContext.try_get() is not None:
        return True
    asker: FrameType | None = sys._getframe(2)
    while asker is not None and asker.f_code.co_name == "__torch_function__":
        asker = asker.f_back  # a mode's, such as that of torch.set_default_device
    return asker is not None and str(asker.f_globals.get("__name__")).startswith(_COMPILER)


def asks_names_alone() -> bool:
    """Is the caller `__tensor_flatten__`, asked for names alone, beside a guard that looks at the context, or after it?

    Checked on 2.11, 2.13.
    """
    asker = sys._getframe(2)
    return (asker.f_globals.get("__name__"), asker.f_code.co_name) in _ASK_NAMES


_ASK_NAMES = {
    ("torch._dynamo.guards", "<lambda>"),
    ("torch._functorch._aot_autograd.subclass_utils", "flatten_subclass"),
}

_COMPILER = ("torch._dynamo.", "torch._functorch.", "torch._subclasses.", "torch._inductor.", "torch.fx.experimental.")


F = TypeVar("F", bound=Callable[..., Any])


def runs_outside_of_graphs(function: F) -> F:
    """A function at which compiled code breaks its graph, to run it as it stands."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]
