"""Private torch APIs of ops, symbols, shards and the compiler: one function each, with the versions checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.optim import optimizer as _optimizers

from subtensors.dispatch.torch_internals.requires import requires

if TYPE_CHECKING:
    import sympy


@requires("torch._decomp.decomposition_table", "torch._ops.OpOverload._can_decompose")
def decomposition_of(op: OpOverload) -> Callable[..., object] | None:
    """Return torch's own decomposition of `op` into simpler ops; None if it has none. Checked on 2.11, 2.13."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(op) or (op.decompose if op._can_decompose() else None)


@requires("torch._C._len_torch_function_stack", otherwise=lambda: torch.get_default_device())
def default_device() -> torch.device | None:
    """Return the default device of new tensors; None if none was set. Checked on 2.11, 2.13."""
    # Only modes set one; torch's own function takes longer than this check that there is none.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


@requires("torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND", "torch._prims_common.elementwise_dtypes")
def computation_dtype(*args: torch.Tensor | float | None) -> torch.dtype:
    """Return the dtype that torch promotes tensors and numbers to before it compares them. Checked on 2.11, 2.13."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    _, promoted = elementwise_dtypes(*args, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)
    return promoted


class SymbolicScalars:
    """Python numbers whose values a trace must not read: torch's unbacked SymFloat and SymInt.

    Checked on 2.11, 2.13.
    """

    @requires("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        # It would log the source line where each number was made, and import all of inductor for that.
        vars(self._env).update(
            _get_stack_summary=lambda *_, **__: (None, ""), _log_create_unbacked_symbol=lambda *_, **__: None
        )
        self.symbols: list[sympy.Symbol] = []

    def new(self, kind: type[float] | type[int]) -> torch.SymFloat | torch.SymInt:
        """Make a number: arithmetic on it is recorded, a Python decision raises `data_dependent_error()`."""
        number = self._env.create_unbacked_symfloat() if kind is float else self._env.create_unbacked_symint()
        self.symbols.append(number.node.expr)
        return number

    @requires("torch.utils._sympy.printers.PythonPrinter")
    def compile(self, expression: sympy.Expr) -> Callable[[Sequence[float]], float]:
        """Return a function from the numbers' values, in order, to the value of an expression of them."""
        from torch.utils._sympy.printers import PythonPrinter

        if expression in self.symbols:
            return itemgetter(self.symbols.index(expression))
        import sympy

        names = {symbol: sympy.Symbol(f"x{i}") for i, symbol in enumerate(self.symbols)}
        source = PythonPrinter().doprint(expression.xreplace(names))
        arguments = ", ".join(f"x{i}" for i in range(len(self.symbols)))
        function = eval(f"lambda {arguments}: {source}", {"math": math, "torch": torch})
        return lambda values: function(*values)  # type: ignore[no-any-return]


@requires("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode")
def data_dependent_error() -> type[Exception]:
    """Return the exception of a Python decision that needs a dynamic scalar's value. Checked on 2.11, 2.13."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def sympy_expression(number: torch.SymFloat | torch.SymInt) -> sympy.Expr:
    """Return the sympy expression behind a dynamic scalar. Checked on 2.11, 2.13."""
    return number.node.expr  # type: ignore[no-any-return]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return an overload's schema: its argument names, types and what it writes to. Checked on 2.13."""
    return op._schema


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


@requires("torch._guards.TracingContext.try_get", otherwise=torch.compiler.is_compiling)
def is_tracing() -> bool:
    """Return whether the compiler is tracing, or the caller's caller is its own code. Checked on 2.11, 2.13."""
    from torch._guards import TracingContext

    if TracingContext.try_get() is not None:
        return True
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back  # a mode's, such as that of torch.set_default_device
    return caller is not None and str(caller.f_globals.get("__name__")).startswith(_COMPILER)


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

_COMPILER = ("torch._dynamo.", "torch._functorch.", "torch._subclasses.", "torch._inductor.", "torch.fx.experimental.")
