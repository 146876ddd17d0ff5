"""A pass as one autograd function: `RecomputeChunks` for any results, `FusedForwardBackward` for one scalar.

`RecomputeChunks` runs the chunks forward, and in backward runs each again with its part of the gradient: correct for
any gradient, at the cost of a second forward.

`FusedForwardBackward` is for a scalar f(s_1, s_2, ...) of sums s_i over chunks, with f affine in the sums. Then the
tangents df / ds_i are known before the sums are. So each chunk runs forward and backward at once, and backward
multiplies the gradients by the upstream one. The first backward returns them; a second one runs the chunks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.chunked.lazy_graph import without_ambient_modes
from subtensors.dispatch.chunked.run_chunks import Gradients, Results, chunk_leaves, chunk_tangent, run_chunk
from subtensors.dispatch.chunked.schedule import ChunkSchedule
from subtensors.dispatch.ops.errors import RuleError

Epilogue = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""A function from the sums over chunks and other tensors to the scalar."""


def forward_only(plan: ChunkSchedule, *tensors: Tensor) -> list[Tensor]:
    """Compute the results of a pass, chunk by chunk, without gradients."""
    results = Results(plan)
    _run_chunks(plan, tensors, [False] * len(tensors), results)
    return results.finish()


def differentiate(
    plan: ChunkSchedule,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    upstream: Sequence[Tensor | None],
    results: Results | None = None,
) -> Gradients:
    """Compute the gradients of a pass for given gradients of its results (None where a result has none).

    Args:
        plan: the pass.
        tensors: its inputs; None for those that backward doesn't read.
        needed: for each of them, whether its gradient is needed.
        upstream: the gradients of its results.
        results: what collects the results; None where they are known already.
    """
    gradients = Gradients(plan, tensors, needed)
    _run_chunks(plan, tensors, needed, results, gradients, upstream)
    return gradients


def _run_chunks(
    plan: ChunkSchedule,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    results: Results | None,
    gradients: Gradients | None = None,
    upstream: Sequence[Tensor | None] = (),
) -> None:
    """Run each chunk forward, and backward where there are gradients to add to; arguments as `differentiate`."""
    with torch.no_grad(), without_ambient_modes():
        for span in plan.spans:
            leaves = chunk_leaves(plan, span, tensors, needed)
            outputs = run_chunk(plan, span, leaves, gradients, results is not None)
            if results is not None:
                results.add(span, outputs)
            if gradients is not None:
                given = zip(outputs, plan.outputs, upstream, strict=True)
                parts = [(o, v, u) for o, v, u in given if o is not None and u is not None]
                tangents = [chunk_tangent(plan, v, span, u).to(o.dtype) for o, v, u in parts]
                gradients.add(span, leaves, [o for o, _, _ in parts], tangents)
                del given, parts, tangents
            del leaves, outputs


class _RecomputeContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    plan: ChunkSchedule


class RecomputeChunks(torch.autograd.Function):
    """The results of a pass; backward reruns each chunk."""

    @staticmethod
    def forward(ctx: _RecomputeContext, plan: ChunkSchedule, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the pass. Args: the pass, and the tensors that it reads."""
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*plan.differentiated_reads(tensors))  # type: ignore[arg-type]  # None is fine
        results = forward_only(plan, *tensors)
        ctx.mark_non_differentiable(*(t for t, has in zip(results, plan.differentiated, strict=True) if not has))
        return tuple(results)

    @staticmethod
    def backward(ctx: _RecomputeContext, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors that the pass reads."""
        tensors = ctx.saved_tensors
        gradients = differentiate(ctx.plan, tensors, ctx.needs_input_grad[1:], upstream)
        taken = gradients.take()
        return None, *once_differentiable((taken.get(n) for n in range(len(tensors))), (*tensors, *upstream))


class _FusedContext(FunctionCtx):
    """The state that forward keeps for backward.

    Args:
        plan: the pass.
        count: the number of its inputs, the first of the saved tensors.
        scale: a power of two, the tangents' common factor.
        tangents: the gradients of the sums, divided by the scale.
        gradients: of the inputs, divided by the scale; None once they were returned.
        other_gradients: of the other saved tensors.
    """

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    plan: ChunkSchedule
    count: int
    scale: Tensor
    tangents: list[Tensor]
    gradients: Gradients | None
    other_gradients: list[Tensor | None]


class FusedForwardBackward(torch.autograd.Function):
    """A scalar that is affine in sums over chunks; forward computes its gradients, too."""

    @staticmethod
    def forward(
        ctx: _FusedContext, plan: ChunkSchedule, epilogue: Epilogue, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the pass, and return the scalar and the results of the pass, which have no gradient.

        The tensors are `count` inputs of the pass, then the others that the epilogue takes after the sums.
        """
        ctx.plan, ctx.count = plan, count
        ctx.set_materialize_grads(False)
        reads, others = tensors[:count], tensors[count:]
        has_gradient = ctx.needs_input_grad[3 + count :]
        kept = (tensor if has else None for tensor, has in zip(others, has_gradient, strict=True))
        ctx.save_for_backward(*plan.differentiated_reads(reads), *kept)  # type: ignore[arg-type]  # None is fine
        needed = ctx.needs_input_grad[3 : 3 + count]
        factors = _sum_gradients(plan, epilogue, others)
        ctx.scale, ctx.tangents = _normalized(factors)
        results = Results(plan)
        ctx.gradients = differentiate(plan, reads, needed, _upstream(ctx), results)
        totals = results.finish()
        ctx.mark_non_differentiable(*totals)
        return _epilogue_result(ctx, epilogue, totals[: len(ctx.tangents)], others), *totals

    @staticmethod
    def backward(ctx: _FusedContext, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the gradients that forward computed by the incoming gradient."""
        grad, tensors = upstream[0], ctx.saved_tensors
        if grad is None:
            return (None,) * (3 + len(tensors))
        grad = grad.reshape(())
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            needed = ctx.needs_input_grad[3 : 3 + ctx.count]
            gradients = differentiate(ctx.plan, tensors[: ctx.count], needed, _upstream(ctx))
        with torch.no_grad():
            taken = gradients.take(grad * ctx.scale)
        others = [None if g is None else g * grad.to(g.dtype) for g in ctx.other_gradients]
        return (
            None,
            None,
            None,
            *once_differentiable([*(taken.get(n) for n in range(ctx.count)), *others], (*tensors, grad)),
        )


def _upstream(ctx: _FusedContext) -> list[Tensor | None]:
    """Return the gradients of the results: those of the sums, which come first."""
    return [*ctx.tangents, *[None] * (len(ctx.plan.outputs) - len(ctx.tangents))]


def _sum_gradients(plan: ChunkSchedule, epilogue: Epilogue, others: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative of the scalar by each sum, which doesn't depend on the sums."""
    with torch.enable_grad(), without_ambient_modes():
        sums = [
            torch.zeros(v.shape, dtype=v.dtype, device=v.device, requires_grad=True)
            for v, has_gradient in zip(plan.outputs, plan.differentiated, strict=True)
            if has_gradient
        ]
        out = epilogue(sums, [t.detach() for t in others])
        return list(torch.autograd.grad(out, sums, torch.ones_like(out), materialize_grads=True))


def _normalized(factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a power of two and the factors divided by it, the largest near one: 1 / tokens is 0 in float16."""
    largest = torch.stack([f.abs().amax().to(torch.float32) for f in factors]).amax()
    mantissa, _ = torch.frexp(largest)
    usable = torch.isfinite(largest) & (largest > 0)
    # By division, which is exact here: torch 2.11 runs ldexp on the current device, wherever its operands are.
    scale = torch.where(usable, largest / (2 * mantissa), 1.0)
    return scale, [f / scale.to(f.dtype) for f in factors]


def _epilogue_result(
    ctx: _FusedContext, epilogue: Epilogue, sums: Sequence[Tensor], others: Sequence[Tensor]
) -> Tensor:
    """Compute the scalar, and keep for backward the gradients of the other tensors that it depends on."""
    needed = ctx.needs_input_grad[3 + ctx.count :]
    leaves = [t.detach().requires_grad_(n) for t, n in zip(others, needed, strict=True)]
    with torch.set_grad_enabled(any(needed)), without_ambient_modes():
        out = epilogue(sums, leaves)
        inputs = [t for t in leaves if t.requires_grad]
        grads = iter(torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True) if inputs else ())
    ctx.other_gradients = [next(grads) if n else None for n in needed]
    return out.detach()


def once_differentiable(grads: Iterable[Tensor | None], of: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that can't be differentiated: a second backward through them raises RuleError.

    Args:
        grads: the gradients.
        of: what they were computed from. Without edges to it, a second gradient of it would be said to be none.
    """
    if not torch.is_grad_enabled():
        return list(grads)
    sources = [t for t in of if t is not None and t.requires_grad]
    refuse: Callable[..., Tensor] = _RefuseSecondBackward.apply
    return [None if g is None else refuse(g.requires_grad_(), *sources) for g in grads]


class _RefuseSecondBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> NoReturn:
        raise RuleError(
            "a ChunkedTensor can't be differentiated twice: its chunks are gone; compute from the plain tensor for "
            "a second derivative"
        )
