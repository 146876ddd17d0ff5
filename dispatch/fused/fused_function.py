"""One function of single-tensor math, run over many tensors at once.

A Python loop over a thousand tensors costs microseconds an op and tensor, and a compiler that is shown a thousand
tensors takes minutes. So the function is traced once, with proxies for ONE tensor, however many there are:

    call: columns of tensors, dynamic scalars, static values
      | the last call's launch is still valid? -------> repeat it           `bound_call.CachedLaunch`
      | the guards of an earlier plan pass? --------------------+           `tensor_columns.ColumnGuard`
      v                                                         |
    group the elements by device, dtypes and layout             |           `backend_selection`
    trace the function with proxies -> expression graph         |           `trace`, `op_tracer`, `proxies`
    graph -> Triton kernels over a table of pointers,           v
             or straight-line torch code ------------> run the plan         `executors`, `triton_executor`

A *column* is one argument's tensors, in the order of the elements. Traces are cached by static values, argument types
and torch modes, plans by the metadata of the columns. A kernel reads all addresses from a table on the device, and the
dynamic scalars from a few bytes beside it: a new learning rate or a gradient at a new address compiles nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

import optree
import torch
from torch import Tensor

from subtensors.dispatch.fused.backend_selection import NOT_STRIDED, ExecutionKey, execution_key, group_elements
from subtensors.dispatch.fused.bound_call import FusedCall, keep_launch
from subtensors.dispatch.fused.errors import name_of
from subtensors.dispatch.fused.executors import (
    EagerExecutor,
    ExecutionPlan,
    Executor,
    Leaves,
    select_rows,
)
from subtensors.dispatch.fused.read_values import ReadValues
from subtensors.dispatch.fused.tensor_columns import (
    Addresses,
    BroadcastColumn,
    ColumnGuard,
    Columns,
    TensorColumn,
    unique_tensors,
)
from subtensors.dispatch.fused.torch_executor import TorchExecutor
from subtensors.dispatch.fused.trace import Trace, trace
from subtensors.dispatch.fused.triton_executor import TritonExecutor
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.torch_internals.autograd import is_transforming
from subtensors.kernels.fused.launch import Exchange, KernelSet, Tiling
from subtensors.kernels.fused.program import Scalar
from subtensors.kernels.fused.tuning import default_tiling, tune, tuned_tiling
from subtensors.kernels.runtime.gc_pause import gc_paused

logger = logging.getLogger("subtensors.fused")

SHARED_ADVICE = "each would write it in turn; pass a list with a tensor for each element, or update it outside"


class _Variant:
    """The traces and plans for one combination of the values that a function reads besides its arguments."""

    def __init__(self) -> None:
        self.traces: dict[tuple[object, ...], Trace] = {}
        self.plans: dict[tuple[object, ...], list[ExecutionPlan]] = {}
        self.edition = object()
        """A new object whenever kernels are replaced."""


class FusedFunction:
    """One function of single-tensor math, with the traces, kernels and plans of the calls seen so far.

    Args:
        function: straight-line math on tensors and numbers.
        tiling: the tile sizes of sweeps; None for the measured tiling, or the default.
        exchange: combines the reductions of tensors that are spread over processes, each of which holds a part. Such
            functions run as kernels, or not at all.

    Example:
        >>> import torch
        >>> decay = FusedFunction(lambda p, rate: p.mul_(1 - rate))
        >>> p = [torch.ones(2), torch.ones(3)]
        >>> _ = decay(TensorColumn(p), 0.5)
        >>> p[1]
        tensor([0.5000, 0.5000, 0.5000])
    """

    MAX_PLANS = 32
    """Plans kept for a key; lists of other shapes are planned again."""
    MAX_VARIANTS = 32
    """The most combinations of values besides its arguments that a function is traced for."""

    def __init__(
        self, function: Callable[..., PyTree], tiling: Tiling | None = None, exchange: Exchange | None = None
    ) -> None:
        self.function = function
        self.name = name_of(function)
        self.tiling, self.exchange = tiling, exchange
        self.traces = 0
        """The number of times the function was traced."""
        self._kernels: dict[tuple[object, ...], KernelSet] = {}
        self._values: ReadValues | None = None
        """The values besides its arguments that the function read at the last call."""
        self._variants: dict[tuple[object, ...], _Variant] = {}
        self._variant = _Variant()
        """The traces and plans for these values."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Apply the function to every element.

        Args:
            args: `TensorColumn` are taken element by element; tensors, numbers and static values (bool, None,
                str) are shared. They may sit in tuples, lists and dicts.
            kwargs: likewise.

        Returns:
            The function's result, with `TensorColumn` in place of tensors; plain tensors when no argument was a list.
        """
        return self.run(FusedCall(args, kwargs))

    def run(self, call: FusedCall) -> PyTree:
        """Run a call whose arguments are flattened already."""
        self.check_values()
        columns = call.columns(self.name)
        for launch in call.launches:
            if launch.repeat(call, self._variant.edition, columns):
                return None
        plan, addresses = self._plan(call, columns)
        executor = plan.executor
        if executor is not None and not plan.overlap.check(columns, addresses):
            plan.compile()
            leaves = executor.run(columns, call.numbers(), addresses)
            executor.log_note()
            if isinstance(executor, TritonExecutor) and executor.result_spec.num_nodes == 1:
                keep_launch(call, self._variant.edition, columns, addresses, plan.guards, executor)
            return _result(executor.result_spec, leaves, call)
        if not plan.groups:
            return None
        if plan.overlaps(columns):
            leaves = plan.fallback.run(columns, call.numbers())
            plan.fallback.log_note()
            return _result(plan.fallback.result_spec, leaves, call)
        plan.compile()
        leaves = plan.run_groups(columns, call.numbers())
        for _, executor in plan.groups:
            executor.log_note()
        return _result(plan.groups[0][1].result_spec, leaves, call)

    def explain(self, *args: PyTree, **kwargs: PyTree) -> str:
        """Describe what a call with these arguments runs, without running it."""
        self.check_values()
        call = FusedCall(args, kwargs)
        columns = call.columns(self.name)
        plan, _ = self._plan(call, columns)
        for _, executor in plan.groups:
            executor.log_note()
        lines = [f"{self.name}: {len(columns[0])} elements, traced {self.traces} times"]
        if plan.overlaps(columns):
            return "\n".join([*lines, f"  {plan.fallback.describe()}"])
        for indices, executor in plan.groups:
            lines.append("  " + executor.explain(select_rows(columns, indices)).replace("\n", "\n  "))
        return "\n".join(lines)

    def tune(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Tiling]:
        """Choose tile sizes for a call with these arguments by measurement, without running it.

        Measurements run on scratch tensors of their own. The choice is kept on disk (`kernels.fused.tuning`),
        and later calls use it. A tiling that was given to this object stays.

        Returns:
            For each device and program that the call runs there, its tiling.
        """
        self.check_values()
        call = FusedCall(args, kwargs)
        columns = call.columns(self.name)
        chosen: dict[str, Tiling] = {}
        for indices, executor in self._plan(call, columns)[0].groups:
            if not isinstance(executor, TritonExecutor):
                logger.info("%s: no tile sizes to choose: %s", self.name, executor.describe())
            if executor.trace is None:
                continue
            program = executor.trace.program
            label = f"{execution_key([c[indices[0]] for c in columns], columns).device}: {program}"
            if label in chosen:
                continue
            chosen[label] = self.tiling or default_tiling(program)
            if isinstance(executor, TritonExecutor) and self.tiling is None:
                chosen[label] = tune(program, executor.device)
                if chosen[label] != executor.kernels.tiling:
                    self._drop(executor.kernels)
        return chosen

    def _drop(self, kernels: KernelSet) -> None:
        """Drop kernels and every plan that launches them."""
        self._kernels = {key: known for key, known in self._kernels.items() if known is not kernels}
        for variant in self._variants.values():
            variant.edition = object()
        for plans in (plans for variant in self._variants.values() for plans in variant.plans.values()):
            plans[:] = [p for p in plans if all(getattr(g, "kernels", None) is not kernels for _, g in p.groups)]

    def writes(self, *args: PyTree, **kwargs: PyTree) -> tuple[int, ...] | None:
        """The positions of the argument leaves that the function writes to; None when it returns new tensors."""
        call = FusedCall(args, kwargs)
        program = self._first_trace(call).program
        return None if program.outputs else tuple(call.signature.tensors[p] for p in program.stores)

    def digest(self, *args: PyTree, **kwargs: PyTree) -> str:
        """The text of a call's program, and of the expressions of its dynamic scalars."""
        traced = self._first_trace(FusedCall(args, kwargs))
        return f"{traced.program} {traced.expressions}"

    def reduces(self, *args: PyTree, **kwargs: PyTree) -> bool:
        """Return whether a value of the function depends on all elements of a tensor."""
        return any(step.is_reduction for step in self._first_trace(FusedCall(args, kwargs)).program.instructions)

    def takes_parts(self, *args: PyTree, **kwargs: PyTree) -> bool:
        """Return whether kernels can run the function on parts of tensors, with an exchange that combines reductions.

        The number of elements of a full tensor is not known there, so the function must not read it.
        """
        traced = self._first_trace(FusedCall(args, kwargs))
        return not traced.unlowered and all(step.name != "numel" for step in traced.program.instructions)

    def takes_tensors_for_numbers(self, *args: PyTree, **kwargs: PyTree) -> bool:
        """Return whether the function also takes 0-d tensors for its dynamic scalars; an op's `alpha=` does not."""
        program = self._first_trace(FusedCall(args, kwargs)).program
        return all(
            isinstance(declared.type, torch.TensorType)
            for step in program.instructions
            for operand, declared in zip(step.args, step.op._schema.arguments, strict=False)
            if isinstance(operand, Scalar)
        )

    @property
    def reads_values(self) -> bool:
        """Return whether the function reads numbers, strings and the like besides its arguments."""
        self.check_values()
        return self._values is not None and self._values.has_plain

    def read_values(self) -> tuple[object, ...]:
        """The values besides its arguments that the function reads now, in a form that can be compared."""
        self.check_values()
        return () if self._values is None else self._values.key

    def check_values(self) -> None:
        """Read the values besides its arguments that the function reads: where they changed, it is traced anew."""
        if self._values is None or (self._values.readers and not self._values.hold()):
            self._read_values()

    def _read_values(self) -> None:
        values = ReadValues(self.function)
        variant = self._variants.get(values.key)
        if variant is None:
            if not self._variant.traces:
                # Nothing was traced for the last values, and plans without traces fit all.
                self._variants = {key: known for key, known in self._variants.items() if known is not self._variant}
                variant = self._variant
            elif len(self._variants) >= self.MAX_VARIANTS:
                name = (self._values or values).first_difference(values) or "what it reads"
                raise RuleError(
                    f"{self.name} was traced for {self.MAX_VARIANTS} values of what it reads besides its arguments, "
                    f"the last of {values.describe(name)}\n  instead: pass it as an argument: a number that is an "
                    "argument may change at each call"
                )
            else:
                variant = _Variant()
            self._variants[values.key] = variant
        self._values, self._variant = values, variant

    def _refuse_own_writes(self) -> None:
        """Raise RuleError where a trace changed a number or the like that the function reads."""
        if self._values is None or self._values.hold():
            return
        values = ReadValues(self.function)
        if name := self._values.first_difference(values, only_plain=True):
            raise RuleError(
                f"{self.name} changes {values.describe(name)}\n  which it does once, when it is traced, and not at "
                "each call\n  instead: change it outside"
            )
        self._values = values
        self._variants[values.key] = self._variant

    def _first_trace(self, call: FusedCall) -> Trace:
        self.check_values()
        columns = call.columns(self.name)
        return self._trace(call, execution_key([c[0] for c in columns], columns))

    def _plan(self, call: FusedCall, columns: Columns) -> tuple[ExecutionPlan, Addresses]:
        """The plan that fits, and the addresses of the columns as far as its guards read them."""
        plans = self._variant.plans.setdefault(call.key, [])
        for plan in plans:
            addresses = plan.match(columns)
            if addresses is not None:
                return plan, addresses
        plan = self._make_plan(call, columns)
        # What a plan that is captured puts on the device is filled at replay, so no eager call may use it.
        if not any(isinstance(executor, TritonExecutor) and executor.is_capturing() for _, executor in plan.groups):
            plans.insert(0, plan)
            del plans[self.MAX_PLANS :]
        return plan, [None] * len(columns)

    @gc_paused()
    def _make_plan(self, call: FusedCall, columns: Columns) -> ExecutionPlan:
        reason = ""
        if is_transforming():
            reason = "a transform of torch.func or forward-mode differentiation is active"
        elif torch.is_grad_enabled() and any(t.requires_grad for c in columns for t in unique_tensors(c)):
            reason = "autograd records it"
        count = len(columns[0])
        elements = {ExecutionKey(reason): [*range(count)]} if reason and count else group_elements(columns)
        if self.exchange is not None:
            # Processes exchange group by group, and strides, which differ between them, must not make groups.
            copies = any(key.copies for key in elements)
            merged: dict[ExecutionKey, list[int]] = {}
            for key, indices in elements.items():
                merged.setdefault(replace(key, copies=copies), []).extend(indices)
            elements = {key: sorted(indices) for key, indices in merged.items()}
        groups: list[tuple[list[int], Executor]] = []
        for key, indices in elements.items():
            part = columns if len(indices) == count else select_rows(columns, indices)
            executor = self._make_executor(call, key, part)
            groups.append((indices, executor))
            if executor.reason:
                executor.note = f"{self.name}: {len(indices)} of {count} elements run as {executor.describe()}"
        what = "groups of elements overlap" if len(groups) > 1 else "tensors that are written overlap others"
        fallback = EagerExecutor(self._function_of(call), f"{what} in memory")
        strided = sorted(i for key, indices in elements.items() if key.reason != NOT_STRIDED for i in indices)
        fallback.note = f"{self.name}: runs as {fallback.describe()}"
        return ExecutionPlan([ColumnGuard(c) for c in columns], groups, fallback, strided)

    def _make_executor(self, call: FusedCall, key: ExecutionKey, columns: Columns) -> Executor:
        if self.exchange is not None and (key.reason or not key.triton):
            raise RuleError(f"{self.name} of parts of tensors: {key.reason or f'no kernels on {key.device}'}")
        if key.reason:
            return EagerExecutor(self._function_of(call), key.reason)
        traced = self._trace(call, key)
        for parameter in traced.program.stores:
            is_shared = isinstance(columns[parameter], BroadcastColumn) and call.count != 1
            if is_shared or key.parameters[parameter].on_host:
                raise RuleError(f"{self.name} writes to a tensor that all elements share: {SHARED_ADVICE}")
        if any(_has_expanded(columns[parameter]) for parameter in traced.program.stores):
            # Some of torch's own ops refuse that, each with its reason.
            return EagerExecutor(self._function_of(call), "tensors that are written overlap others in memory")
        if traced.unlowered:
            return TorchExecutor(traced, columns, f"no Triton formula for {', '.join(traced.unlowered)}")
        if not key.triton:
            return TorchExecutor(traced, columns, "")
        # By text too: Python finds 0.0 and -0.0 equal.
        kernel_key = (traced.program, str(traced.program), key.device)
        kernels = self._kernels.get(kernel_key)
        if kernels is None:
            tiling = self.tiling or tuned_tiling(traced.program, torch.device(key.device))
            kernels = self._kernels[kernel_key] = KernelSet(traced.program, tiling)
        return TritonExecutor(traced, kernels, columns, key.copies, self.exchange)

    def _trace(self, call: FusedCall, key: ExecutionKey) -> Trace:
        trace_key = (call.key, key.parameters, key.device)
        known = self._variant.traces.get(trace_key)
        if known is None:
            known = trace(
                self.function, key.parameters, call.signature.number_types, call.replace, torch.device(key.device)
            )
            self._refuse_own_writes()
            self._variant.traces[trace_key] = known
            self.traces += 1
            logger.debug("traced %s", known.program)
        return known

    def _function_of(self, call: FusedCall) -> Callable[[Sequence[Tensor], Sequence[float]], PyTree]:
        """The function of one element's tensors and the call's numbers, with the static values of this call."""
        # The plan outlives the call; its tensors must not. Nor does it refer to this object, which holds it.
        call, function, name, takes_parts = call.without_values(), self.function, self.name, self.exchange is not None

        def apply(tensors: Sequence[Tensor], numbers: Sequence[float]) -> PyTree:
            if takes_parts:
                raise RuleError(f"{name} of parts of tensors that are written and overlap others in memory")
            args, kwargs = call.replace(tensors, numbers)
            return function(*args, **kwargs)

        return apply


def _has_expanded(column: Sequence[Tensor]) -> bool:
    """Return whether an element is expanded, so that several of its numbers are one in memory."""
    layouts = set(zip(map(_shape, column), map(Tensor.stride, column), strict=True))
    return any(stride == 0 and size > 1 for layout in layouts for size, stride in zip(*layout, strict=True))


_shape = attrgetter("shape")


def _result(spec: optree.PyTreeSpec, leaves: Leaves, call: FusedCall) -> PyTree:
    """The result of a call: `TensorColumn` as leaves, or plain tensors when no argument was a list."""
    if call.count is None:
        return spec.unflatten([None if leaf is None else leaf[0] for leaf in leaves])
    # A leaf is None where the function returned nothing, of any element.
    columns = (None if leaf is None or all(v is None for v in leaf) else TensorColumn(leaf) for leaf in leaves)
    return spec.unflatten(columns)
