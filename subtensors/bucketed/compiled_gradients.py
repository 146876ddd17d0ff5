"""One compilation of a program and of its gradients for all buckets.

A program and autograd's backward of it are traced together, as in `compiled`, and the graph of both is cut in two: a
forward that leaves what is dear to compute again, and a backward. Each is compiled once, with the sizes left open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subtensors.bucketed.compiled import assembled, places_of, taken_apart, trace_points
from subtensors.bucketed.outputs import Outputs
from subtensors.bucketed.state import leaves_behind
from subtensors.dispatch import torch_capture
from subtensors.dispatch.joint_graph import Halves
from subtensors.dispatch.shape_template import NoTemplate, Template
from subtensors.dispatch.torch_capture import NotFunctional

if TYPE_CHECKING:
    from subtensors.bucketed.training import TrainedBucket

_log = logging.getLogger("subtensors.bucketed")


class _Code:
    """The two halves of a program, compiled.

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
            lambda sizes: [*bucket.zeros(sizes), *[p.detach() for p in params]],
            points,
            places_of(bucket.reading),
            simplified=True,
        )
        *_, self.is_present, self.roots_at, self.count = self.template.extra(points[0])
        halves = Halves(self.template.module, self.count, sum(self.is_present), self.template.traces)
        self.read, self.varying = halves.read, halves.varying
        self._forward: Callable[..., Any] = torch.compile(halves.forward, **options)
        self._backward: Callable[..., Any] = torch.compile(halves.backward, **options)

    def forward(self, bucket: TrainedBucket, given: Sequence[Tensor]) -> tuple[Outputs, list[Tensor]]:
        """The program's results, and what they leave for the backward."""
        found = self._forward(*_inputs(bucket, given))
        rest, spec, is_leaf, *_ = self.template.extra(bucket.reading.buckets)
        return assembled(found[: self.count], (rest, spec, is_leaf)), list(found[self.count :])

    def backward(
        self, bucket: TrainedBucket, saved: Sequence[Tensor], given: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients, with None where there is none."""
        for tensor, dims in zip(saved, self.varying, strict=False):
            _leave_open(tensor, dims)
        for tensor, dims in zip(tangents, self.varying[len(saved) :], strict=True):
            _leave_open(tensor, dims)
        inputs = _inputs(bucket, given)
        found = iter(self._backward(*saved, *[inputs[i] for i in self.read], *tangents))
        return [next(found) if is_present else None for is_present in self.is_present]


class CompiledGradients:
    """The buckets of one program that differ in nothing but sizes, and that autograd follows.

    Args:
        bucket: any of them.
        options: of `torch.compile`.
    """

    def __init__(self, bucket: TrainedBucket, options: dict[str, Any]) -> None:
        self.options = options
        self.dims = bucket.reading.dims
        self._one: _Code | None = None
        self._each: dict[tuple[int, ...], _Code] = {}
        self._is_known = False
        self.refusal = ""
        """Why it runs uncompiled."""
        self.compilations = 0

    def prepare(self, bucket: TrainedBucket) -> None:
        """Trace the program, if that was not done; `refusal` then says if it can be compiled."""
        if not self._is_known:
            self._is_known = True
            self._one = self._open(bucket)
        sizes = bucket.reading.buckets
        if self._one is None and not self.refusal and sizes not in self._each:
            try:
                self._each[sizes] = _Code(bucket, [sizes], self.options)
            except (NoTemplate, NotFunctional) as why:
                self._refuse(why)

    def _open(self, bucket: TrainedBucket) -> _Code | None:
        points = trace_points(self.dims, bucket.reading.buckets)
        if points is None:
            return None
        try:
            return _Code(bucket, points, self.options)
        except NotFunctional as why:
            self._refuse(why)
        except NoTemplate as difference:
            _log.warning("compiled once a bucket: %s", difference)
        return None

    def _refuse(self, why: Exception) -> None:
        self.refusal = str(why)
        _log.warning("it runs uncompiled where autograd follows: %s", why)

    def forward(self, bucket: TrainedBucket, given: Sequence[Tensor]) -> tuple[Outputs, list[int], list[Tensor]]:
        """Run the program.

        Args:
            bucket: whose sizes the inputs have.
            given: its inputs, and what stands for the parameters that it can be run on others in place of.

        Returns:
            The results, which of them want a gradient, and what they leave for the backward.
        """
        code = self._code(bucket)
        with _counted(self), _as_traced(bucket):
            outputs, saved = code.forward(bucket, given)
        return outputs, code.roots_at, saved

    def backward(
        self, bucket: TrainedBucket, saved: Sequence[Tensor], given: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of what is differentiated.

        Args:
            bucket: as in `forward`.
            saved: what that left.
            given: as there.
            tangents: the gradients of the results that want one.
        """
        with _as_traced(bucket):
            return self._code(bucket).backward(bucket, saved, given, tangents)

    def _code(self, bucket: TrainedBucket) -> _Code:
        return self._one or self._each[bucket.reading.buckets]


def _inputs(bucket: TrainedBucket, given: Sequence[Tensor]) -> list[Tensor]:
    inputs = [t.detach() for t in given]
    for source, static in zip(bucket.reading.sources, inputs, strict=False):
        _leave_open(static, [d for d, k in enumerate(source.which) if k >= 0])
    return inputs


def _leave_open(tensor: Tensor, dims: Sequence[int]) -> None:
    for d in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, d)


@contextmanager
def _as_traced(bucket: TrainedBucket) -> Iterator[None]:
    """Gradients and casts are in the graph: what runs it is to add none, in the same modes whoever calls.

    Compiled code is compiled again in other modes, which in a capture would fail.
    """
    with torch.no_grad(), torch.autocast(bucket.device.type, enabled=False, cache_enabled=False):
        yield


@contextmanager
def _counted(code: CompiledGradients) -> Iterator[None]:
    before = torch_capture.compilations()
    yield
    code.compilations += torch_capture.compilations() - before


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
        if leaves_behind(roots) & own.keys():
            raise NotFunctional("a parameter is read from elsewhere than its module")
        wrt = [*[x for x in statics if x.requires_grad], *[own.get(id(t), t) for t in bucket.fixed()]]
        tangents = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, wrt, tangents, allow_unused=True)
    tensors, extra = taken_apart(outputs.detached())
    present = [g for g in gradients if g is not None]
    return [*tensors, *present, *tangents], (*extra, [g is not None for g in gradients], roots_at, len(tensors))
