"""Calls of a bucketed program inside another: they run its compiled code, and have no CUDA graph of their own.

If a whole training step is bucketed, its loss may be bucketed too, with `compile`. The step passes on the PaddedTensors
that it was given; they have a bucket's size, and their true sizes are on the device. So the loss runs as its compiled
forward, with its compiled backward as a node of the autograd graph, and both are captured as a part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subtensors.bucketed.autograd_node import refuse_second_order
from subtensors.bucketed.calls.call_spec import LeafDims
from subtensors.bucketed.calls.outputs import Output, Outputs
from subtensors.bucketed.compilation.compiled_gradients import CompiledGradients
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import is_padded, size_of
from subtensors.dispatch.torch_internals import autograd
from subtensors.padded.padded_tensor import PaddedTensor, make_padded


def unwrap_padded_leaves(
    leaves: Sequence[PyTree], places: Sequence[LeafDims]
) -> tuple[list[PyTree], TrueSizes | None] | None:
    """Return the leaves with PaddedTensors replaced by their storages, and the true sizes that these share.

    Args:
        leaves: the leaves of a call.
        places: for each leaf its place, and the padded dims that the program declares.

    Returns:
        None if a leaf is padded in another way than the program declares.
    """
    found: list[PyTree] = []
    sizes: TrueSizes | None = None
    for x, (_, given) in zip(leaves, places, strict=True):
        if isinstance(x, PaddedTensor):
            declared = {d % x.dim(): dim.symbol for d, dim in (given or {}).items()}
            padded = {d: size_of(factors) for d, factors in enumerate(x._dims) if is_padded(factors)}
            own = x._sizes
            if own is None or own.rows is not None or padded != declared or sizes not in (None, own):
                return None
            sizes = own
            found.append(x._dense)
        elif isinstance(x, Tensor) and given:
            return None
        else:
            found.append(x)
    return found, sizes


class _NestedCallContext(torch.autograd.function.FunctionCtx):
    run: NestedCall
    saved_tensors: tuple[Tensor, ...]
    maybe_clear_saved_tensors: Callable[[], None]


class _CompiledFunction(torch.autograd.Function):
    """The compiled forward and backward of a program as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: _NestedCallContext, run: NestedCall, *grad_inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the results."""
        ctx.set_materialize_grads(False)
        ctx.run = run
        results, saved = run.forward()
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in run.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: _NestedCallContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that require grad."""
        refuse_second_order()
        return None, *ctx.run.backward(autograd.release_saved_tensors(ctx), gradients)


class NestedCall:
    """One call of compiled code on tensors of a bucket's size.

    Args:
        code: the compiled code of the bucket.
        bucket: the bucket of the call's sizes, which is never captured.
        inputs: the tensors that stand for the bucket's static inputs.
        sizes: the true sizes.
    """

    def __init__(
        self, code: CompiledGradients, bucket: TrainedBucket, inputs: list[Tensor], sizes: TrueSizes | None
    ) -> None:
        self.code, self.bucket, self.inputs, self.sizes = code, bucket, inputs, sizes
        self.given = [*inputs, *bucket.aliased_parameters()]
        self.roots_at: list[int] = []
        self.outputs: Outputs | None = None

    def result(self) -> PyTree:
        """Run the compiled forward; return the program's result."""
        inputs = zip(self.bucket.spec.inputs, self.inputs, strict=False)
        grad_inputs = [*[x for s, x in inputs if s.requires_grad], *self.bucket.grad_tensors_in_place()]
        tensors = iter(_CompiledFunction.apply(self, *grad_inputs))  # type: ignore[no-untyped-call]
        assert self.outputs is not None
        leaves = self.outputs.leaves
        return self.outputs.rebuild(
            [self._leaf(x, next(tensors)) if isinstance(x.value, Tensor) else x.value for x in leaves]
        )

    def _leaf(self, output: Output, value: Tensor) -> Tensor:
        return value if output.dims is None else make_padded(PaddedValue(value, output.dims, self.sizes))

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run the compiled forward; return the tensors among the results, and those saved for the backward."""
        self.outputs, roots_at, saved = self.code.forward(self.bucket, self.given)
        at = [i for i, x in enumerate(self.outputs.leaves) if isinstance(x.value, Tensor)]
        self.roots_at = [at.index(i) for i in roots_at]
        return self.outputs.tensors(), saved

    def backward(self, saved: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs that require grad; the list of saved tensors is emptied."""
        assert self.outputs is not None
        results = self.outputs.tensors()
        given = [gradients[i] for i in self.roots_at]
        roots = [results[i] for i in self.roots_at]
        tangents = [torch.zeros_like(r) if g is None else g.contiguous() for g, r in zip(given, roots, strict=True)]
        return self.code.backward(self.bucket, saved, self.given, tangents)
