"""The forward and the backward of a bucket, each a CUDA graph; `ReplayFunction` makes them a node of autograd.

Gradients are returned in memory of their own, so that the next bucket does not overwrite them.

Note [Leaves of its own]
While a graph of the caller is alive, the nodes that accumulate its parameters' gradients belong to the caller's stream,
and the engine waits for that stream even if it only takes gradients with respect to them. The captured program
therefore runs on aliases of the parameters: the same memory, but other leaves. The caller's hooks run only on the
caller's nodes. A whole training step, none of whose results require grad, runs on the parameters themselves: its
optimizer reads their `grad`. These, and tensors without an alias, get new nodes before a capture.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subtensors.bucketed.bucket import Bucket, recording_modes
from subtensors.bucketed.calls.outputs import Outputs
from subtensors.bucketed.compilation.compile_cache import CompileCache
from subtensors.bucketed.compilation.compiled_gradients import CompiledGradients
from subtensors.bucketed.state.program_state import leaves_behind
from subtensors.bucketed.state.rollback import restore_state
from subtensors.bucketed.training.side_effects import SideEffects
from subtensors.dispatch.sizes.dim_factors import Factors, is_padded, size_of
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import autograd
from subtensors.kernels.graph_inputs.inputs import InputLoader

if TYPE_CHECKING:
    from subtensors.bucketed.calls.call_spec import CallSpec
    from subtensors.bucketed.state.program_state import State
    from subtensors.dispatch.graphs.pool import GraphPool


class NotDifferentiable(Exception):
    """Gradients cannot be captured here; the message says why."""


class TrainedBucket(Bucket):
    """A bucket whose calls are tracked by autograd; it takes the arguments of `Bucket`."""

    state: State
    backward_graph: torch.cuda.CUDAGraph | None = None
    gradients: list[Tensor | None]
    """The static gradients of the differentiated tensors; None for a tensor that gets none."""
    roots_at: list[int]
    """The indices of the outputs that require grad."""
    root_gradients: Sequence[Tensor] = ()
    """The static tensors from which the backward reads the gradients of these outputs."""
    _root_loads: dict[int, InputLoader]
    """By the index of the output, the load that copies a caller's gradient there."""
    is_differentiable = False
    """True if a result requires grad; none does in a whole training step, for example."""
    own: dict[int, nn.Parameter]
    """The aliases that the program runs on in place of the parameters; see Note [Leaves of its own]."""
    gradients_code: CompiledGradients | None = None
    """The program and its gradients as compiled code, if that is asked for."""
    is_compiled = False
    saved: Sequence[Tensor] = ()
    """The tensors that the compiled forward saved for the backward."""
    first_leaves: frozenset[int] = frozenset()
    """Ids of the leaves that the first call's results depend on."""
    met: frozenset[int] = frozenset()
    """Ids of parameters that the program also reads from elsewhere, such as a list in a module: they get no alias."""

    def take_code(self, code: CompileCache) -> None:
        """See `Bucket`."""
        self.gradients_code = code.of(self, CompiledGradients)

    def wanted(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of a call that require grad: copied arguments, then tensors that are read in place."""
        copied = [leaves[source.leaf] for source in self.reading.sources]
        return [x for x in copied if x.requires_grad] + self.fixed()

    def fixed(self) -> list[Tensor]:
        """Return the tensors that are read in place and require grad."""
        found = [*self.state.tensors(), *[x for x in self.others.values() if isinstance(x, Tensor)]]
        return list({id(t): t for t in found if t.requires_grad}.values())

    def _take_leaves(self) -> None:
        """Make the aliases that the next runs use."""
        self.own = self._aliases() if self.is_differentiable else {}

    def _aliases(self) -> dict[int, nn.Parameter]:
        return self.state.aliases({*self.met, *map(id, self.others.values())})

    def replaced(self) -> list[Tensor]:
        """Return the parameters that can be replaced by aliases when the program runs."""
        aliases = self._aliases()
        return [t for t in self.fixed() if id(t) in aliases]

    def _differentiated(self) -> list[Tensor]:
        """Return the tensors that stand for `wanted` in the captured program."""
        return [*[s for s in self.statics if s.requires_grad], *[self.own.get(id(t), t) for t in self.fixed()]]

    def _make_inputs(self, reading: CallSpec) -> None:
        super()._make_inputs(reading)
        for source, static in zip(reading.sources, self.statics, strict=True):
            static.requires_grad_(source.requires_grad)

    def _forward(self) -> Outputs:
        """Run the forward on the static inputs; set `roots_at`, and return the outputs."""
        if self.is_compiled:
            assert self.gradients_code is not None
            given = [*self.inputs(), *self.replaced()]
            outputs, self.roots_at, self.saved = self.gradients_code.forward(self, given)
            return outputs
        with self.state.own_leaves(self.own):
            outputs = self.run_on(self.inputs())
        self.check(outputs)
        self.roots_at = outputs.roots()
        return outputs

    def check(self, outputs: Outputs) -> None:
        """Raise NotDifferentiable if the gradients of these results cannot be captured."""
        if any(s.requires_grad and s.dims is not None for s in self.reading.sources):
            raise NotDifferentiable("a PaddedTensor among the arguments requires grad: hand over the plain tensor")
        if self.written:
            raise NotDifferentiable("it writes to its arguments")
        for leaf in outputs.leaves:
            if leaf.rows is not None or any(len(factors) > 1 for factors in leaf.dims or ()):
                raise NotDifferentiable("a result is a ragged batch, or flattened: its gradients have no one shape")

    def check_leaves(self, behind: set[int], own: Iterable[Tensor]) -> None:
        """Raise NotDifferentiable if a leaf would get no gradient.

        Args:
            behind: the ids of the leaves that results depend on.
            own: the aliases that stand for the parameters.
        """
        known = set(map(id, [*self.statics, *own, *self.fixed()]))
        if behind & self.first_leaves - known:
            raise NotDifferentiable("a result depends on a tensor that requires grad and is not found: pass it on")

    def run_once(self, host: dict[Any, Any]) -> Any:
        """Warm up libraries for the forward and the backward; the caller computes the call's result."""

        def both() -> None:
            outputs = self._forward()
            if self.roots_at:
                if not self.is_compiled:
                    behind = leaves_behind([outputs.leaves[i].value for i in self.roots_at])
                    self.met |= behind & self.own.keys()
                    self.check_leaves(behind, self.own.values())
                self._take(outputs)
                self._differentiate()

        with recording_modes(records=True):
            if self.gradients_code is not None:
                self.gradients_code.prepare(self)
                self.is_compiled = not self.gradients_code.refusal
            self._take_leaves()
            with warnings.catch_warnings():
                # Nodes of leaves without an alias belong to the caller's stream; nothing is accumulated here.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
                self.pool.run(both) if self.pool is not None else both()

    def record(self) -> None:
        """Capture the forward and the backward; see `Bucket.record`."""
        with recording_modes(records=True):
            self._take_leaves()
            if self.pool is None and not self.is_differentiable:
                self.roots_at, self.outputs = [], Outputs.of(None)
            elif self.pool is None:
                with restore_state(self.state, self.state.at_risk(), [self.device]):
                    self._take(self._forward())
                    self._backward_by_host()
            else:
                self._capture(self.pool)
            self._forget_autograd()
        if any(alias.grad is not None for alias in self.own.values()):
            raise NotDifferentiable("the program accumulates gradients itself, and returns what wants more")
        self.statistics.is_recorded = True

    def _capture(self, pool: GraphPool) -> None:
        if not self.is_differentiable and (obstacle := self.state.obstacle()):
            raise NotDifferentiable(obstacle)
        before = pool.bytes()
        started = time.perf_counter()
        for t in self.fixed():
            if id(t) not in self.own and type(t) in (Tensor, nn.Parameter):
                autograd.reset_grad_accumulator(t)
        self.effects = SideEffects(self.state)
        with self.effects.recorded(leaves_gradients=self.is_differentiable):
            self.graph, outputs = pool.capture(self._forward)
        self._take(outputs)
        del outputs
        self.is_differentiable = bool(self.roots_at)
        self.gradients = []
        if self.is_differentiable:
            self.backward_graph, self.gradients = pool.capture(self._differentiate)
        self._forget_autograd()
        assert self.outputs is not None
        places = pool.non_owning_aliases([*self.outputs.tensors(), *[g for g in self.gradients if g is not None]])
        self.outputs = self.outputs.elsewhere(places)
        self.gradients = [None if g is None else places.get(g, g) for g in self.gradients]
        self.statistics.graph_bytes = pool.bytes() - before
        self.statistics.captures += 1
        self.statistics.capture_ms = (time.perf_counter() - started) * 1e3

    def _take(self, outputs: Outputs) -> None:
        self.outputs = outputs
        roots = [outputs.leaves[i].value for i in self.roots_at]
        # Without a CUDA graph, an unpadded result may change its size from call to call.
        if [t.shape for t in roots] != [t.shape for t in self.root_gradients]:
            self.root_gradients = [torch.zeros_like(t) for t in roots]
            self._root_loads = {}

    def _differentiate(self) -> list[Tensor | None]:
        assert self.outputs is not None
        if self.is_compiled:
            assert self.gradients_code is not None
            saved, self.saved = list(self.saved), ()
            given = [*self.inputs(), *self.replaced()]
            return self.gradients_code.backward(self, saved, given, self.root_gradients)
        roots = [self.outputs.leaves[i].value for i in self.roots_at]
        wrt = self._differentiated()
        # A backward may recompute parts of the program.
        with self.state.own_leaves(self.own):
            return list(torch.autograd.grad(roots, wrt, self.root_gradients, allow_unused=True))

    def _backward_by_host(self) -> None:
        self.gradients = self._differentiate() if self.roots_at else []

    def _forget_autograd(self) -> None:
        """Drop the autograd graph of the static outputs; the tensors it saved return to the pool."""
        assert self.outputs is not None
        self.outputs = self.outputs.detached()

    def replay(self, host: dict[Any, Any]) -> None:
        """Run the forward on the loaded inputs."""
        if self.pool is not None:
            self.effects.before_replay()
            super().replay(host)
            self.effects.after_replay()
            return
        with recording_modes(records=True):
            self._take(self._forward())

    def obstacle(self, leaves: Sequence[Any]) -> str:
        """Return the reason why the program must not be replayed now; "" if it may."""
        return self.effects.obstacle() if self.graph is not None else ""

    def replay_backward(self, gradients: Sequence[Tensor | None], host: dict[Any, Any]) -> list[Tensor | None]:
        """Run the backward.

        Args:
            gradients: the gradients of the results that require grad, cut to the call's true sizes.
            host: the true sizes.

        Returns:
            The gradients of the tensors that `wanted` returns, in memory of their own.
        """
        assert self.outputs is not None
        for at, static, gradient in zip(self.roots_at, self.root_gradients, gradients, strict=True):
            if gradient is None:
                static.zero_()
                continue
            dims = self.outputs.leaves[at].dims or ()
            sizes = [size_on_host(size_of(factors), host) for factors in dims] or [0]
            load = self._root_loads.get(at)
            if load is None:
                load = self._root_loads[at] = _root_load(static, dims)
            load([gradient.to(static.dtype)], tuple(sizes))
        if self.backward_graph is not None:
            self.backward_graph.replay()
        else:
            with recording_modes(records=True):
                self._backward_by_host()
        return self._cut_gradients(host)

    def _cut_gradients(self, host: dict[Any, Any]) -> list[Tensor | None]:
        copied = [source for source in self.reading.sources if source.requires_grad]
        found = list(self.gradients)
        for i, source in enumerate(copied):
            if (gradient := found[i]) is not None:
                true = [
                    n if k < 0 else host[self.reading.dims[k].symbol]
                    for n, k in zip(source.shape, source.which, strict=True)
                ]
                found[i] = gradient[tuple(map(slice, true))].clone(memory_format=torch.contiguous_format)
        whole = [g for g in found[len(copied) :] if g is not None]
        if whole:
            own = [torch.empty_like(g) for g in whole]
            torch._foreach_copy_(own, whole)
            rest = iter(own)
            found[len(copied) :] = [None if g is None else next(rest) for g in found[len(copied) :]]
        return found

    def forget_graph(self) -> None:
        """Return the memory of both graphs to the pool."""
        if self.backward_graph is not None and self.pool is not None:
            self.pool.drop(self.backward_graph)
        self.backward_graph = None
        self.gradients = []
        self.own = {}
        self.root_gradients = ()
        super().forget_graph()


def _root_load(static: Tensor, dims: Sequence[Factors]) -> InputLoader:
    """Return the `InputLoader` that copies a result's gradient to where the backward reads it, zero-padded."""
    which = tuple(i if is_padded(factors) else -1 for i, factors in enumerate(dims)) or (-1,) * static.dim()
    unread = torch.zeros(max(len(dims), 1), dtype=torch.int64, device=static.device)
    return InputLoader([static], [which], unread)
