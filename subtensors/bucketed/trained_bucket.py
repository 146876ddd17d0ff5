"""The forward and the backward of a bucket, each a CUDA graph; `TrackedFunction` makes them a node of autograd.

Gradients are returned in memory of their own, so that the next bucket does not overwrite them.

Note [Parameter aliases]
While a graph of the caller is alive, the nodes that accumulate its parameters' gradients belong to the caller's stream,
and the engine waits for that stream even if it only takes gradients with respect to them. The captured program
therefore runs on aliases of the parameters: the same memory, but other leaves. The caller's hooks run only on the
caller's nodes. A whole training step, none of whose results require grad, runs on the parameters themselves: its
optimizer reads their `grad`. These, and tensors without an alias, get new nodes before a capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from subtensors.bucketed.bucket import Bucket, HostSizes
from subtensors.bucketed.call_key import flatten_result_objects
from subtensors.bucketed.call_spec import CallSpec, padded_leaves
from subtensors.bucketed.outputs import Outputs, cut_and_copy_aliases
from subtensors.bucketed.program_state import leaf_ids_of
from subtensors.bucketed.side_effects import SideEffects, Snapshot, copies, dense_of, restore_state
from subtensors.dispatch.graphs.guards import Writes
from subtensors.dispatch.graphs.host_reads import unwatched
from subtensors.dispatch.graphs.pool import GraphPool, capture_modes
from subtensors.dispatch.ops.tree import PyTree, tree_find
from subtensors.dispatch.sizes.dim_factors import Factors
from subtensors.dispatch.sizes.expressions import size_on_host
from subtensors.dispatch.torch_internals import autograd
from subtensors.kernels.graph_inputs.inputs import InputLoader


class NotDifferentiable(Exception):
    """Gradients cannot be captured here; the message says why."""


class TrainedBucket(Bucket):
    """A bucket whose calls are tracked by autograd.

    Args:
        arguments: as in `Bucket`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.effects = SideEffects(self.state)
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.gradients: list[Tensor | None] = []
        """The static gradients of the differentiated tensors; None for a tensor that gets none."""
        self.roots_at: list[int] = []
        """The indices of the outputs that require grad."""
        self.root_gradients: Sequence[Tensor] = ()
        """The static tensors from which the backward reads the gradients of these outputs."""
        self._root_loads: dict[int, InputLoader] = {}
        """By the index of the output, the load that copies a caller's gradient there."""
        self.is_compiled = False
        """True once the program and its gradients were compiled."""
        self.is_differentiable = False
        """True if a result requires grad; none does in a whole training step, for example."""
        self.aliases: dict[int, nn.Parameter] = {}
        """The aliases that the program runs on in place of the parameters; see Note [Parameter aliases]."""
        self.unaliased: frozenset[int] = frozenset()
        """Ids of parameters that the program also reads from elsewhere, such as a list in a module."""
        self.first_leaf_ids: frozenset[int] | None = frozenset()
        """Ids of the leaves that the first run's results depend on; None if this size is captured without one."""

    @property
    def can_share_first_run(self) -> bool:
        """Return False for a whole training step, too: its first run takes the step."""
        return super().can_share_first_run and self.is_differentiable

    def copy_first_run(self, other: Bucket) -> None:
        """Copy whether the results have gradients, and which parameters are read from elsewhere than their module."""
        assert isinstance(other, TrainedBucket)
        self.is_differentiable, self.unaliased = other.is_differentiable, other.unaliased
        self.first_leaf_ids = None

    def grad_inputs(self, leaves: Sequence[PyTree]) -> list[Tensor]:
        """Return the tensors of a call that require grad: copied arguments, then tensors that are read in place."""
        copied = [leaves[source.leaf] for source in self.spec.inputs]
        return [x for x in copied if x.requires_grad] + self.grad_tensors_in_place()

    def grad_tensors_in_place(self) -> list[Tensor]:
        """Return the tensors that are read in place and require grad."""
        tensors = [*self.state.tensors(), *[x for x in self.uncopied.values() if isinstance(x, Tensor)]]
        return list({id(t): t for t in tensors if t.requires_grad}.values())

    @property
    def is_one_node(self) -> bool:
        """Return whether a call is one node of the caller's autograd graph; else autograd tracks the program itself."""
        return self.pool is not None or self.is_compiled

    def _make_aliases(self) -> None:
        """Make the aliases that the next runs use."""
        self.aliases = self._new_aliases() if self.is_differentiable and self.is_one_node else {}

    def _new_aliases(self) -> dict[int, nn.Parameter]:
        return self.state.aliases({*self.unaliased, *map(id, self.uncopied.values())})

    def aliased_parameters(self) -> list[Tensor]:
        """Return the parameters that can be replaced by aliases when the program runs."""
        aliases = self._new_aliases()
        return [t for t in self.grad_tensors_in_place() if id(t) in aliases]

    def _grad_inputs_of_capture(self) -> list[Tensor]:
        """Return the tensors that stand for `grad_inputs` in the captured program."""
        in_place = [self.aliases.get(id(t), t) for t in self.grad_tensors_in_place()]
        return [*[s for s in self.statics if s.requires_grad], *in_place]

    def _make_inputs(self, spec: CallSpec) -> None:
        super()._make_inputs(spec)
        for source, static in zip(spec.inputs, self.statics, strict=True):
            static.requires_grad_(source.requires_grad)

    def _forward(self) -> Outputs:
        """Run the forward on the static inputs; set `roots_at`, and return the outputs."""
        with self.state.swapped_parameters(self.aliases):
            outputs = self.run_on(self.inputs())
        self.check(outputs)
        self.roots_at = outputs.grad_indices()
        return outputs

    def check(self, outputs: Outputs) -> None:
        """Raise NotDifferentiable if the gradients of these results cannot be captured."""
        if any(s.requires_grad and s.dims is not None for s in self.spec.inputs):
            raise NotDifferentiable("a PaddedTensor among the arguments requires grad: hand over the plain tensor")
        if self.written_inputs:
            raise NotDifferentiable("it writes to its arguments")
        for leaf in outputs.leaves:
            if leaf.rows is not None:
                raise NotDifferentiable("a result is a ragged batch: its gradients have no one shape")

    def check_leaves(self, leaf_ids: set[int], aliases: Iterable[Tensor]) -> None:
        """Raise NotDifferentiable if a leaf would get no gradient.

        Args:
            leaf_ids: the ids of the leaves that results depend on.
            aliases: the aliases that stand for the parameters.
        """
        known = set(map(id, [*self.statics, *aliases, *self.grad_tensors_in_place()]))
        # A leaf that only one of two runs has is made by the program; without a first run none may be unknown.
        if (leaf_ids if self.first_leaf_ids is None else leaf_ids & self.first_leaf_ids) - known:
            raise NotDifferentiable("a result depends on a tensor that requires grad and is not found: pass it on")

    def first_run(self, spec: CallSpec, leaves: list[PyTree], before: Snapshot) -> PyTree:
        """Run the program on padded arguments under autograd, and warm up its capture; see `Bucket.first_run`."""
        padded = padded_leaves(leaves, spec, self.device)
        input_writes = {source.leaf: Writes([dense_of(padded[source.leaf])]) for source in spec.inputs}
        state_writes = Writes(self.state.guard.distinct_tensors)
        uncopied_writes = Writes(map(dense_of, self.callers_tensors()))

        with self.watched(spec):  # on the caller's stream, which its backward is on as well
            results, structure = self._run_tracked(padded, leaves)
        self.state.note_writes(state_writes)
        written = [i for i, writes in input_writes.items() if writes.any()]
        with torch.no_grad():
            for i in written:
                if padded[i] is not leaves[i]:
                    leaves[i].copy_(padded[i].unpad())
            self.load(leaves, spec.sizes)
        roots = [x for x in tree_find(Tensor, results) if x.requires_grad]  # of a ragged result the rows
        self.is_differentiable = bool(roots)
        if not self.no_graph_reason and roots and before.has_trained():
            self.no_graph_reason = (
                "it calls backward itself, and returns a tensor that requires grad: return loss.detach()"
            )
        elif not self.no_graph_reason and (written or (roots and uncopied_writes.any())):
            self.no_graph_reason = "it writes to its arguments, and autograd tracks it"
        if self.no_graph_reason:
            self.drop()
        elif roots:
            self.first_leaf_ids = frozenset(leaf_ids_of(roots))
            # A program whose results need no gradient may be a whole training step, which must not be taken twice.
            try:
                with restore_state(self.state, self.device), self.watched(spec):
                    self.run_once(spec.host)
                if self.no_graph_reason:
                    self.drop()
            except Exception as error:  # a rule's, or what such a program can't be; the call has its answer
                self.refuse(error)
        return pytree.tree_unflatten(results, structure)

    def _run_tracked(self, padded: list[PyTree], leaves: list[PyTree]) -> tuple[list[PyTree], pytree.TreeSpec]:
        """Run the program under autograd on padded leaves; return the leaves of its result, cut, and its structure."""
        # A backward of the program's own is on this thread, as in the capture: compiled code that it runs is compiled
        # for the settings of a thread.
        with torch.autograd.set_multithreading_enabled(False):
            result = flatten_result_objects(self.call_program(padded), set(map(id, self.uncopied.values())))
            results, structure = pytree.tree_flatten(result)
            with unwatched():
                found = cut_and_copy_aliases(results, [*self.state.tensors(), *leaves, *self.callers_tensors()])
        return found, structure

    def run_tracked(self, spec: CallSpec, leaves: list[PyTree]) -> PyTree:
        """Answer a call where there are no graphs: by the program on padded arguments, which autograd tracks."""
        results, structure = self._run_tracked(padded_leaves(leaves, spec, self.device), leaves)
        return pytree.tree_unflatten(results, structure)

    def run_once(self, host: HostSizes) -> PyTree:
        """Warm up libraries for the forward and the backward; the caller computes the call's result."""

        def forward_and_backward() -> None:
            outputs = self._forward()
            if self.roots_at:
                self._note_leaves([outputs.leaves[i].value for i in self.roots_at])
                self._set_outputs(outputs)
                if self.is_one_node:
                    self._run_backward()

        with capture_modes(requires_grad=True):
            self._make_aliases()
            with warnings.catch_warnings():
                # Nodes of leaves without an alias belong to the caller's stream; nothing is accumulated here.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
                self.pool.run(forward_and_backward) if self.pool is not None else forward_and_backward()

    def _note_leaves(self, roots: Sequence[Tensor]) -> None:
        """Note which parameters these results depend on besides their aliases; raise if a leaf has none."""
        leaf_ids = leaf_ids_of(roots)
        self.unaliased |= leaf_ids & self.aliases.keys()
        self.check_leaves(leaf_ids, self.aliases.values())

    def capture(self) -> None:
        """Capture the forward and the backward; see `Bucket.capture`."""
        with capture_modes(requires_grad=True):
            self._make_aliases()
            if not self.is_one_node or (self.pool is None and not self.is_differentiable):
                self.roots_at, self.outputs = [], Outputs.of(None)
            elif self.pool is None:
                with restore_state(self.state, self.device):
                    self._set_outputs(self._forward())
                    self._backward_without_graph()
            else:
                self._capture_graphs(self.pool)
            self._detach_outputs()
        if any(alias.grad is not None for alias in self.aliases.values()):
            raise NotDifferentiable("the program accumulates gradients itself, and returns a result that requires grad")

    def _capture_graphs(self, pool: GraphPool) -> None:
        if not self.is_differentiable and (reason := self.state.no_capture_reason()):
            raise NotDifferentiable(reason)
        for t in self.grad_tensors_in_place():
            if id(t) not in self.aliases and type(t) in (Tensor, nn.Parameter):
                autograd.reset_grad_accumulator(t)
        self.effects = SideEffects(self.state)
        with self.measured_capture(pool):
            with self.effects.noted(caller_runs_backward=self.is_differentiable):
                self.graph, outputs = pool.capture(self._forward)
            self._set_outputs(outputs)
            unaliased = self.unaliased
            self._note_leaves([outputs.leaves[i].value for i in self.roots_at])
            if self.unaliased != unaliased:
                raise NotDifferentiable("a parameter is read from elsewhere than its module")
            del outputs
            self.is_differentiable = bool(self.roots_at)
            self.backward_graph, self.gradients = None, []
            if self.is_differentiable:
                self.backward_graph, self.gradients = pool.capture(self._run_backward)
            self._detach_outputs()
            assert self.outputs is not None
            found = [*self.outputs.tensors(), *[g for g in self.gradients if g is not None]]
            replacements = pool.non_owning_aliases(found)
            self.outputs = self.outputs.with_replaced(replacements)
            self.gradients = [None if g is None else replacements.get(g, g) for g in self.gradients]

    def _set_outputs(self, outputs: Outputs) -> None:
        self.outputs = outputs
        roots = [outputs.leaves[i].value for i in self.roots_at]
        # Without a CUDA graph, an unpadded result may change its size from call to call.
        if [t.shape for t in roots] != [t.shape for t in self.root_gradients]:
            self.root_gradients = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in roots]
            self._root_loads = {}

    def _run_backward(self) -> list[Tensor | None]:
        assert self.outputs is not None
        roots = [self.outputs.leaves[i].value for i in self.roots_at]
        grad_inputs = self._grad_inputs_of_capture()
        # A backward may recompute parts of the program.
        with self.state.swapped_parameters(self.aliases):
            return list(torch.autograd.grad(roots, grad_inputs, self.root_gradients, allow_unused=True))

    def _backward_without_graph(self) -> None:
        self.gradients = self._run_backward() if self.roots_at else []

    def _detach_outputs(self) -> None:
        """Drop the autograd graph of the static outputs; the tensors it saved return to the pool."""
        assert self.outputs is not None
        self.outputs = self.outputs.detached()

    def replay(self, host: HostSizes) -> None:
        """Run the forward on the loaded inputs."""
        if self.pool is not None:
            self.effects.before_replay()
            super().replay(host)
            self.effects.after_replay()
            return
        with capture_modes(requires_grad=True):
            self._set_outputs(self._forward())

    def no_replay_reason(self, leaves: Sequence[PyTree]) -> str:
        """Return the reason why the program must not be replayed now; "" if it may."""
        return self.effects.no_replay_reason() if self.graph is not None else ""

    def replay_backward(self, gradients: Sequence[Tensor | None], host: HostSizes) -> list[Tensor | None]:
        """Run the backward.

        Args:
            gradients: the gradients of the results that require grad, cut to the call's true sizes.
            host: the true sizes.

        Returns:
            The gradients of the tensors that `grad_inputs` returns, in memory of their own.
        """
        assert self.outputs is not None
        one_size_each: Any = host  # `check` refuses ragged batches
        for at, static, gradient in zip(self.roots_at, self.root_gradients, gradients, strict=True):
            if gradient is None:
                static.zero_()
                continue
            dims = self.outputs.leaves[at].dims or ()
            sizes = [[size_on_host(factor.size, one_size_each) for factor in factors] for factors in dims]
            load = self._root_loads.get(at)
            if load is None:
                load = self._root_loads[at] = _root_load(static, dims)
            load([_unflattened(gradient.to(static.dtype), sizes)], tuple(n for each in sizes for n in each) or (0,))
        if self.backward_graph is not None:
            self.backward_graph.replay()
        else:
            with capture_modes(requires_grad=True):
                self._backward_without_graph()
        return self._cut_gradients(host)

    def _cut_gradients(self, host: HostSizes) -> list[Tensor | None]:
        copied = [source for source in self.spec.inputs if source.requires_grad]
        gradients = list(self.gradients)
        for i, source in enumerate(copied):
            if (gradient := gradients[i]) is not None:
                sizes = [
                    n if k < 0 else host[self.spec.dims[k].symbol]
                    for n, k in zip(source.shape, source.size_index, strict=True)
                ]
                gradients[i] = gradient[tuple(map(slice, sizes))].clone(memory_format=torch.contiguous_format)
        rest = iter(copies([g for g in gradients[len(copied) :] if g is not None]))
        gradients[len(copied) :] = [None if g is None else next(rest) for g in gradients[len(copied) :]]
        return gradients

    def drop_graph(self) -> None:
        """Return the memory of both graphs to the pool."""
        if self.backward_graph is not None and self.pool is not None:
            self.pool.drop(self.backward_graph)
        self.backward_graph = None
        self.gradients = []
        self.aliases = {}
        self.root_gradients = ()
        super().drop_graph()


def _root_load(static: Tensor, dims: Sequence[Factors]) -> InputLoader:
    """Return the `InputLoader` that copies a result's gradient to where the backward reads it, zero-padded."""
    static = _unflattened(static, [[factor.bucket for factor in factors] for factors in dims])
    factors = [factor for dim in dims for factor in dim]
    size_index = tuple(-1 if factor.is_static else i for i, factor in enumerate(factors)) or (-1,) * static.dim()
    unread = torch.zeros(max(len(factors), 1), dtype=torch.int64, device=static.device)
    return InputLoader([static], [size_index], unread)


def _unflattened(t: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return a view of a tensor with a dim for each factor, given their sizes for each of its dims."""
    for d in reversed(range(len(sizes))):
        if len(sizes[d]) > 1:
            t = t.unflatten(d, sizes[d])
    return t
