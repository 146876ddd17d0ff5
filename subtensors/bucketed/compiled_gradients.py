"""One compilation of a program and of its gradients for all buckets.

A program and its backward are traced together, as in `compiled`, and the joint graph is cut in two: a forward that
saves what is expensive to recompute, and a backward. Each is compiled once, with the sizes left open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from subtensors.bucketed.bucket import HostSizes
from subtensors.bucketed.compiled import (
    CompileCache,
    CompileOptions,
    DynamicCode,
    SizePolymorphic,
    dim_inputs,
    join_outputs,
    split_outputs,
)
from subtensors.bucketed.outputs import Outputs
from subtensors.bucketed.program_state import leaf_ids_of
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.graphs.pool import capture_modes
from subtensors.dispatch.ops.plain_types import detached
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.tracing.aten_trace import NotFunctional
from subtensors.dispatch.tracing.joint_graph import ForwardBackward
from subtensors.dispatch.tracing.shape_template import NoTemplate, ShapeTemplate

_log = logging.getLogger("subtensors.bucketed")

_JointRest: TypeAlias = tuple[object, ...]


class Joint:
    """A program and its gradients, traced and cut into two graphs.

    Args:
        bucket: any bucket that the graphs serve.
        points: the sizes to trace at.
        options: of `torch.compile`.

    Raises:
        NoTemplate, NotFunctional: there is no such graph.
    """

    def __init__(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]], options: CompileOptions) -> None:
        params = bucket.aliased_parameters()
        self.template = ShapeTemplate(
            lambda inputs: _joint(bucket, inputs),
            lambda sizes: [*bucket.zero_inputs(sizes), *map(detached, params)],
            points,
            dim_inputs(bucket.spec),
            simplified=True,
        )
        *_, self.is_present, self.roots_at, self.num_results = self.template.extra(points[0])
        self.halves = ForwardBackward(
            self.template.module, self.num_results, sum(self.is_present), self.template.traces
        )
        self.forward = DynamicCode(self.halves.forward, options)
        self.backward = DynamicCode(self.halves.backward, options)


class CompiledGradients(SizePolymorphic[TrainedBucket, Joint]):
    """A program tracked by autograd, as compiled code; its arguments are those of `SizePolymorphic`."""

    not_compiled_reason = ""
    """The reason why it runs uncompiled, or ""."""

    @property
    def compilations(self) -> int:
        """See `SizePolymorphic`."""
        return sum(len(joint.forward.compiled) for joint in self.traces())

    def prepare(self, bucket: TrainedBucket) -> bool:
        """Trace the program if it was not traced yet; return whether it can be compiled, and warn if it can't."""
        if not self.not_compiled_reason:
            try:
                self.trace_for(bucket)
            except (NoTemplate, NotFunctional) as reason:
                self.not_compiled_reason = str(reason)
                _log.warning("it runs uncompiled where autograd tracks the call: %s", reason)
        return not self.not_compiled_reason

    def trace(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]]) -> Joint:
        """See `SizePolymorphic`."""
        return Joint(bucket, points, self.options)

    def forward(self, bucket: TrainedBucket, given: Sequence[Tensor]) -> tuple[Outputs, list[int], list[Tensor]]:
        """Run the program.

        Args:
            bucket: whose sizes the inputs have.
            given: its inputs, then a tensor for each parameter that the trace takes as an input.

        Returns:
            The results, the indices of those that require grad, and the tensors saved for the backward.
        """
        joint, sizes = self.trace_for(bucket), bucket.spec.buckets
        inputs = list(map(detached, given))
        with _traced_modes(bucket):
            found = joint.forward.compiled_for(sizes, inputs, self.dynamic_dims(bucket))(*inputs)
        rest, structure, is_leaf, *_ = joint.template.extra(sizes)
        outputs = join_outputs(found[: joint.num_results], (rest, structure, is_leaf))
        return outputs, joint.roots_at, found[joint.num_results :]

    def backward(
        self, bucket: TrainedBucket, saved: list[Tensor], given: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Compute the gradients of the differentiated tensors, None where there is none.

        Args:
            bucket: as in `forward`.
            saved: what `forward` saved; the list is emptied, so that its memory is freed as the gradients are made.
            given: as in `forward`.
            tangents: the gradients of the results that require grad.
        """
        joint, sizes = self.trace_for(bucket), bucket.spec.buckets
        read = joint.halves.backward_inputs
        inputs = [*saved, *[detached(given[i]) for i in read], *tangents]
        dynamic_dims: list[tuple[int, int]] = []
        if self.shared_trace is not None:
            count = len(saved)
            dims = [(count + read.index(i), d) for i, d in self.dynamic_dims(bucket) if i in read]
            at = [*range(count), *range(count + len(read), len(inputs))]
            dynamic_dims = [
                *dims,
                *[(i, d) for i, varying in zip(at, joint.halves.varying, strict=True) for d in varying],
            ]
        saved.clear()
        with _traced_modes(bucket):
            found = iter(joint.backward.compiled_for(sizes, inputs, dynamic_dims).consume(inputs))
        return [next(found) if is_present else None for is_present in joint.is_present]


class CompiledTrainedBucket(TrainedBucket):
    """A bucket whose calls autograd tracks, and that runs compiled code if the program can be compiled."""

    has_compiled_code = True
    code: CompiledGradients
    _saved: Sequence[Tensor] = ()
    """The tensors that the compiled forward saved for the backward."""

    def take_code(self, cache: CompileCache) -> None:
        """Take the code from the cache."""
        self.code = cache.code_for(self.spec, self.device, CompiledGradients)
        self._saved: list[Tensor] = []
        """The tensors that the compiled forward saved for the backward."""

    def run_once(self, host: HostSizes) -> PyTree:
        """See `TrainedBucket`; compiles the program first."""
        with capture_modes(requires_grad=True):
            self.is_compiled = self.code.prepare(self)
        return super().run_once(host)

    def _forward(self) -> Outputs:
        if not self.is_compiled:
            return super()._forward()
        outputs, self.roots_at, self._saved = self.code.forward(self, self._given())
        return outputs

    def _note_leaves(self, roots: Sequence[Tensor]) -> None:
        if not self.is_compiled:
            super()._note_leaves(roots)

    def _run_backward(self) -> list[Tensor | None]:
        if not self.is_compiled:
            return super()._run_backward()
        saved, self._saved = list(self._saved), ()
        return self.code.backward(self, saved, self._given(), self.root_gradients)

    def _given(self) -> list[Tensor]:
        return [*self.inputs(), *self.aliased_parameters()]


@contextmanager
def _traced_modes(bucket: TrainedBucket) -> Iterator[None]:
    """A context without grad mode and autocast, since the graph contains its gradients and casts.

    The modes are the same for every caller: compiled code is recompiled in other modes, which would fail in a capture.
    """
    with torch.no_grad(), torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
        yield


def _joint(bucket: TrainedBucket, inputs: Sequence[Tensor]) -> tuple[list[Tensor], _JointRest]:
    """Run the program and compute its gradients.

    Returns:
        Results, gradients, and tangents for the results that require grad; then the rest of what the program returns,
        which gradients are present, the indices of the results that require grad, and the number of result tensors.
    """
    count = len(inputs) - len(bucket.aliased_parameters())
    sources = bucket.spec.inputs
    statics = [x.detach().requires_grad_() if s.requires_grad else x for s, x in zip(sources, inputs, strict=False)]
    leaves = [x.detach().requires_grad_() for x in inputs[count:]]
    aliases = dict(zip(map(id, bucket.aliased_parameters()), leaves, strict=True))
    with torch.enable_grad(), bucket.state.swapped_parameters(aliases):
        outputs = bucket.run_on([*statics, *inputs[len(statics) : count]])
        bucket.check(outputs)
        roots_at = outputs.grad_indices()
        roots = [outputs.leaves[i].value for i in roots_at]
        leaf_ids = leaf_ids_of(roots)
        if leaf_ids & aliases.keys():
            raise NotFunctional("a parameter is read from elsewhere than its module")
        bucket.check_leaves(leaf_ids, leaves)
        in_place = [aliases.get(id(t), t) for t in bucket.grad_tensors_in_place()]
        wrt = [*[x for x in statics if x.requires_grad], *in_place]
        tangents = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, wrt, tangents, allow_unused=True)
    tensors, extra = split_outputs(outputs.detached())
    present = [g for g in gradients if g is not None]
    return [*tensors, *present, *tangents], (*extra, [g is not None for g in gradients], roots_at, len(tensors))
