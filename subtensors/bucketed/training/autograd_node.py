"""Calls of a captured bucket that are tracked by autograd, each one node of the caller's autograd graph.

The node's forward replays the bucket's forward graph, its backward the bucket's backward graph.

Note [When another replay came between]
All graphs share one pool, so a replay overwrites what another bucket's forward saved for its backward. Replays are
counted. If one came between a call's forward and its backward, as with two calls in one loss, the forward is replayed
again on the call's inputs, with the same random numbers, and the buffers are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.outputs import Outputs
from subtensors.bucketed.state.rollback import restore_state
from subtensors.dispatch.graphs import capture

if TYPE_CHECKING:
    from subtensors.bucketed.calls.call_spec import CallSpec
    from subtensors.bucketed.graph_cache import GraphCache
    from subtensors.bucketed.training.trained_bucket import TrainedBucket


def refuse_second_order() -> None:
    """Raise RuntimeError if a backward is itself to be differentiable (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the gradients of a bucketed program have no gradients; differentiate the program itself"
        )


class ReplayFunction(torch.autograd.Function):
    """A call of a captured bucket as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: TrainingCall, *wanted: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the results."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Parameters are saved so that torch checks their versions: the backward reads them in place.
        ctx.save_for_backward(*call.sources, *call.bucket.fixed())
        results = call.forward()
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in call.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradients of the inputs that require grad."""
        refuse_second_order()
        call: TrainingCall = ctx.call
        return None, *call.backward(ctx.saved_tensors[: len(call.reading.sources)], gradients)


class TrainingCall:
    """One call of a bucket that is tracked by autograd.

    Args:
        bucket: a captured bucket.
        leaves: the call's leaves.
        reading: their analysis.
        lock: the runner's lock.
        recorder: the bucket's graph cache; it counts replays, and recaptures evicted graphs.
    """

    def __init__(
        self,
        bucket: TrainedBucket,
        leaves: list[Any],
        reading: CallSpec,
        lock: Any,
        recorder: GraphCache,
    ) -> None:
        self.bucket, self.reading, self.lock, self.recorder = bucket, reading, lock, recorder
        self.clock = recorder.replays
        self.leaves: list[Any] = [None] * len(leaves)
        self.sources = [leaves[source.leaf] for source in reading.sources]
        self.wanted = bucket.wanted(leaves)
        self.given = leaves
        assert bucket.outputs is not None
        # Results may hold other values than tensors; autograd is given the tensors.
        self.tensors_at = [i for i, leaf in enumerate(bucket.outputs.leaves) if isinstance(leaf.value, Tensor)]
        self.roots_at = {self.tensors_at.index(i) for i in bucket.roots_at}

    def forward(self) -> list[Tensor]:
        """Load the inputs, replay the forward, and return the tensors among the results, cut to their true sizes."""
        self.random = capture.rng_state(self.bucket.device)
        outputs = self._replay(self.given)
        # Autograd saves what the backward reads, and frees it.
        del self.given, self.sources, self.wanted
        self.ticket = self.clock.tick()
        cuts = outputs.cuts(self.reading.host)
        return [cuts[i]() for i in self.tensors_at]

    def _replay(self, leaves: Sequence[Any]) -> Outputs:
        self.bucket.replay_call(leaves, self.reading)
        assert self.bucket.outputs is not None
        return self.bucket.outputs

    def backward(self, sources: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; before it the forward again, if its saved activations were overwritten."""
        with self.lock, torch.no_grad():
            if not self.bucket.is_recorded:
                self.recorder.record_again(self.bucket)
                if not self.bucket.is_recorded:
                    raise RuntimeError(f"the graph of this call can't be recorded again: {self.bucket.refusal}")
                self.clock.tick()
            if self.bucket.pool is not None:
                self.bucket.pool.wait_for_last_replay()
            if self.ticket != self.clock.now:
                self._replay_again(sources)
            of_roots = [gradients[self.tensors_at.index(i)] for i in self.bucket.roots_at]
            found = self.bucket.replay_backward(of_roots, self.reading.host)
            # The backward overwrites the saved activations of its own forward.
            self.clock.tick()
            return found

    def _replay_again(self, sources: Sequence[Tensor]) -> None:
        leaves = list(self.leaves)
        for source, x in zip(self.reading.sources, sources, strict=True):
            leaves[source.leaf] = x
        state = self.bucket.state
        with ExitStack() as kept:
            kept.enter_context(restore_state(state, state.at_risk(), [self.bucket.device]))
            capture.set_rng_state(self.bucket.device, self.random)
            self._replay(leaves)
        self.bucket.statistics.replayed_again += 1


class ReplayCounter:
    """A counter of the replays that overwrite the memory of graphs."""

    now = 0

    def tick(self) -> int:
        """Count one more replay; return the new count."""
        self.now += 1
        return self.now
