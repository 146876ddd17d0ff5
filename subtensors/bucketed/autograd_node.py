"""Calls of a captured bucket that are tracked by autograd, each one node of the caller's autograd graph.

The node's forward replays the bucket's forward graph, its backward the bucket's backward graph.

Note [Another replay between forward and backward]
All graphs share one pool, so a replay overwrites what another bucket's forward saved for its backward. Replays are
counted. If one came between a call's forward and its backward, as with two calls in one loss, the forward is replayed
again on the call's inputs, with the same random numbers, and the buffers are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from subtensors.bucketed.calls.call_spec import CallSpec
from subtensors.bucketed.calls.outputs import Outputs
from subtensors.bucketed.state.rollback import restore_state
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.tree import PyTree


class ReplayedGraphs(Protocol):
    """The cache of graphs that a call belongs to: it counts replays, and recaptures evicted graphs."""

    replay_count: int
    """The number of replays so far; each overwrites what earlier ones left in the graphs' memory."""

    def recapture(self, bucket: TrainedBucket) -> None:
        """Capture an evicted bucket again."""
        ...


def refuse_second_order() -> None:
    """Raise RuntimeError if a backward is itself to be differentiable (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the gradients of a bucketed program have no gradients; differentiate the program itself"
        )


class _ReplayContext(torch.autograd.function.FunctionCtx):
    call: TrainingCall
    saved_tensors: tuple[Tensor, ...]


class ReplayFunction(torch.autograd.Function):
    """A call of a captured bucket as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: _ReplayContext, call: TrainingCall, *grad_inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the results."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Parameters are saved so that torch checks their versions: the backward reads them in place.
        ctx.save_for_backward(*call.inputs, *call.bucket.grad_tensors_in_place())
        results = call.forward()
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in call.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: _ReplayContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs that require grad."""
        refuse_second_order()
        call = ctx.call
        return None, *call.backward(ctx.saved_tensors[: len(call.spec.inputs)], gradients)


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
        graphs: ReplayedGraphs,
    ) -> None:
        self.bucket, self.spec, self.lock, self.graphs = bucket, spec, lock, graphs
        self.inputs = [leaves[source.leaf] for source in spec.inputs]
        self.grad_inputs = bucket.grad_inputs(leaves)
        self.leaves: list[PyTree] | None = leaves
        self.num_leaves = len(leaves)
        self.replay_number = -1
        assert bucket.outputs is not None
        # Results may hold other values than tensors; autograd is given the tensors.
        self.tensors_at = [i for i, leaf in enumerate(bucket.outputs.leaves) if isinstance(leaf.value, Tensor)]
        self.roots_at = {self.tensors_at.index(i) for i in bucket.roots_at}

    def forward(self) -> list[Tensor]:
        """Load the inputs, replay the forward, and return the tensors among the results, cut to their true sizes."""
        assert self.leaves is not None
        self.rng_state = capture.rng_state(self.bucket.device)
        outputs = self._replay(self.leaves)
        # Autograd saves what the backward reads, and frees it.
        self.leaves, self.inputs, self.grad_inputs = None, [], []
        self.replay_number = self._count_replay()
        cuts = outputs.cuts(self.spec.host)
        return [cuts[i]() for i in self.tensors_at]

    def _count_replay(self) -> int:
        self.graphs.replay_count += 1
        return self.graphs.replay_count

    def _replay(self, leaves: Sequence[PyTree]) -> Outputs:
        self.bucket.replay_call(leaves, self.spec)
        assert self.bucket.outputs is not None
        return self.bucket.outputs

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; before it the forward again, if its saved activations were overwritten."""
        with self.lock, torch.no_grad():
            if not self.bucket.is_captured:
                self.graphs.recapture(self.bucket)
                if not self.bucket.is_captured:
                    raise RuntimeError(f"the graph of this call can't be recaptured: {self.bucket.no_graph_reason}")
                self._count_replay()
            if self.bucket.pool is not None:
                self.bucket.pool.wait_for_last_replay()
            if self.replay_number != self.graphs.replay_count:
                self._replay_forward_again(inputs)
            root_gradients = [gradients[self.tensors_at.index(i)] for i in self.bucket.roots_at]
            results = self.bucket.replay_backward(root_gradients, self.spec.host)
            # The backward overwrites the saved activations of its own forward.
            self._count_replay()
            return results

    def _replay_forward_again(self, inputs: Sequence[Tensor]) -> None:
        leaves: list[PyTree] = [None] * self.num_leaves
        for source, x in zip(self.spec.inputs, inputs, strict=True):
            leaves[source.leaf] = x
        state = self.bucket.state
        with restore_state(state, state.tensors_to_restore(), [self.bucket.device]):
            capture.set_rng_state(self.bucket.device, self.rng_state)
            self._replay(leaves)
        self.bucket.statistics.replayed_again += 1
