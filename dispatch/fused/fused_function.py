"""One function of single-tensor math, run over many tensors at once.

A call is taken apart into tensors, live numbers and static values. The function is traced once for each combination of
static values, kinds of arguments and torch modes (`trace`), and planned once for each combination of shapes, dtypes and
layouts (`plan`). Addresses are read from one small table at launch (`kernels.fused.launch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from subtensors.dispatch.fused.backend_selection import ExecutionKey, route_of, routes_of
from subtensors.dispatch.fused.bound_call import FusedCall
from subtensors.dispatch.fused.errors import name_of
from subtensors.dispatch.fused.executors import EagerExecutor, Executor, TorchExecutor
from subtensors.dispatch.fused.plan import ExecutionPlan, select_rows
from subtensors.dispatch.fused.tensor_columns import (
    Addresses,
    BroadcastColumn,
    ColumnGuard,
    Columns,
    TensorColumn,
    distinct,
)
from subtensors.dispatch.fused.trace import Trace, trace
from subtensors.dispatch.fused.triton_executor import TritonExecutor
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.torch_internals import dispatcher
from subtensors.kernels.fused.launch import Exchange, KernelSet, Prelude, Tiling
from subtensors.kernels.fused.program import Scalar
from subtensors.kernels.fused.tuning import default_tiling, tune, tuned_tiling
from subtensors.kernels.runtime.gc_pause import gc_paused

logger = logging.getLogger("subtensors.fused")

SHARED_ADVICE = "each would write it in turn; pass a list with a tensor for each element, or update it outside"


class FusedFunction:
    """One function of single-tensor math, with the traces, kernels and plans of the calls seen so far.

    Args:
        function: straight-line math on tensors and numbers.
        tiling: how to cut up sweeps; None for the measured tiling, or the default.
        exchange: combines the reductions of tensors that are spread over processes, of which each holds a part. Such
            functions run as kernels, or not at all.

    Example:
        >>> import torch
        >>> decay = FusedFunction(lambda p, rate: p.mul_(1 - rate))
        >>> p = [torch.ones(2), torch.ones(3)]
        >>> _ = decay(TensorColumn(p), 0.5)
        >>> p[1]
        tensor([0.5000, 0.5000, 0.5000])
    """

    # The most plans kept for a key; lists of other shapes have to be planned again.
    PLANS = 32

    def __init__(
        self, function: Callable[..., Any], tiling: Tiling | None = None, exchange: Exchange | None = None
    ) -> None:
        self.function = function
        self.name = name_of(function)
        self.tiling, self.exchange = tiling, exchange
        self.traces = 0
        """The number of times the function was traced."""
        self._traces: dict[Any, Trace] = {}
        self._kernels: dict[Any, KernelSet] = {}
        self._plans: dict[Any, list[ExecutionPlan]] = {}
        self._edition = object()
        """A new object whenever kernels are replaced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function to every element.

        Args:
            args: `TensorColumn` are taken element by element; tensors, numbers and static values (bool, None,
                str) are shared. They may sit in tuples, lists and dicts.
            kwargs: likewise.

        Returns:
            The function's result, with `TensorColumn` in place of tensors; plain tensors when no argument
            was a list.
        """
        return self.run(FusedCall(args, kwargs))

    def run(self, call: FusedCall, prelude: Prelude | None = None) -> Any:
        """Run a call that was taken apart before.

        Args:
            call: the call.
            prelude: a launch that the call depends on; where the call runs as kernels, the two may share a launch.
        """
        columns = call.columns(self.name)
        ready = call.last.ready
        if ready is not None and ready.repeat(call, self._edition, columns, prelude):
            return None
        plan, addresses = self._plan(call, columns)
        numbers = call.numbers()
        group = plan.groups[0][1] if len(plan.groups) == 1 else None
        if prelude is not None and not isinstance(group, TritonExecutor):
            prelude.alone()
        if not plan.groups:
            return None
        overlap = plan.groups_overlap(columns)
        if not overlap and (prelude is None or group is None):
            plan.compile()
        if overlap:
            leaves = plan.mapped.run(columns, numbers)
        elif isinstance(group, TritonExecutor):
            leaves = group.run(columns, numbers, addresses, prelude)
            if group.returned.num_nodes == 1:
                call.last.note(call, self._edition, columns, plan.guards, group)
        elif group is not None:
            leaves = group.run(columns, numbers, addresses)
        else:
            leaves = plan.run_groups(columns, numbers)
        result = plan.groups[0][1].returned
        if not leaves:
            return result.unflatten([None] * result.num_leaves)
        if call.count is None:
            return result.unflatten([None if leaf is None else leaf[0] for leaf in leaves])
        return result.unflatten([None if leaf is None else _as_elements(leaf) for leaf in leaves])

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Describe what a call with these arguments runs, without running it."""
        call = FusedCall(args, kwargs)
        columns = call.columns(self.name)
        plan, _ = self._plan(call, columns)
        lines = [f"{self.name}: {len(columns[0])} elements, traced {self.traces} times"]
        if plan.groups_overlap(columns):
            return "\n".join([*lines, f"  {plan.mapped.describe()}"])
        for indices, group in plan.groups:
            lines.append("  " + group.explain(select_rows(columns, indices)).replace("\n", "\n  "))
        return "\n".join(lines)

    def tune(self, *args: Any, **kwargs: Any) -> dict[str, Tiling]:
        """Choose tile sizes for a call with these arguments by measurement, without running it.

        Measurements run on scratch tensors of their own. The choice is kept on disk (`kernels.fused.tuning_cache`),
        and calls from now on use it. A tiling that was given to this object stays.

        Returns:
            For each device and program that the call runs there, its tiling.
        """
        call = FusedCall(args, kwargs)
        columns = call.columns(self.name)
        chosen: dict[str, Tiling] = {}
        for indices, group in self._plan(call, columns)[0].groups:
            if not isinstance(group, TritonExecutor):
                logger.info("%s: no tile sizes to choose: %s", self.name, group.describe())
            if isinstance(group, EagerExecutor):
                continue
            assert isinstance(group, TritonExecutor | TorchExecutor)
            device = route_of([c[indices[0]] for c in columns], columns).device
            label = f"{device}: {group.trace.program}"
            if label in chosen:
                continue
            chosen[label] = self.tiling or default_tiling(group.trace.program)
            if isinstance(group, TritonExecutor) and self.tiling is None:
                chosen[label] = tune(group.trace.program, group.device)
                if chosen[label] != group.kernels.tiling:
                    self._forget(group.kernels)
        return chosen

    def _forget(self, kernels: KernelSet) -> None:
        """Drop kernels and every plan that launches them."""
        self._edition = object()
        self._kernels = {key: known for key, known in self._kernels.items() if known is not kernels}
        for plans in self._plans.values():
            plans[:] = [p for p in plans if all(getattr(g, "kernels", None) is not kernels for _, g in p.groups)]

    def writes(self, *args: Any, **kwargs: Any) -> tuple[int, ...] | None:
        """The positions of the argument leaves that the function writes to; None when it returns new tensors."""
        call = FusedCall(args, kwargs)
        program = self._first_trace(call).program
        return None if program.outputs else tuple(call.form.tensors[p] for p in program.stores)

    def digest(self, *args: Any, **kwargs: Any) -> str:
        """The text of a call's program and of how its live numbers are computed."""
        traced = self._first_trace(FusedCall(args, kwargs))
        return f"{traced.program} {traced.expressions}"

    def reduces(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a value of the function depends on all elements of a tensor."""
        return any(step.is_reduction for step in self._first_trace(FusedCall(args, kwargs)).program.instructions)

    def takes_parts(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether kernels can run the function on parts of tensors, with an exchange that combines reductions.

        The number of elements of a full tensor is not known there, so the function must not read it.
        """
        traced = self._first_trace(FusedCall(args, kwargs))
        return not traced.unlowered and all(step.name != "numel" for step in traced.program.instructions)

    def takes_tensors_for_numbers(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the function also takes 0-d tensors for its live numbers; an op's `alpha=` does not."""
        program = self._first_trace(FusedCall(args, kwargs)).program
        return all(
            isinstance(declared.type, torch.TensorType)
            for step in program.instructions
            for operand, declared in zip(step.args, step.op._schema.arguments, strict=False)
            if isinstance(operand, Scalar)
        )

    def _first_trace(self, call: FusedCall) -> Trace:
        columns = call.columns(self.name)
        return self._trace(call, route_of([c[0] for c in columns], columns))

    def _plan(self, call: FusedCall, columns: Columns) -> tuple[ExecutionPlan, Addresses]:
        """The plan that fits, and the addresses of the columns as far as finding it read them."""
        plans = self._plans.setdefault(call.key, [])
        for plan in plans:
            addresses = plan.match(columns)
            if addresses is not None:
                return plan, addresses
        plan = self._make_plan(call, columns)
        if any(isinstance(group, TritonExecutor) and group.is_capturing() for _, group in plan.groups):
            # The memory that this plan puts on the device is filled at replay, so no eager call may use it.
            return plan, [None] * len(columns)
        plans.insert(0, plan)
        del plans[self.PLANS :]
        return plan, [None] * len(columns)

    @gc_paused()
    def _make_plan(self, call: FusedCall, columns: Columns) -> ExecutionPlan:
        reason = ""
        if dispatcher.is_transforming():
            reason = "a transform of torch.func or forward-mode differentiation is under way"
        elif torch.is_grad_enabled() and any(t.requires_grad for c in columns for t in distinct(c)):
            reason = "autograd records it"
        count = len(columns[0])
        routes = {ExecutionKey(reason): [*range(count)]} if reason and count else routes_of(columns)
        if self.exchange is not None:
            # Processes exchange group by group, and strides, which differ between them, must not make groups.
            copies = any(route.copies for route in routes)
            merged: dict[ExecutionKey, list[int]] = {}
            for route, indices in routes.items():
                merged.setdefault(replace(route, copies=copies), []).extend(indices)
            routes = {route: sorted(indices) for route, indices in merged.items()}
        groups: list[tuple[list[int], Executor]] = []
        for route, indices in routes.items():
            part = columns if len(indices) == count else select_rows(columns, indices)
            groups.append((indices, self._make_group(call, route, part)))
            if groups[-1][1].reason:
                logger.info("%s: %d of %d elements run as %s", self.name, len(indices), count, groups[-1][1].describe())
        mapped = EagerExecutor(self._apply_to(call), "groups of elements overlap in memory")
        return ExecutionPlan([ColumnGuard(c) for c in columns], groups, mapped)

    def _make_group(self, call: FusedCall, route: ExecutionKey, columns: Columns) -> Executor:
        mapped = EagerExecutor(
            self._apply_to(call), route.reason or "tensors that are written overlap others in memory"
        )
        if self.exchange is not None and (route.reason or not route.triton):
            raise RuleError(f"{self.name} of parts of tensors: {route.reason or f'no kernels on {route.device}'}")
        if route.reason:
            return mapped
        traced = self._trace(call, route)
        for parameter in traced.program.stores:
            is_shared = isinstance(columns[parameter], BroadcastColumn) and len(columns[parameter]) > 1
            if is_shared or route.parameters[parameter].on_host:
                raise RuleError(f"{self.name} writes to a tensor that all elements share: {SHARED_ADVICE}")
        if any(route.parameters[parameter].expanded for parameter in traced.program.stores):
            return mapped  # torch's own ops refuse that, each with its reason
        if traced.unlowered:
            return TorchExecutor(traced, mapped, f"no Triton formula for {', '.join(traced.unlowered)}")
        if not route.triton:
            return TorchExecutor(traced, mapped, "")
        # By text too: Python finds 0.0 and -0.0 equal.
        key = (traced.program, str(traced.program), route.device)
        kernels = self._kernels.get(key)
        if kernels is None:
            kernels = self._kernels[key] = KernelSet(
                traced.program, self.tiling or tuned_tiling(traced.program, torch.device(route.device))
            )
        return TritonExecutor(traced, kernels, columns, mapped, route.copies, self.exchange)

    def _trace(self, call: FusedCall, route: ExecutionKey) -> Trace:
        key = (call.key, route.parameters, route.device)
        if key not in self._traces:
            self._traces[key] = trace(
                self.function, route.parameters, call.form.number_types, call.place, torch.device(route.device)
            )
            self.traces += 1
            logger.debug("traced %s", self._traces[key].program)
        return self._traces[key]

    def _apply_to(self, call: FusedCall) -> Callable[[list[Any], Sequence[float]], Any]:
        # The plan outlives the call; its tensors must not.
        call = call.without_values()

        def apply(tensors: list[Any], numbers: Sequence[float]) -> Any:
            if self.exchange is not None:
                raise RuleError(f"{self.name} of parts of tensors, and what it writes overlaps others in memory")
            args, kwargs = call.place(tensors, numbers)
            return self.function(*args, **kwargs)

        return apply


def _as_elements(leaf: list[Any]) -> Any:
    """One leaf of the result over all elements; None where the function returned nothing."""
    return None if all(value is None for value in leaf) else TensorColumn(leaf)
