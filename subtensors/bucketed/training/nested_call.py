"""A bucketed program that another one calls: it has no graph of its own, but its compiled code.

Where a whole training step is bucketed, its loss may be too, with `compile`. The step hands it the PaddedTensors that
it was given itself; they are at a bucket's size, and their true sizes are on the device. So the loss is its compiled
forward, its compiled backward in autograd's graph, and both are captured as a part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from subtensors.bucketed.calls.outputs import Output, Outputs
from subtensors.bucketed.compilation.compiled_gradients import CompiledGradients
from subtensors.bucketed.training.autograd_node import refuse_second_order
from subtensors.bucketed.training.trained_bucket import TrainedBucket
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import TrueSizes
from subtensors.dispatch.sizes.dim_factors import is_padded, size_of
from subtensors.dispatch.torch_internals import autograd
from subtensors.padded.padded_tensor import PaddedTensor, wrap

_is_inside: ContextVar[bool] = ContextVar("inside a bucketed program", default=False)


@contextmanager
def bucketed_program() -> Iterator[None]:
    """A bucketed program runs meanwhile."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_inside() -> bool:
    """Is the caller a bucketed program?"""
    return _is_inside.get()


def opened(leaves: Sequence[Any], places: Sequence[tuple[str, Any]]) -> tuple[list[Any], TrueSizes | None] | None:
    """The leaves with the storages of PaddedTensors in their place, and the true sizes that these have.

    Args:
        leaves: of a call.
        places: for each its place, and the padded dims that the program declares.

    Returns:
        None where they are padded in other ways than the program declares.
    """
    found: list[Any] = []
    sizes: TrueSizes | None = None
    for x, (_, given) in zip(leaves, places, strict=True):
        if isinstance(x, PaddedTensor):
            declared = {d % x.dim(): dim.symbol for d, dim in (given or {}).items()}
            padded = {d: size_of(factors) for d, factors in enumerate(x._dims) if is_padded(factors)}
            own = x._sizes
            if own is None or own.rows is not None or padded != declared or sizes not in (None, own):
                return None
            sizes = own
            found.append(x._dense)
        elif isinstance(x, Tensor) and given:
            return None
        else:
            found.append(x)
    return found, sizes


class _Compiled(torch.autograd.Function):
    """The compiled halves of a program as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: NestedCall, *wanted: Tensor) -> tuple[Tensor, ...]:
        """The results' tensors."""
        ctx.set_materialize_grads(False)
        ctx.run = run
        results, saved = run.forward()
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in run.roots_at])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients of what wanted one."""
        refuse_second_order()
        return None, *ctx.run.backward(autograd.taken_from(ctx), gradients)


class NestedCall:
    """One call of compiled code on tensors of a bucket's size.

    Args:
        code: of the bucket.
        bucket: its sizes; it is never recorded.
        inputs: in place of the bucket's static ones.
        sizes: the true ones.
    """

    def __init__(
        self, code: CompiledGradients, bucket: TrainedBucket, inputs: list[Tensor], sizes: TrueSizes | None
    ) -> None:
        self.code, self.bucket, self.inputs, self.sizes = code, bucket, inputs, sizes
        self.given = [*inputs, *bucket.replaced()]
        self.roots_at: list[int] = []
        self.outputs: Outputs | None = None

    def result(self) -> Any:
        """What the program returns."""
        sources = zip(self.bucket.reading.sources, self.inputs, strict=False)
        wanted = [*[x for s, x in sources if s.requires_grad], *self.bucket.fixed()]
        tensors = iter(_Compiled.apply(self, *wanted))  # type: ignore[no-untyped-call]
        assert self.outputs is not None
        leaves = self.outputs.leaves
        return self.outputs.assembled(
            [self._leaf(x, next(tensors)) if isinstance(x.value, Tensor) else x.value for x in leaves]
        )

    def _leaf(self, output: Output, value: Tensor) -> Tensor:
        return value if output.dims is None else wrap(PaddedValue(value, output.dims, self.sizes))

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """The results' tensors, and what is left for the backward."""
        self.outputs, roots_at, saved = self.code.forward(self.bucket, self.given)
        at = [i for i, x in enumerate(self.outputs.leaves) if isinstance(x.value, Tensor)]
        self.roots_at = [at.index(i) for i in roots_at]
        return self.outputs.tensors(), saved

    def backward(self, saved: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of what wanted one; the list of what was saved is emptied."""
        assert self.outputs is not None
        results = self.outputs.tensors()
        given = [gradients[i] for i in self.roots_at]
        roots = [results[i] for i in self.roots_at]
        tangents = [torch.zeros_like(r) if g is None else g.contiguous() for g, r in zip(given, roots, strict=True)]
        return self.code.backward(self.bucket, saved, self.given, tangents)
