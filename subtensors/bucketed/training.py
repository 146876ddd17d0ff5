"""Forward and backward of a bucket, each a replay, behind ordinary autograd.

A call is one node of the caller's graph: its forward replays the recorded forward, its backward the recorded backward.
Gradients leave in memory of their own, so that the next bucket overwrites none of them.

Note [When another replay came between]
All graphs share one pool, so a replay overwrites what another bucket's forward left for its backward. Replays are
counted; where one came between a call's forward and its backward, as with two calls in one loss, the forward is
replayed again on the call's inputs, with the random numbers of the first time and the buffers put back.

Note [Leaves of its own]
While a graph of the caller is alive, the nodes that accumulate its parameters' gradients belong to the caller's stream,
and the engine waits for that stream even where it only takes gradients with respect to them. What is recorded therefore
runs on aliases of the parameters: the same memory, other leaves. The caller's hooks run on the caller's nodes alone. A
whole step, which returns nothing that wants a gradient, runs on the parameters themselves: its optimizer reads their
`grad`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from subtensors.bucketed.bucket import Bucket, recording_modes
from subtensors.bucketed.example import kept_state
from subtensors.bucketed.outputs import Outputs
from subtensors.bucketed.state import leaves_behind
from subtensors.dispatch import torch_capture
from subtensors.dispatch.padded.padded_value import is_padded
from subtensors.dispatch.size_expressions import size_on_host
from subtensors.dispatch.size_factors import size_of
from subtensors.kernels.inputs import InputLoad

if TYPE_CHECKING:
    from subtensors.bucketed.arguments import Reading
    from subtensors.bucketed.recorder import Recorder
    from subtensors.bucketed.state import State


GRADIENTS_ON_A_GPU = "gradients are not recorded on a GPU yet"
"""Why calls that autograd follows run at their true sizes there.

Where a graph of the caller is alive, torch's nodes that accumulate the parameters' gradients belong to the caller's
stream, and a captured backward that meets one on the legacy stream is invalidated by CUDA.
"""


class NotDifferentiable(Exception):
    """Gradients can't be recorded here; the message says why."""


class TrainedBucket(Bucket):
    """A bucket whose calls autograd follows; arguments as of `Bucket`."""

    state: State
    backward_graph: torch.cuda.CUDAGraph | None = None
    gradients: list[Tensor | None]
    """Of what is differentiated, static; None where there is none."""
    roots_at: list[int]
    """Which of the outputs want a gradient."""
    is_differentiable = False
    """Do results depend on what wants a gradient? They may not, as those of a whole training step."""
    own: dict[int, nn.Parameter]
    """What the program runs on in place of the parameters; see Note [Leaves of its own]."""
    met: frozenset[int] = frozenset()
    """Ids of parameters that the program reads from elsewhere too, as a list of a module's own: they get no alias."""

    def wanted(self, leaves: Sequence[Any]) -> list[Tensor]:
        """What of a call wants a gradient: arguments that are copied, then tensors that are read where they are."""
        copied = [leaves[source.leaf] for source in self.reading.sources]
        return [x for x in copied if x.requires_grad] + self._fixed()

    def _fixed(self) -> list[Tensor]:
        found = [*self.state.tensors(), *[x for x in self.others.values() if isinstance(x, Tensor)]]
        return list({id(t): t for t in found if t.requires_grad}.values())

    def _take_leaves(self) -> None:
        """Make the leaves that the next runs are on."""
        self.own = self.state.aliases({*self.met, *map(id, self.others.values())}) if self.is_differentiable else {}

    def _differentiated(self) -> list[Tensor]:
        """What stands for `wanted` in the recorded program."""
        return [*[s for s in self.statics if s.requires_grad], *[self.own.get(id(t), t) for t in self._fixed()]]

    def _make_inputs(self, reading: Reading) -> None:
        super()._make_inputs(reading)
        for source, static in zip(reading.sources, self.statics, strict=True):
            static.requires_grad_(source.requires_grad)

    def _forward(self) -> Outputs:
        with self.state.own_leaves(self.own):
            outputs = self.run_on(self.inputs())
        self._check(outputs)
        return outputs

    def _check(self, outputs: Outputs) -> None:
        if any(s.requires_grad and s.dims is not None for s in self.reading.sources):
            raise NotDifferentiable("a PaddedTensor among the arguments wants a gradient: hand over the plain tensor")
        for leaf in outputs.leaves:
            if leaf.rows is not None or any(len(factors) > 1 for factors in leaf.dims or ()):
                raise NotDifferentiable("a result is a ragged batch, or flattened: its gradients have no one shape")

    def run_once(self, host: dict[Any, Any]) -> Any:
        """Warm the libraries up for forward and backward; what the call returns is computed by the caller."""

        def both() -> None:
            outputs = self._forward()
            roots = _roots(outputs)
            if roots:
                self.met |= leaves_behind(roots) & self.own.keys()
                wrt = self._differentiated()
                with self.state.own_leaves(self.own):
                    torch.autograd.grad(roots, wrt, [torch.zeros_like(r) for r in roots], allow_unused=True)

        with recording_modes(records=True):
            self._take_leaves()
            self.pool.run(both) if self.pool is not None else both()

    def record(self) -> None:
        """Capture the forward and the backward; see `Bucket.record`."""
        with recording_modes(records=True):
            self._take_leaves()
            if self.pool is None and not self.is_differentiable:
                self.roots_at, self.outputs = [], Outputs.of(None)
            elif self.pool is None:
                with kept_state(self.state):
                    self._take(self._forward())
                    self._backward_by_host()
            else:
                before = self.pool.bytes()
                started = time.perf_counter()
                self.graph, outputs = self.pool.capture(self._forward)
                self._take(outputs)
                self.is_differentiable = bool(self.roots_at)
                if self.is_differentiable:
                    self.backward_graph, self.gradients = self.pool.capture(self._differentiate)
                self.statistics.graph_bytes = self.pool.bytes() - before
                self.statistics.captures += 1
                self.statistics.capture_ms = (time.perf_counter() - started) * 1e3
            self._forget_autograd()
        if any(alias.grad is not None for alias in self.own.values()):
            raise NotDifferentiable("the program accumulates gradients itself, and returns what wants more")
        self.statistics.is_recorded = True

    def _take(self, outputs: Outputs) -> None:
        self.roots_at = [i for i, leaf in enumerate(outputs.leaves) if _is_root(leaf.value)]
        self.outputs = outputs
        if not hasattr(self, "root_gradients"):
            self.root_gradients = [torch.zeros_like(outputs.leaves[i].value) for i in self.roots_at]
            self._load_gradients: dict[tuple[tuple[int, ...], ...], InputLoad] = {}

    def _differentiate(self) -> list[Tensor | None]:
        assert self.outputs is not None
        roots = [self.outputs.leaves[i].value for i in self.roots_at]
        wrt = self._differentiated()
        # A backward may run parts of the program again.
        with self.state.own_leaves(self.own):
            return list(torch.autograd.grad(roots, wrt, self.root_gradients, allow_unused=True))

    def _backward_by_host(self) -> None:
        self.gradients = self._differentiate() if self.roots_at else []

    def _forget_autograd(self) -> None:
        """Drop the graph behind the static outputs; what it saved is the pool's again."""
        assert self.outputs is not None
        self.outputs = self.outputs.detached()

    def replay(self, host: dict[Any, Any]) -> None:
        """Run the forward on what was loaded."""
        if self.pool is not None:
            super().replay(host)
            return
        with recording_modes(records=True):
            self._take(self._forward())

    def replay_backward(self, gradients: Sequence[Tensor | None], host: dict[Any, Any]) -> list[Tensor | None]:
        """Run the backward.

        Args:
            gradients: of the results that want one, cut to the call's true sizes.
            host: the true sizes.

        Returns:
            The gradients of what `wanted` gives, in memory of their own.
        """
        assert self.outputs is not None
        for at, static, gradient in zip(self.roots_at, self.root_gradients, gradients, strict=True):
            if gradient is None:
                static.zero_()
                continue
            dims = self.outputs.leaves[at].dims or ()
            which = tuple(i if is_padded(factors) else -1 for i, factors in enumerate(dims)) or (-1,) * static.dim()
            sizes = [size_on_host(size_of(factors), host) for factors in dims] or [0]
            self._gradient_load(at, static, which)([gradient.to(static.dtype)], tuple(sizes))
        if self.backward_graph is not None:
            self.backward_graph.replay()
        else:
            with recording_modes(records=True):
                self._backward_by_host()
        return self._cut_gradients(host)

    def _gradient_load(self, at: int, static: Tensor, which: tuple[int, ...]) -> InputLoad:
        key = ((at,), which)
        if key not in self._load_gradients:
            unread = torch.zeros(max(len(which), 1), dtype=torch.int64, device=static.device)
            self._load_gradients[key] = InputLoad([static], [which], unread)
        return self._load_gradients[key]

    def _cut_gradients(self, host: dict[Any, Any]) -> list[Tensor | None]:
        copied = [source for source in self.reading.sources if source.requires_grad]
        found: list[Tensor | None] = []
        for i, gradient in enumerate(self.gradients):
            if gradient is None:
                found.append(None)
            elif i < len(copied):
                source = copied[i]
                true = [
                    n if k < 0 else host[self.reading.dims[k].symbol]
                    for n, k in zip(source.shape, source.which, strict=True)
                ]
                found.append(gradient[tuple(map(slice, true))].clone(memory_format=torch.contiguous_format))
            else:
                found.append(gradient.clone())
        return found

    def forget_graph(self) -> None:
        """Give the memory of both graphs back to the pool."""
        if self.backward_graph is not None and self.pool is not None:
            self.pool.drop(self.backward_graph)
        self.backward_graph = None
        self.gradients = []
        self.own = {}
        if hasattr(self, "root_gradients"):
            del self.root_gradients
        super().forget_graph()


class Replayed(torch.autograd.Function):
    """A call of a recorded bucket as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: TrainedCall, *wanted: Tensor) -> tuple[Tensor, ...]:
        """The results' tensors."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.sources)
        results = call.forward()
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in call.roots_at])
        return tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients of what wanted one."""
        return None, *ctx.call.backward(ctx.saved_tensors, gradients)


class TrainedCall:
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
        reading: Reading,
        lock: Any,
        recorder: Recorder,
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
        self.random = torch_capture.random_place(self.bucket.device)
        outputs = self._replay(self.given)
        del self.given
        self.ticket = self.clock.tick()
        cuts = outputs.cuts(self.reading.host)
        return [cuts[i]() for i in self.tensors_at]

    def _replay(self, leaves: Sequence[Any]) -> Outputs:
        bucket = self.bucket
        if bucket.pool is not None:
            bucket.pool.order()
        bucket.load(leaves, self.reading.sizes)
        bucket.replay(self.reading.host)
        assert bucket.outputs is not None
        return bucket.outputs

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
        with ExitStack() as kept:
            kept.enter_context(kept_state(self.bucket.state))
            torch_capture.go_to_random_place(self.bucket.device, self.random)
            self._replay(leaves)
        self.bucket.statistics.replayed_again += 1


class ReplayClock:
    """Counts what overwrites the memory of graphs."""

    now = 0

    def tick(self) -> int:
        """The count after one more."""
        self.now += 1
        return self.now


def _is_root(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _roots(outputs: Outputs) -> list[Tensor]:
    return [leaf.value for leaf in outputs.leaves if _is_root(leaf.value)]
