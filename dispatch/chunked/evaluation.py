"""Evaluation of lazy values: passes over chunks compute partials level by level; ops on replicated values run once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.affine import affine_ops
from subtensors.dispatch.chunked.autograd import FusedForwardBackward, RecomputeChunks, forward_only
from subtensors.dispatch.chunked.lazy_graph import (
    Combine,
    LazyNode,
    LazyValue,
    computation,
    known_tensor,
    replicated,
    without_ambient_modes,
)
from subtensors.dispatch.chunked.lower_statistics import lower_statistics
from subtensors.dispatch.chunked.row_layout import LimitError
from subtensors.dispatch.chunked.schedule import ChunkSchedule, axis_of
from subtensors.dispatch.ops.tree import tree_find, tree_map_only


def evaluate(value: LazyValue) -> Tensor:
    """Compute the tensor of a value, differentiable as its ops were recorded.

    Returns:
        a plain tensor, which requires grad where the value does and gradients are enabled.

    Raises:
        RuleError: a tensor that the region reads was written to after it was recorded.
    """
    return evaluate_together([value])[0]


def evaluate_together(values: Sequence[LazyValue], riders: Sequence[LazyValue] = ()) -> list[Tensor]:
    """Compute the tensors of values, differentiable as their ops were recorded, in passes that they share.

    Args:
        values: any values.
        riders: values that are computed, too, where these passes can yield them: a number that requires grad is
            `observed` then, a value that doesn't has its tensor.

    Returns:
        the tensors of the values, as `evaluate` returns them.
    """
    if torch.is_inference_mode_enabled():  # other values may be computed from what is, which needs version counters
        with torch.inference_mode(False), torch.no_grad():
            return evaluate_together(values, riders)
    full = [replicated(value) for value in values]
    missing = [value for value in full if known_tensor(value) is None]
    if missing:
        grad = torch.is_grad_enabled() and any(value.needs_grad for value in missing)
        riding = [replicated(rider) for rider in riders]
        lower_statistics([*missing, *riding], grad)
        evaluation = _Evaluation(grad)
        try:
            with without_ambient_modes():
                evaluation.run(missing, riding)
        except LimitError as refused:  # a later pass may need more than the one that was refused
            least = max(refused.least, *(plan.least_bytes for value in missing for plan in passes_for(value)))
            raise LimitError(refused.limit, least, refused.advice) from None
        tensors = [_known(value) for value in full]
        evaluation.release({*full, *riding})
        for rider, whole in zip(riders, riding, strict=True):
            rider.tensor = whole.tensor
        return tensors
    return [_known(value) for value in full]


def may_ride(value: LazyValue, beside: LazyValue) -> bool:
    """Return whether the passes for one value can yield another one, too."""
    return bool(_riding([replicated(value)], _levels([replicated(beside)])))


def passes_for(value: LazyValue) -> list[ChunkSchedule]:
    """Return the passes over chunks that evaluating a value takes, in the order in which they run."""
    return [plan for level in _levels([replicated(value)]) for plan in _passes(level)]


def _levels(requested: Sequence[LazyValue]) -> list[list[LazyValue]]:
    """Return the partials still to compute for some values, by level: each level depends on earlier ones only."""
    level_of: dict[LazyValue, int] = {}
    levels: list[list[LazyValue]] = []
    for value in computation(requested):
        level = max((level_of.get(v, 0) for v in (value.node.operands() if value.node else ())), default=0)
        if value.combine is not None:
            if level == len(levels):
                levels.append([])
            levels[level].append(value)
            level += 1
        level_of[value] = level
    return levels


def _passes(partials: Sequence[LazyValue], rides: Sequence[LazyValue] = ()) -> list[ChunkSchedule]:
    """Make a pass for the partials of each axis; backward runs those again that require grad, and don't only ride."""
    return [
        ChunkSchedule([v for v in partials if axis_of(v) is root], [v for v in rides if axis_of(v) is root])
        for root in dict.fromkeys(map(axis_of, partials))
    ]


def _riding(riders: Sequence[LazyValue], levels: Sequence[Sequence[LazyValue]]) -> list[LazyValue]:
    """Return the riders that passes for these levels of partials can compute, too."""
    axes = [set(map(axis_of, level)) for level in levels]

    def fits(own: list[list[LazyValue]]) -> bool:
        return len(own) <= len(axes) and all({*map(axis_of, level)} <= at for level, at in zip(own, axes, strict=False))

    return [rider for rider in riders if fits(_levels([rider]))]


class _Evaluation:
    """One evaluation of lazy values.

    Args:
        grad: whether ops that were recorded as differentiable are differentiated.
    """

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.without_gradient: list[LazyValue] = []
        """Values computed here without their gradient; `release` drops their tensors again."""
        self.views: list[LazyValue] = []
        """Values in the memory of others: `release` drops them, so that the next use sees a write to that memory."""

    def run(self, requested: Sequence[LazyValue], riders: Sequence[LazyValue]) -> None:
        """Compute replicated values, and those riders that passes for them can yield."""
        levels = _levels(requested)
        riders = _riding(riders, levels)
        riding = _levels(riders)
        try:
            for n, level in enumerate(levels):
                own = {id(v) for v in level}
                rides = [v for v in riding[n] if id(v) not in own] if n < len(riding) else []
                is_last = n == len(levels) - 1 and self.grad and len(requested) == 1
                if not (is_last and self._run_fused(requested[0], level, rides)):
                    self._run_passes(level, rides)
            for value in requested:
                self._compute(value)
            self._observe(riders)
        except BaseException:
            self.release()
            raise

    def release(self, results: Collection[LazyValue] = ()) -> None:
        """Drop the tensors of values that were computed without their gradient, and views other than the results."""
        for temporary in (*self.without_gradient, *(value for value in self.views if value not in results)):
            temporary.tensor = None

    def _run_passes(self, partials: Sequence[LazyValue], rides: Sequence[LazyValue] = ()) -> None:
        for plan in _passes(partials, rides):
            requested, tensors = plan.requested, self._inputs(plan)
            plan.release_values()
            run: Callable[..., Sequence[Tensor]] = RecomputeChunks.apply if self.grad and plan.grad else forward_only
            results = run(plan, *tensors)
            for value, tensor, has_gradient in zip(requested, results, plan.differentiated, strict=True):
                self._set_tensor(value, plan.axis.with_backward_hooks(tensor), self.grad and has_gradient)

    def _inputs(self, plan: ChunkSchedule) -> list[Tensor]:
        tensors = [self._compute(read) for read in plan.reads]
        return [x if read.has_gradient else x.detach() for read, x in zip(plan.inputs, tensors, strict=True)]

    def _set_tensor(self, value: LazyValue, tensor: Tensor, has_gradient: bool | None = None) -> None:
        value.tensor = tensor
        if value.needs_grad and not (self.grad if has_gradient is None else has_gradient):
            self.without_gradient.append(value)

    def _observe(self, riders: Sequence[LazyValue]) -> None:
        """Keep the numbers of riders whose partials are known."""
        grad, self.grad = self.grad, False
        for rider in riders:
            tensor = self._compute(rider)
            if rider.needs_grad:
                rider.observed = tensor.detach()
        self.grad = grad

    def _compute(self, requested: LazyValue) -> Tensor:
        """Return the tensor of a replicated value whose partials are known."""
        for value in computation([requested]):
            node = value.node
            assert node is not None
            if value.tensor is not None:  # computed with another result of its op
                continue
            operands = {x: _known(x) for x in node.operands()}
            results = _run(node, operands, self.grad)
            owners = [x if x._base is None else x._base for x in operands.values()]
            for output, result in zip(node.outputs, results, strict=True):
                if output is not None:
                    self._set_tensor(output, result)
                    if any(result._base is owner for owner in owners):
                        self.views.append(output)
        return _known(requested)

    def _run_fused(self, requested: LazyValue, partials: Sequence[LazyValue], rides: Sequence[LazyValue]) -> bool:
        """Compute a scalar that is affine in its sums, with gradients in the same pass; return False for others."""
        sums = [v for v in partials if v.needs_grad]
        chain = _fusable(requested, sums) if len({*map(axis_of, sums)}) == 1 else None
        if chain is None:
            return False
        self._run_passes([v for v in partials if not v.needs_grad])
        (plan,) = _passes(sums, [v for v in rides if v.tensor is None])
        others = _others(sums, chain)
        reads, yielded = self._inputs(plan), plan.requested
        plan.release_values()
        rest = [self._compute(v) for v in others]

        def epilogue(totals: Sequence[Tensor], rest: Sequence[Tensor]) -> Tensor:
            return _rerun(requested, dict(zip((*sums, *others), (*totals, *rest), strict=True)))

        out, *results = FusedForwardBackward.apply(plan, epilogue, len(reads), *reads, *rest)  # type: ignore[no-untyped-call]
        for value, tensor in zip(yielded, results, strict=True):
            self._set_tensor(value, tensor, has_gradient=False)
        self._set_tensor(requested, plan.axis.with_backward_hooks(out))
        return True


def _fusable(requested: LazyValue, sums: Sequence[LazyValue]) -> list[LazyValue] | None:
    """Return the values between sums over chunks and a scalar that is affine in them; None where it is none.

    A gradient is no complex multiple of that of a sum.
    """
    is_number = requested.meta.numel() == 1 and not requested.dtype.is_complex
    return affine_ops(requested, sums) if is_number and all(v.combine is Combine.SUM for v in sums) else None


def takes_one_pass(requested: LazyValue) -> bool:
    """Return whether one pass computes a scalar together with its gradients."""
    *earlier, last = _levels([requested]) or [[]]
    sums = [v for v in last if v.needs_grad]
    is_single = len(_passes(sums)) == 1 and not any(v.needs_grad for level in earlier for v in level)
    return is_single and _fusable(requested, sums) is not None


def _others(sums: Sequence[LazyValue], chain: Collection[LazyValue]) -> list[LazyValue]:
    """Return the values other than the sums that the ops after the sums read."""
    read = dict.fromkeys(x for value in chain if value.node is not None for x in value.node.operands())
    known = {*chain, *sums}
    return [x for x in read if x not in known]


def _rerun(requested: LazyValue, env: dict[LazyValue, Tensor]) -> Tensor:
    """Compute a value by running the ops between the tensors in `env` and it."""
    for value in computation([requested], env.__contains__):
        if value not in env:
            assert value.node is not None
            results = _run(value.node, env, torch.is_grad_enabled())
            env.update({v: t for v, t in zip(value.node.outputs, results, strict=True) if v is not None})
    return env[requested]


def _known(value: LazyValue) -> Tensor:
    tensor = known_tensor(value)
    assert tensor is not None
    return tensor


def _run(node: LazyNode, env: Mapping[LazyValue, Tensor], grad: bool) -> list[Tensor]:
    """Return the results of an op on replicated values, differentiable as it was recorded if `grad` is set."""
    args, kwargs = tree_map_only(LazyValue, env.__getitem__, (node.args, node.kwargs))
    with torch.set_grad_enabled(grad and node.grad):
        return tree_find(Tensor, node.op(*args, **kwargs))
