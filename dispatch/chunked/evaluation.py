"""Evaluation of lazy values: passes over chunks compute partials level by level; ops on whole values run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.affine import is_affine
from subtensors.dispatch.chunked.autograd import FusedForwardBackward, RecomputeChunks, forward_only
from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, RowSlice, gathered, known
from subtensors.dispatch.chunked.run_chunks import as_recorded
from subtensors.dispatch.chunked.schedule import ChunkSchedule
from subtensors.dispatch.ops.tree import tree_map, tree_tensors


def evaluate(value: LazyValue) -> Tensor:
    """The tensor of a value, with the gradients that its ops were recorded with.

    Args:
        value: any value of a region.

    Returns:
        a plain tensor, differentiable where gradients are enabled and the value needs one.

    Raises:
        RuleError: a tensor that the region reads was written to since.
    """
    whole = gathered(value)
    if (tensor := known(whole)) is not None:
        return tensor
    evaluation = _Evaluation(torch.is_grad_enabled() and whole.needs_grad)
    with as_recorded():
        tensor = evaluation.run(whole)
    for passing in evaluation.without_gradient:
        passing.tensor = None
    return tensor


def passes_for(value: LazyValue) -> list[ChunkSchedule]:
    """The passes over chunks that evaluating a value takes, in the order in which they run."""
    return [plan for level in _levels(gathered(value)) for plan in _passes(level)]


def _levels(asked: LazyValue) -> list[list[LazyValue]]:
    """The unknown partials that a value depends on, by level: each level depends on earlier ones only."""
    level_of: dict[int, int] = {}
    levels: list[list[LazyValue]] = []
    stack: list[tuple[LazyValue, bool]] = [(asked, False)]
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
        if value.join is not None:
            if len(levels) <= level:
                levels.extend([] for _ in range(level + 1 - len(levels)))
            levels[level].append(value)
            level += 1
        level_of[id(value)] = level
    return levels


def _passes(partials: Sequence[LazyValue]) -> list[ChunkSchedule]:
    """One pass for the partials of each axis, and another for those that require grad: only it is rerun in backward.

    The results of one op share a pass: passes with and without gradients may have different chunks.
    """
    groups: dict[tuple[int, bool], list[LazyValue]] = {}
    for value in partials:
        assert value.node is not None
        assert value.node.axis is not None
        flows = any(made is not None and made.needs_grad for made in value.node.outputs)
        groups.setdefault((id(value.node.axis.root), flows), []).append(value)
    return [ChunkSchedule(values) for _, values in sorted(groups.items(), key=lambda item: item[0][1])]


class _Evaluation:
    """One evaluation of a lazy value.

    Args:
        grad: whether the ops that were recorded with a gradient keep it.
    """

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.without_gradient: list[LazyValue] = []
        """Values computed here without their gradient; `evaluate` drops their tensors again."""

    def run(self, asked: LazyValue) -> Tensor:
        """The tensor of a whole value."""
        levels = _levels(asked)
        for level in levels[:-1]:
            self._pass_over(level)
        if levels:
            if self.grad and (number := self._as_one_number(asked, levels[-1])) is not None:
                return number
            self._pass_over(levels[-1])
        return self._whole(asked)

    def _pass_over(self, partials: Sequence[LazyValue]) -> None:
        for plan in _passes(partials):
            asked, tensors = plan.asked, [self._whole(read) for read in plan.reads]
            plan.let_go()
            differentiable = self.grad and plan.grad
            results = _recomputed(plan, tensors) if differentiable else forward_only(plan, tensors)
            for value, tensor in zip(asked, results, strict=True):
                self._keep(value, plan.axis.prepared(tensor))

    def _keep(self, value: LazyValue, tensor: Tensor) -> None:
        value.tensor = tensor
        if value.needs_grad and not self.grad:
            self.without_gradient.append(value)

    def _whole(self, asked: LazyValue) -> Tensor:
        """The tensor of a whole value whose partials are known."""
        stack = [asked]
        while stack:
            value = stack[-1]
            if known(value) is not None:
                stack.pop()
                continue
            node = value.node
            assert node is not None
            missing = [v for x in node.operands() if known(v := x.value if isinstance(x, RowSlice) else x) is None]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            args, kwargs = tree_map((node.args, node.kwargs), lambda x: known(x) if isinstance(x, LazyValue) else x)
            with torch.set_grad_enabled(self.grad and node.grad):
                results = tree_tensors(node.op(*args, **kwargs))
            for output, tensor in zip(node.outputs, results, strict=True):
                if output is not None:
                    self._keep(output, tensor)
        whole = known(asked)
        assert whole is not None
        return whole

    def _as_one_number(self, asked: LazyValue, partials: Sequence[LazyValue]) -> Tensor | None:
        """Compute a scalar that is affine in its sums, with gradients in the same pass; None for other values."""
        flowing = [v for v in partials if v.needs_grad]
        if asked.meta.numel() != 1 or any(v.join is not Combine.SUM for v in flowing) or not is_affine(asked, flowing):
            return None
        plans = _passes(flowing)
        if len(plans) != 1:
            return None
        self._pass_over([v for v in partials if not v.needs_grad])
        (plan,) = plans
        others = _others(asked, flowing)
        reads, sums_of = [self._whole(read) for read in plan.reads], plan.asked
        plan.let_go()
        rest = [self._whole(v) for v in others]

        def epilogue(sums: Sequence[Tensor], rest: Sequence[Tensor]) -> Tensor:
            env = {id(v): t for v, t in zip((*sums_of, *others), (*sums, *rest), strict=True)}
            return _replayed(asked, env)

        out: Tensor = FusedForwardBackward.apply(plan, epilogue, len(reads), *reads, *rest)  # type: ignore[no-untyped-call]
        self._keep(asked, plan.axis.prepared(out))
        return out


def _recomputed(plan: ChunkSchedule, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    results: Sequence[Tensor] = RecomputeChunks.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return results


def _depends(value: LazyValue, on: set[int], memo: dict[int, bool]) -> bool:
    found = memo.get(id(value))
    if found is None:
        operands = [] if value.node is None or value.tensor is not None else value.node.operands()
        found = id(value) in on or (
            value.join is None and any(_depends(x.value if isinstance(x, RowSlice) else x, on, memo) for x in operands)
        )
        memo[id(value)] = found
    return found


def _others(asked: LazyValue, sums: Sequence[LazyValue]) -> list[LazyValue]:
    """The values other than the sums that the ops after the sums read."""
    ids, memo = {id(v) for v in sums}, dict[int, bool]()
    others: dict[int, LazyValue] = {}
    stack, seen = [asked], set[int]()
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


def _replayed(value: LazyValue, env: dict[int, Tensor]) -> Tensor:
    """Compute a value by running the ops between the tensors in `env` and it."""
    if id(value) not in env:
        node = value.node
        assert node is not None

        def at(x: Any) -> Any:
            return _replayed(x, env) if isinstance(x, LazyValue) else x

        args, kwargs = tree_map((node.args, node.kwargs), at)
        with torch.set_grad_enabled(torch.is_grad_enabled() and node.grad):
            results = tree_tensors(node.op(*args, **kwargs))
        env.update({id(v): t for v, t in zip(node.outputs, results, strict=True) if v is not None})
    return env[id(value)]
