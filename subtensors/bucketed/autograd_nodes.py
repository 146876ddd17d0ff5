"""Calls of a captured bucket that are tracked by autograd, each one node of the caller's autograd graph.

The node's forward replays the bucket's forward graph, its backward the bucket's backward graph.

Note [Another replay between forward and backward]
All graphs share one pool, so a replay overwrites what another bucket's forward saved for its backward. Replays are
counted. If one came between a call's forward and its backward, as with two calls in one loss, the forward is replayed
again on the call's inputs, with the same random numbers and buffers, and the buffers are restored afterwards.

Note [Calls inside another program]
If a whole training step is bucketed, its loss may be bucketed too, with `compile`. The step passes on the PaddedTensors
that it was given; they have a bucket's size, and their true sizes are on the device. So the loss runs as its compiled
forward, with its compiled backward as a node of the autograd graph, and both are captured as a part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from subtensors.bucketed.call_spec import CallSpec, LeafDims
from subtensors.bucketed.compiled_gradients import CompiledTrainedBucket
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.outputs import Output, Outputs
from subtensors.bucketed.side_effects import copies, restore_state
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import is_padded, size_of
from subtensors.dispatch.torch_internals import autograd
from subtensors.padded.padded_tensor import PaddedTensor, make_padded


class _TrackedContext(torch.autograd.function.FunctionCtx):
    call: TrainingCall | NestedCall
    saved_tensors: tuple[Tensor, ...]
    maybe_clear_saved_tensors: Callable[[], None]


class TrackedFunction(torch.autograd.Function):
    """A call as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: _TrackedContext, call: TrainingCall | NestedCall, *grad_inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the results."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        results, saved = call.forward()
        # Parameters are saved so that torch checks their versions: the backward reads them in place.
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in call.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: _TrackedContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that require grad."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the gradients of a bucketed program have no gradients; differentiate the program "
                "itself"
            )
        return None, *ctx.call.backward(autograd.release_saved_tensors(ctx), gradients)


class TrainingCall:
    """One call of a bucket that is tracked by autograd.

    Args:
        bucket: a captured bucket.
        leaves: the call's leaves.
        spec: their analysis.
        lock: the runner's lock.
        graphs: the cache that the bucket belongs to.
    """

    def __init__(
        self,
        bucket: TrainedBucket,
        leaves: list[PyTree],
        spec: CallSpec,
        lock: AbstractContextManager[bool],
        graphs: GraphCache,
    ) -> None:
        self.bucket, self.spec, self.lock, self.graphs = bucket, spec, lock, graphs
        self.guard = bucket.state.guard
        self.inputs = [leaves[source.leaf] for source in spec.inputs]
        self.grad_inputs = bucket.grad_inputs(leaves)
        self.leaves: list[PyTree] | None = leaves
        self.num_leaves = len(leaves)
        self.replay_number = -1
        assert bucket.outputs is not None
        # Results may hold other values than tensors; autograd is given the tensors.
        self.tensors_at = [i for i, leaf in enumerate(bucket.outputs.leaves) if isinstance(leaf.value, Tensor)]
        self.roots_at: Collection[int] = {self.tensors_at.index(i) for i in bucket.roots_at}

    def forward(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Load the inputs and replay the forward; the results are cut to their true sizes."""
        assert self.leaves is not None
        self.written = self.bucket.state.written()
        saved = [*copies(self.written), *self.inputs, *self.bucket.grad_tensors_in_place()]
        self.rng_state = capture.rng_state(self.bucket.device)
        outputs = self._replay(self.leaves)
        # Autograd saves what the backward reads, and frees it.
        self.leaves, self.inputs, self.grad_inputs = None, [], []
        self.graphs.replay_count += 1
        self.replay_number = self.graphs.replay_count
        cuts = outputs.cuts(self.spec.host)
        return [cuts[i]() for i in self.tensors_at], saved

    def _replay(self, leaves: Sequence[PyTree]) -> Outputs:
        self.bucket.replay_call(leaves, self.spec)
        assert self.bucket.outputs is not None
        return self.bucket.outputs

    def backward(self, saved: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; before it the forward again, if its saved activations were overwritten."""
        with self.lock, torch.no_grad():
            if not self.bucket.is_captured or self.guard is not self.bucket.state.guard:
                self.graphs.recapture(self.bucket, self.guard)
            if self.bucket.pool is not None:
                self.bucket.pool.wait_for_last_replay()
            if self.replay_number != self.graphs.replay_count:
                self._replay_forward_again(saved[: len(self.written)], saved[len(self.written) :])
            root_gradients = [gradients[self.tensors_at.index(i)] for i in self.bucket.roots_at]
            results = self.bucket.replay_backward(root_gradients, self.spec.host)
            # The backward overwrites the saved activations of its own forward.
            self.graphs.replay_count += 1
            return results

    def _replay_forward_again(self, before: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        leaves: list[PyTree] = [None] * self.num_leaves
        for source, x in zip(self.spec.inputs, inputs, strict=False):
            leaves[source.leaf] = x
        with restore_state(self.bucket.state, self.bucket.device):
            capture.set_rng_state(self.bucket.device, self.rng_state)
            for t, value in zip(self.written, before, strict=True):
                t.copy_(value)
            self._replay(leaves)
        self.bucket.statistics.replayed_again += 1


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
            declared = {d: dim.symbol for d, dim in given.items()}
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


class NestedCall:
    """One call of compiled code on tensors of a bucket's size.

    Args:
        bucket: the bucket of the call's sizes, which is never captured.
        inputs: the tensors that stand for the bucket's static inputs.
        sizes: the true sizes.
    """

    def __init__(self, bucket: CompiledTrainedBucket, inputs: list[Tensor], sizes: TrueSizes | None) -> None:
        self.bucket, self.code, self.inputs, self.sizes = bucket, bucket.code, inputs, sizes
        self.given = [*inputs, *bucket.aliased_parameters()]
        self.roots_at: Collection[int] = []
        self.outputs: Outputs | None = None

    def result(self) -> PyTree:
        """Run the compiled forward; return the program's result."""
        inputs = zip(self.bucket.spec.inputs, self.inputs, strict=False)
        grad_inputs = [*[x for s, x in inputs if s.requires_grad], *self.bucket.grad_tensors_in_place()]
        tensors = iter(TrackedFunction.apply(self, *grad_inputs))  # type: ignore[no-untyped-call]
        assert self.outputs is not None
        leaves = self.outputs.leaves
        return self.outputs.rebuild(
            [self._leaf(x, next(tensors)) if isinstance(x.value, Tensor) else x.value for x in leaves]
        )

    def _leaf(self, output: Output, value: Tensor) -> Tensor:
        return value if output.dims is None else make_padded(PaddedValue(value, output.dims, self.sizes))

    def forward(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Run the compiled forward."""
        self.outputs, roots_at, saved = self.code.forward(self.bucket, self.given)
        at = [i for i, x in enumerate(self.outputs.leaves) if isinstance(x.value, Tensor)]
        self.roots_at = [at.index(i) for i in roots_at]
        return self.outputs.tensors(), saved

    def backward(self, saved: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the compiled backward; the list of saved tensors is emptied."""
        assert self.outputs is not None
        results = self.outputs.tensors()
        given = [gradients[i] for i in self.roots_at]
        roots = [results[i] for i in self.roots_at]
        tangents = [torch.zeros_like(r) if g is None else g.contiguous() for g, r in zip(given, roots, strict=True)]
        return self.code.backward(self.bucket, saved, self.given, tangents)
