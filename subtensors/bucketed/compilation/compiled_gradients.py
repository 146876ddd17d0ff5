"""One compilation of a program and of its gradients for all buckets.

A program and autograd's backward of it are traced together, as in `compiled`, and the graph of both is cut in two: a
forward that leaves what is dear to compute again, and a backward. Each is compiled once, with the sizes left open.
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
from subtensors.dispatch.graphs.capture import NotFunctional
from subtensors.dispatch.ops.plain_types import detached
from subtensors.dispatch.tracing.joint_graph import Halves
from subtensors.dispatch.tracing.shape_template import NoTemplate, Template

if TYPE_CHECKING:
    from subtensors.bucketed.training.trained_bucket import TrainedBucket

_log = logging.getLogger("subtensors.bucketed")


class Joint:
    """A program and its gradients, traced and cut into two graphs.

    Args:
        bucket: any of those they are for.
        points: the sizes to trace at.
        options: of `torch.compile`.

    Raises:
        NoTemplate, NotFunctional: it can't be had.
    """

    def __init__(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]], options: dict[str, Any]) -> None:
        params = bucket.replaced()
        self.template = Template(
            lambda inputs: _joint(bucket, inputs),
            lambda sizes: [*bucket.zeros(sizes), *map(detached, params)],
            points,
            places_of(bucket.reading),
            simplified=True,
        )
        *_, self.is_present, self.roots_at, self.count = self.template.extra(points[0])
        self.halves = Halves(self.template.module, self.count, sum(self.is_present), self.template.traces)
        self.forward = DynamicCode(self.halves.forward, options)
        self.backward = DynamicCode(self.halves.backward, options)


class CompiledGradients(SizePolymorphic[Joint]):
    """A program that autograd follows as compiled code; arguments as of `SizePolymorphic`."""

    refusal = ""
    """Why it runs uncompiled."""

    @property
    def compilations(self) -> int:
        """How many there were, each of a forward and a backward."""
        return sum(len(joint.forward.made) for joint in self.every())

    def prepare(self, bucket: TrainedBucket) -> None:
        """Trace the program, if that was not done; `refusal` then says if it can be compiled."""
        if self.refusal:
            return
        try:
            self.at(bucket)
        except (NoTemplate, NotFunctional) as why:
            self.refusal = str(why)
            _log.warning("it runs uncompiled where autograd follows: %s", why)

    def traced(self, bucket: TrainedBucket, points: Sequence[tuple[int, ...]]) -> Joint:
        """See `SizePolymorphic`."""
        return Joint(bucket, points, self.options)

    def forward(self, bucket: TrainedBucket, given: Sequence[Tensor]) -> tuple[Outputs, list[int], list[Tensor]]:
        """Run the program.

        Args:
            bucket: whose sizes the inputs have.
            given: its inputs, and what stands for the parameters that it can be run on others in place of.

        Returns:
            The results, which of them want a gradient, and what they leave for the backward.
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
        """The gradients of what is differentiated, None where there is none.

        Args:
            bucket: as in `forward`.
            saved: what that left; the list is emptied, since it shrinks while the gradients grow.
            given: as there.
            tangents: the gradients of the results that want one.
        """
        joint, sizes = self.at(bucket), bucket.reading.buckets
        read = joint.halves.read
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
    """Gradients and casts are in the graph: what runs it is to add none, in the same modes whoever calls.

    Compiled code is compiled again in other modes, which in a capture would fail.
    """
    with torch.no_grad(), torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
        yield


def _joint(bucket: TrainedBucket, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """The program and its gradients.

    Returns:
        Results, gradients, and what stands for the gradients of those results that want one; then the rest of what it
        returns, where gradients are, which results want one, and how many results there are.
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
