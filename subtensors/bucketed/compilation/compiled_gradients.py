"""One compilation of a program and of its gradients for all buckets.

A program and its backward are traced together, as in `compiled`, and the joint graph is cut in two: a forward that
saves what is expensive to recompute, and a backward. Each is compiled once, with the sizes left open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.outputs import Outputs
from subtensors.bucketed.compilation.compiled import assembled, taken_apart
from subtensors.bucketed.compilation.size_polymorphic import DynamicCode, SizePolymorphic, places_of
from subtensors.bucketed.state.program_state import leaves_behind
from subtensors.dispatch.ops.plain_types import detached
from subtensors.dispatch.tracing.aten_trace import NotFunctional
from subtensors.dispatch.tracing.joint_graph import ForwardBackward
from subtensors.dispatch.tracing.shape_template import NoTemplate, ShapeTemplate

if TYPE_CHECKING:
    from subtensors.bucketed.training.trained_bucket import TrainedBucket

_log = logging.getLogger("subtensors.bucketed")


class Joint:
    """A program and its gradients, traced and cut into two graphs.

    Args:
        bucket: any bucket that the graphs serve.
        points: the sizes to trace at.
        options: of `torch.compile`.

    Raises:
        NoTemplate, NotFunctional: there is no such graph.
    """

    def __init__(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]], options: dict[str, Any]) -> None:
        params = bucket.replaced()
        self.template = ShapeTemplate(
            lambda inputs: _joint(bucket, inputs),
            lambda sizes: [*bucket.zeros(sizes), *map(detached, params)],
            points,
            places_of(bucket.reading),
            simplified=True,
        )
        *_, self.is_present, self.roots_at, self.count = self.template.extra(points[0])
        self.halves = ForwardBackward(self.template.module, self.count, sum(self.is_present), self.template.traces)
        self.forward = DynamicCode(self.halves.forward, options)
        self.backward = DynamicCode(self.halves.backward, options)


class CompiledGradients(SizePolymorphic[Joint]):
    """A program tracked by autograd, as compiled code; its arguments are those of `SizePolymorphic`."""

    refusal = ""
    """The reason why it runs uncompiled, or ""."""

    @property
    def compilations(self) -> int:
        """The number of compilations, each of a forward and a backward."""
        return sum(len(joint.forward.made) for joint in self.every())

    def prepare(self, bucket: TrainedBucket) -> None:
        """Trace the program if it was not traced yet; if it can't be compiled, set `refusal` to the reason."""
        if self.refusal:
            return
        try:
            self.at(bucket)
        except (NoTemplate, NotFunctional) as why:
            self.refusal = str(why)
            _log.warning("it runs uncompiled where autograd tracks the call: %s", why)

    def traced(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]]) -> Joint:
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
        joint, sizes = self.at(bucket), bucket.reading.buckets
        inputs = list(map(detached, given))
        with _as_traced(bucket):
            found = joint.forward.at(sizes, inputs, self.open_dims(bucket))(*inputs)
        rest, spec, is_leaf, *_ = joint.template.extra(sizes)
        outputs = assembled(found[: joint.count], (rest, spec, is_leaf))
        return outputs, joint.roots_at, found[joint.count :]

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
        joint, sizes = self.at(bucket), bucket.reading.buckets
        read = joint.halves.backward_inputs
        inputs = [*saved, *[detached(given[i]) for i in read], *tangents]
        open_dims: list[tuple[int, int]] = []
        if self.one is not None:
            count = len(saved)
            own = [(count + read.index(i), d) for i, d in self.open_dims(bucket) if i in read]
            at = [*range(count), *range(count + len(read), len(inputs))]
            open_dims = [*own, *[(i, d) for i, dims in zip(at, joint.halves.varying, strict=True) for d in dims]]
        saved.clear()
        with _as_traced(bucket):
            found = iter(joint.backward.at(sizes, inputs, open_dims).consume(inputs))
        return [next(found) if is_present else None for is_present in joint.is_present]


@contextmanager
def _as_traced(bucket: TrainedBucket) -> Iterator[None]:
    """A context without grad mode and autocast, since the graph contains its gradients and casts.

    The modes are the same for every caller: compiled code is recompiled in other modes, which would fail in a capture.
    """
    with torch.no_grad(), torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
        yield


def _joint(bucket: TrainedBucket, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Run the program and compute its gradients.

    Returns:
        Results, gradients, and tangents for the results that require grad; then the rest of what the program returns,
        which gradients are present, the indices of the results that require grad, and the number of result tensors.
    """
    count = len(inputs) - len(bucket.replaced())
    sources = bucket.reading.sources
    statics = [x.detach().requires_grad_() if s.requires_grad else x for s, x in zip(sources, inputs, strict=False)]
    leaves = [x.detach().requires_grad_() for x in inputs[count:]]
    own = dict(zip(map(id, bucket.replaced()), leaves, strict=True))
    with torch.enable_grad(), bucket.state.own_leaves(own):
        outputs = bucket.run_on([*statics, *inputs[len(statics) : count]])
        bucket.check(outputs)
        roots_at = outputs.roots()
        roots = [outputs.leaves[i].value for i in roots_at]
        behind = leaves_behind(roots)
        if behind & own.keys():
            raise NotFunctional("a parameter is read from elsewhere than its module")
        bucket.check_leaves(behind, leaves)
        wrt = [*[x for x in statics if x.requires_grad], *[own.get(id(t), t) for t in bucket.fixed()]]
        tangents = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, wrt, tangents, allow_unused=True)
    tensors, extra = taken_apart(outputs.detached())
    present = [g for g in gradients if g is not None]
    return [*tensors, *present, *tangents], (*extra, [g is not None for g in gradients], roots_at, len(tensors))
