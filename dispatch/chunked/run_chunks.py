"""Run a pass: each chunk forward and, where requested, backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from subtensors.dispatch.chunked.accumulation import GradientSum, ProductInto
from subtensors.dispatch.chunked.compile_chunk import CompiledRun, compiled_program
from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, PerChunk, Span
from subtensors.dispatch.chunked.row_losses import ROW_OPS
from subtensors.dispatch.chunked.schedule import ChunkSchedule, Input, ScheduledStep
from subtensors.dispatch.ops.tree import tree_tensors
from subtensors.dispatch.torch_internals.autograd import saves_through_hooks
from subtensors.dispatch.torch_internals.memory import is_dense

aten = torch.ops.aten


def as_recorded(grad: bool | None = None) -> AbstractContextManager[None]:
    """A context without autocast and hooks on saved tensors, which took effect when the ops were recorded.

    Args:
        grad: whether gradients are recorded; None: unchanged.
    """
    decides = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or saves_through_hooks()
    grad = None if grad is torch.is_grad_enabled() else grad
    return _undecided(grad) if decides or grad is not None else _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _undecided(grad: bool | None) -> Iterator[None]:
    with ExitStack() as stack:
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if saves_through_hooks():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Results:
    """The results of a pass, assembled from those of its chunks.

    Args:
        plan: the pass.
    """

    def __init__(self, plan: ChunkSchedule) -> None:
        self.plan = plan
        self.tensors: list[Any] = [[] if v.join is Combine.STACK else None for v in plan.outputs]

    def add(self, span: Span, parts: Sequence[Any]) -> None:
        """Take in the results of one chunk."""
        for place, (value, part) in enumerate(zip(self.plan.outputs, parts, strict=True)):
            held = self.tensors[place]
            if value.join is Combine.STACK:
                if part is not None:
                    held.append(part.detach())
            elif value.join is Combine.CAT:
                if held is None:
                    strides = value.meta.stride() if is_dense(value.meta) else None
                    held = (
                        part.new_empty(value.shape) if strides is None else part.new_empty_strided(value.shape, strides)
                    )
                    self.tensors[place] = held
                assert value.source is not None
                value.source.put(held, span, part.detach())
            else:
                self.tensors[place] = part.detach().clone() if held is None else held.add_(part.detach())

    def done(self) -> list[Tensor]:
        """The whole results."""
        return [
            torch.stack(t) if v.join is Combine.STACK else t
            for v, t in zip(self.plan.outputs, self.tensors, strict=True)
        ]


def tangent_of(plan: ChunkSchedule, value: LazyValue, span: Span, whole: Tensor) -> Tensor:
    """A chunk's part of the gradient of a result."""
    if value.join is Combine.STACK:
        rows = value.source
        return whole[sum(rows is None or rows.local(s) > 0 for s in plan.spans if s < span)]
    if value.join is Combine.CAT:
        assert value.source is not None
        return value.source.cut(whole, span)
    return whole


class Gradients:
    """The gradients of the tensors that a pass reads, assembled from those of its chunks.

    Args:
        plan: the pass.
        tensors: its inputs.
        needed: for each of them, whether its gradient is needed.
    """

    def __init__(self, plan: ChunkSchedule, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.plan = plan
        self.needed = [n for n in range(len(needed)) if needed[n]]
        self.sums: dict[int, GradientSum] = {}
        self.parts: dict[int, Tensor] = {}
        self._reached: set[int] = set()
        for n in self.needed:
            if plan.inputs[n].layout is None:
                self.sums[n] = GradientSum(tensors[n], plan.axis.policy.exact)
            else:
                self.parts[n] = torch.zeros_like(tensors[n])

    def add(self, span: Span, leaves: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> None:
        """Differentiate one chunk."""
        flows = [(o, t) for o, t in zip(outputs, tangents, strict=True) if o.requires_grad]
        if not flows or not self.needed:
            return
        wanted = [leaves[n] for n in self.needed]
        with torch.enable_grad():  # ops without a gradient for an input are fine, as in backward()
            grads = torch.autograd.grad([o for o, _ in flows], wanted, [t for _, t in flows], allow_unused=True)
        for n, grad in zip(self.needed, grads, strict=True):
            if grad is None:
                continue
            if n in self.sums:
                self.sums[n].add(grad)
            else:
                self._reached.add(n)
                layout = self.plan.inputs[n].layout
                assert layout is not None
                layout.put(self.parts[n], span, grad)

    def take(self, scale: Tensor | None = None) -> dict[int, Tensor]:
        """The gradients times a number, in the memory they were summed in; they can be taken once."""
        taken = {n: total.take(scale) for n, total in self.sums.items() if total.used}
        parts = {n: part for n, part in self.parts.items() if n in self._reached}
        return taken | {n: part if scale is None else part.mul_(scale) for n, part in parts.items()}


def chunk_leaves(plan: ChunkSchedule, span: Span, tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """The inputs of one chunk, as leaves of an autograd graph of its own."""
    out = []
    for read, tensor, needs in zip(plan.inputs, tensors, needed, strict=True):
        part = tensor.detach() if read.layout is None else read.layout.cut(tensor.detach(), span)
        out.append(part.detach().requires_grad_(needs) if needs else part)
    return out


def run_chunk(
    plan: ChunkSchedule, span: Span, leaves: Sequence[Tensor], gradients: Gradients | None = None
) -> list[Any]:
    """Run one chunk; its results are tracked by autograd where `gradients` is given.

    Args:
        plan: the pass.
        span: the chunk's rows.
        leaves: its inputs.
        gradients: the sums that products with whole operands add to; None where nothing is differentiated.

    Returns:
        for each output of the pass, this chunk's part; None for a stack where the chunk has none of its rows.
    """
    known: dict[int, Any] = {}
    inputs = {id(read): leaf for read, leaf in zip(plan.inputs, leaves, strict=True)}
    places = {id(read): n for n, read in enumerate(plan.inputs)}

    def at(x: Any) -> Any:
        if isinstance(x, Input):
            return inputs[id(x)]
        if isinstance(x, LazyValue):
            return known[id(x)]
        return x.of(span) if isinstance(x, PerChunk) else x

    for step in _program(plan):
        if isinstance(step, CompiledRun):
            with torch.set_grad_enabled(gradients is not None and step.grad):
                results = step.function(*[at(x) for x in step.reads])
            known.update({id(v): t for v, t in zip(step.results, results, strict=True)})
            del results
            for value in step.last:
                known.pop(id(value), None)
            continue
        if step.rows is not None and not step.rows.local(span):
            known.update({id(v): None for v in step.outputs})
            continue
        with torch.set_grad_enabled(gradients is not None and step.grad):
            product = None if gradients is None else _product(step, places, gradients)
            if product is not None:
                factors, sums = product
                result = ProductInto.apply(  # type: ignore[no-untyped-call]
                    *(at(x) for x in factors), *sums
                )
            else:
                args, kwargs = step.spec.unflatten([at(x) for x in step.leaves])
                result = step.op(*args, **kwargs)
        for made, tensor in zip(step.outputs, tree_tensors(result), strict=True):
            if made is not None:
                known[id(made)] = tensor
        del result, tensor
        for place in step.last:
            known.pop(id(step.leaves[place]), None)
    return [known[id(v)] for v in plan.outputs]


def _program(plan: ChunkSchedule) -> Sequence[ScheduledStep | CompiledRun]:
    """The ops of a pass, as they are run."""
    if not plan.axis.policy.compiled:
        return plan.steps
    if plan.program is None:
        kept = {id(v) for v in plan.outputs}
        plan.program = compiled_program(plan.steps, kept, lambda step: step.op in _FACTORS or step.op in ROW_OPS)
    return plan.program


# Products of two factors: where those stand, and what is added to them.
_FACTORS: dict[Any, tuple[int, int, int | None]] = {aten.mm.default: (0, 1, None), aten.addmm.default: (1, 2, 0)}


def _product(
    step: ScheduledStep, places: dict[int, int], gradients: Gradients
) -> tuple[tuple[Any, Any, Any], tuple[GradientSum, bool, GradientSum | None]] | None:
    """The operands of a product with a whole factor whose gradient is needed, and their gradient sums; else None."""
    where = _FACTORS.get(step.op) if step.grad else None
    if where is None:
        return None
    a, b = step.leaves[where[0]], step.leaves[where[1]]
    added = None if where[2] is None else step.leaves[where[2]]
    sums = [gradients.sums.get(places[id(x)]) if isinstance(x, Input) else None for x in (a, b, added)]
    for second in (True, False):
        if (into := sums[second]) is not None and (a is not b):
            return (a, b, added), (into, second, sums[2])
    return None
