"""Evaluation of lazy values: passes over chunks compute partials level by level; ops on replicated values run once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.affine import is_affine
from subtensors.dispatch.chunked.autograd import FusedForwardBackward, RecomputeChunks, forward_only
from subtensors.dispatch.chunked.lazy_graph import (
    Combine,
    LazyValue,
    RowSlice,
    known_tensor,
    replicated,
    without_ambient_modes,
)
from subtensors.dispatch.chunked.lower_statistics import lower_statistics
from subtensors.dispatch.chunked.row_layout import LimitError
from subtensors.dispatch.chunked.schedule import ChunkSchedule
from subtensors.dispatch.ops.tree import PyTree, tree_map, tree_tensors


def evaluate(value: LazyValue) -> Tensor:
    """Compute the tensor of a value, differentiable as its ops were recorded.

    Args:
        value: any value of a region.

    Returns:
        a plain tensor, which requires grad where the value does and gradients are enabled.

    Raises:
        RuleError: a tensor that the region reads was written to after it was recorded.
    """
    full = replicated(value)
    if (tensor := known_tensor(full)) is not None:
        return tensor
    grad = torch.is_grad_enabled() and full.needs_grad
    lower_statistics(full, grad)
    evaluation = _Evaluation(grad)
    try:
        with without_ambient_modes():
            tensor = evaluation.run(full)
    except LimitError as refused:  # a later pass may need more than the one that was refused
        least = max(refused.least, *(plan.least_bytes for plan in passes_for(full)))
        raise LimitError(refused.limit, least, refused.advice) from None
    for temporary in evaluation.without_gradient:
        temporary.tensor = None
    return tensor


def input_tensor(value: LazyValue) -> Tensor:
    """Return the tensor of an input, reshaped and cast as it was recorded."""
    node = value.node
    if node is None or value.tensor is not None:
        return evaluate(replicated(value))
    operand = input_tensor(node.args[0])
    with torch.set_grad_enabled(torch.is_grad_enabled() and node.grad):
        return operand.reshape(value.shape).to(value.dtype)


def passes_for(value: LazyValue) -> list[ChunkSchedule]:
    """Return the passes over chunks that evaluating a value takes, in the order in which they run."""
    return [plan for level in _levels(replicated(value)) for plan in _passes(level)]


def _levels(requested: LazyValue) -> list[list[LazyValue]]:
    """Return the partials still to compute for a value, by level: each level depends on earlier ones only."""
    level_of: dict[int, int] = {}
    levels: list[list[LazyValue]] = []
    stack: list[tuple[LazyValue, bool]] = [(requested, False)]
    while stack:
        value, ready = stack.pop()
        if id(value) in level_of and level_of[id(value)] >= 0:
            continue
        if value.tensor is not None or value.node is None:
            level_of[id(value)] = 0
            continue
        operands = [x.value if isinstance(x, RowSlice) else x for x in value.node.operands()]
        if not ready:
            level_of[id(value)] = -1
            stack.append((value, True))
            stack.extend((v, False) for v in operands)
            continue
        level = max((level_of[id(v)] for v in operands), default=0)
        if value.combine is not None:
            if len(levels) <= level:
                levels.extend([] for _ in range(level + 1 - len(levels)))
            levels[level].append(value)
            level += 1
        level_of[id(value)] = level
    return levels


def _passes(partials: Sequence[LazyValue]) -> list[ChunkSchedule]:
    """Make a pass for the partials of each axis, and one for those that require grad: only it is rerun in backward.

    The results of one op share a pass: passes with and without gradients may have different chunks.
    """
    groups: dict[tuple[int, bool], list[LazyValue]] = {}
    for value in partials:
        assert value.node is not None
        assert value.node.axis is not None
        needs_grad = any(output is not None and output.needs_grad for output in value.node.outputs)
        groups.setdefault((id(value.node.axis.root), needs_grad), []).append(value)
    return [ChunkSchedule(values) for _, values in sorted(groups.items(), key=lambda item: item[0][1])]


class _Evaluation:
    """One evaluation of a lazy value.

    Args:
        grad: whether ops that were recorded as differentiable are differentiated.
    """

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.without_gradient: list[LazyValue] = []
        """Values computed here without their gradient; `evaluate` drops their tensors again."""

    def run(self, requested: LazyValue) -> Tensor:
        """Return the tensor of a replicated value."""
        levels = _levels(requested)
        for level in levels[:-1]:
            self._run_passes(level)
        if levels:
            if self.grad and (number := self._fused_scalar(requested, levels[-1])) is not None:
                return number
            self._run_passes(levels[-1])
        return self._compute(requested)

    def _run_passes(self, partials: Sequence[LazyValue]) -> None:
        for plan in _passes(partials):
            requested, tensors = plan.requested, [self._compute(read) for read in plan.reads]
            plan.release_values()
            differentiable = self.grad and plan.grad
            results = _apply_recompute(plan, tensors) if differentiable else forward_only(plan, tensors)
            for value, tensor in zip(requested, results, strict=True):
                self._set_tensor(value, plan.axis.with_backward_hooks(tensor))

    def _set_tensor(self, value: LazyValue, tensor: Tensor) -> None:
        value.tensor = tensor
        if value.needs_grad and not self.grad:
            self.without_gradient.append(value)

    def _compute(self, requested: LazyValue) -> Tensor:
        """Return the tensor of a replicated value whose partials are known."""
        stack = [requested]
        while stack:
            value = stack[-1]
            if known_tensor(value) is not None:
                stack.pop()
                continue
            node = value.node
            assert node is not None
            missing = [
                v for x in node.operands() if known_tensor(v := x.value if isinstance(x, RowSlice) else x) is None
            ]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            args, kwargs = tree_map(
                (node.args, node.kwargs), lambda x: known_tensor(x) if isinstance(x, LazyValue) else x
            )
            with torch.set_grad_enabled(self.grad and node.grad):
                results = tree_tensors(node.op(*args, **kwargs))
            for output, result in zip(node.outputs, results, strict=True):
                if output is not None:
                    self._set_tensor(output, result)
        tensor = known_tensor(requested)
        assert tensor is not None
        return tensor

    def _fused_scalar(self, requested: LazyValue, partials: Sequence[LazyValue]) -> Tensor | None:
        """Compute a scalar that is affine in its sums, with gradients in the same pass; None for other values."""
        sums = [v for v in partials if v.needs_grad]
        plans = _passes(sums)
        if len(plans) != 1 or not _is_fusable(requested, sums):
            return None
        self._run_passes([v for v in partials if not v.needs_grad])
        (plan,) = plans
        others = _others(requested, sums)
        reads, partials_of = [self._compute(read) for read in plan.reads], plan.requested
        plan.release_values()
        rest = [self._compute(v) for v in others]

        env: dict[int, Tensor] = {}

        def epilogue(totals: Sequence[Tensor], rest: Sequence[Tensor]) -> Tensor:
            env.clear()
            env.update({id(v): t for v, t in zip((*partials_of, *others), (*totals, *rest), strict=True)})
            return _rerun(requested, env)

        out: Tensor = FusedForwardBackward.apply(plan, epilogue, len(reads), *reads, *rest)  # type: ignore[no-untyped-call]
        _observe(requested, env)
        env.clear()
        self._set_tensor(requested, plan.axis.with_backward_hooks(out))
        return out


def _is_fusable(requested: LazyValue, sums: Sequence[LazyValue]) -> bool:
    """Return whether a scalar is affine in sums over chunks; a gradient is no complex multiple of that of one."""
    is_number = requested.meta.numel() == 1 and not requested.dtype.is_complex
    return is_number and all(v.combine is Combine.SUM for v in sums) and is_affine(requested, sums)


def takes_one_pass(requested: LazyValue) -> bool:
    """Return whether one pass computes a scalar together with its gradients."""
    *earlier, last = _levels(requested) or [[]]
    sums = [v for v in last if v.needs_grad]
    is_single = len(_passes(sums)) == 1 and not any(v.needs_grad for level in earlier for v in level)
    return is_single and _is_fusable(requested, sums)


def _observe(requested: LazyValue, env: dict[int, Tensor]) -> None:
    """Keep the values of the numbers that a number is made of."""
    assert requested.node is not None
    stack, seen = [x for x in requested.node.operands() if isinstance(x, LazyValue)], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen or value.combine is not None or value.node is None:
            continue
        seen.add(id(value))
        if id(value) in env:
            value.observed = env[id(value)].detach()
            stack.extend(x for x in value.node.operands() if isinstance(x, LazyValue))


def _apply_recompute(plan: ChunkSchedule, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    results: Sequence[Tensor] = RecomputeChunks.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return results


def _depends(value: LazyValue, on: set[int], memo: dict[int, bool]) -> bool:
    """Return whether a value depends on values of these ids."""
    found = memo.get(id(value))
    if found is None:
        operands = [] if value.node is None or value.tensor is not None else value.node.operands()
        found = id(value) in on or (
            value.combine is None
            and any(_depends(x.value if isinstance(x, RowSlice) else x, on, memo) for x in operands)
        )
        memo[id(value)] = found
    return found


def _others(requested: LazyValue, sums: Sequence[LazyValue]) -> list[LazyValue]:
    """Return the values other than the sums that the ops after the sums read."""
    ids, memo = {id(v) for v in sums}, dict[int, bool]()
    others: dict[int, LazyValue] = {}
    stack, seen = [requested], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in ids or id(value) in seen:
            continue
        seen.add(id(value))
        if not _depends(value, ids, memo):
            others[id(value)] = value
            continue
        assert value.node is not None
        stack.extend(x.value if isinstance(x, RowSlice) else x for x in value.node.operands())
    return list(others.values())


def _rerun(value: LazyValue, env: dict[int, Tensor]) -> Tensor:
    """Compute a value by running the ops between the tensors in `env` and it."""
    if id(value) not in env:
        node = value.node
        assert node is not None

        def at(x: PyTree) -> PyTree:
            return _rerun(x, env) if isinstance(x, LazyValue) else x

        args, kwargs = tree_map((node.args, node.kwargs), at)
        with torch.set_grad_enabled(torch.is_grad_enabled() and node.grad):
            results = tree_tensors(node.op(*args, **kwargs))
        env.update({id(v): t for v, t in zip(node.outputs, results, strict=True) if v is not None})
    return env[id(value)]
