"""A call of a recorded bucket that autograd follows: one node of the caller's graph.

Its forward replays the bucket's forward, its backward the bucket's backward.

Note [When another replay came between]
All graphs share one pool, so a replay overwrites what another bucket's forward left for its backward. Replays are
counted; where one came between a call's forward and its backward, as with two calls in one loss, the forward is
replayed again on the call's inputs, with the random numbers of the first time and the buffers put back.
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
    """Raise RuntimeError where a backward is asked to be differentiable itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the gradients of a bucketed program have no gradients; differentiate the program itself"
        )


class ReplayFunction(torch.autograd.Function):
    """A call of a recorded bucket as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: TrainingCall, *wanted: Tensor) -> tuple[Tensor, ...]:
        """The results' tensors."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Parameters for torch to see if one was written to before the backward, which reads them where they are.
        ctx.save_for_backward(*call.sources, *call.bucket.fixed())
        results = call.forward()
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in call.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients of what wanted one."""
        refuse_second_order()
        call: TrainingCall = ctx.call
        return None, *call.backward(ctx.saved_tensors[: len(call.reading.sources)], gradients)


class TrainingCall:
    """One call of a bucket that autograd follows.

    Args:
        bucket: recorded.
        leaves: the call's.
        reading: what they are.
        lock: of the runner.
        recorder: of the bucket; it counts replays, and records again what was evicted.
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
        # Results are tensors and others; autograd is told of the tensors.
        self.tensors_at = [i for i, leaf in enumerate(bucket.outputs.leaves) if isinstance(leaf.value, Tensor)]
        self.roots_at = {self.tensors_at.index(i) for i in bucket.roots_at}

    def forward(self) -> list[Tensor]:
        """Load and replay."""
        self.random = capture.random_place(self.bucket.device)
        outputs = self._replay(self.given)
        # Autograd holds what the backward reads, and lets go of it.
        del self.given, self.sources, self.wanted
        self.ticket = self.clock.tick()
        cuts = outputs.cuts(self.reading.host)
        return [cuts[i]() for i in self.tensors_at]

    def _replay(self, leaves: Sequence[Any]) -> Outputs:
        self.bucket.replay_call(leaves, self.reading)
        assert self.bucket.outputs is not None
        return self.bucket.outputs

    def backward(self, sources: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; before it the forward again, if its traces are gone."""
        with self.lock, torch.no_grad():
            if not self.bucket.is_recorded:
                self.recorder.record_again(self.bucket)
                if not self.bucket.is_recorded:
                    raise RuntimeError(f"the graph of this call can't be recorded again: {self.bucket.refusal}")
                self.clock.tick()
            if self.bucket.pool is not None:
                self.bucket.pool.order()
            if self.ticket != self.clock.now:
                self._replay_again(sources)
            of_roots = [gradients[self.tensors_at.index(i)] for i in self.bucket.roots_at]
            found = self.bucket.replay_backward(of_roots, self.reading.host)
            # Its own traces are gone with it.
            self.clock.tick()
            return found

    def _replay_again(self, sources: Sequence[Tensor]) -> None:
        leaves = list(self.leaves)
        for source, x in zip(self.reading.sources, sources, strict=True):
            leaves[source.leaf] = x
        state = self.bucket.state
        with ExitStack() as kept:
            kept.enter_context(restore_state(state, state.at_risk(), [self.bucket.device]))
            capture.go_to_random_place(self.bucket.device, self.random)
            self._replay(leaves)
        self.bucket.statistics.replayed_again += 1


class ReplayCounter:
    """Counts what overwrites the memory of graphs."""

    now = 0

    def tick(self) -> int:
        """The count after one more."""
        self.now += 1
        return self.now
