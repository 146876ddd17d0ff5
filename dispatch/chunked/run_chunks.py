"""Run a pass: each chunk forward and, where requested, backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtensors.dispatch.chunked.accumulation import ChunkSum, ProductInto, Sums
from subtensors.dispatch.chunked.compile_chunk import compiled_program
from subtensors.dispatch.chunked.lazy_graph import Combine, LazyValue, PerChunk, Span
from subtensors.dispatch.chunked.record import overwritten
from subtensors.dispatch.chunked.row_losses import cross_entropy
from subtensors.dispatch.chunked.schedule import ChunkSchedule, Input, ScheduledStep
from subtensors.dispatch.ops.tree import PyTree, tree_find
from subtensors.kernels.cross_entropy.logits_block import scale_
from subtensors.kernels.runtime.custom_ops import is_dense

aten = torch.ops.aten


class Results:
    """The results of a pass, assembled from those of its chunks."""

    def __init__(self, plan: ChunkSchedule) -> None:
        self.plan = plan
        self._tensors: list[Tensor | None] = [None] * len(plan.outputs)
        self._stacks: list[list[Tensor]] = [[] for _ in plan.outputs]

    def add(self, span: Span, parts: Sequence[Tensor | None]) -> None:
        """Add the parts of one chunk."""
        for n, (value, part) in enumerate(zip(self.plan.outputs, parts, strict=True)):
            if part is None:  # a chunk without rows of a stack
                continue
            tensor = self._tensors[n]
            if value.combine is Combine.STACK:
                self._stacks[n].append(part.detach())
            elif value.combine is Combine.CAT:
                if tensor is None:
                    strides = value.meta.stride() if is_dense(value.meta) else None
                    tensor = self._tensors[n] = (
                        part.new_empty(value.shape) if strides is None else part.new_empty_strided(value.shape, strides)
                    )
                    if self.plan.axis.is_valid is not None:
                        tensor.zero_()  # chunks of padding are skipped
                assert value.part_layout is not None
                value.part_layout.write_chunk(tensor, span, part.detach())
            else:
                self._tensors[n] = part.detach().clone() if tensor is None else tensor.add_(part.detach())

    def finish(self) -> list[Tensor]:
        """Return the full results."""
        results = []
        for value, tensor, stack in zip(self.plan.outputs, self._tensors, self._stacks, strict=True):
            result = torch.stack(stack) if value.combine is Combine.STACK else tensor
            assert result is not None
            results.append(result)
        return results


def chunk_tangent(plan: ChunkSchedule, value: LazyValue, span: Span, grad: Tensor) -> Tensor:
    """Return a chunk's part of the gradient of a result."""
    if value.combine is Combine.STACK:
        rows = value.part_layout
        return grad[sum(rows is None or rows.size_in(s) > 0 for s in plan.spans if s < span)]
    if value.combine is Combine.CAT:
        assert value.part_layout is not None
        return value.part_layout.chunk_of(grad, span)
    return grad


class Gradients:
    """The gradients of the tensors that a pass reads, assembled from those of its chunks.

    Args:
        plan: the pass.
        tensors: its inputs.
        needed: for each of them, whether its gradient is needed.
    """

    def __init__(self, plan: ChunkSchedule, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self.plan = plan
        self.needed = [n for n in range(len(needed)) if needed[n]]
        self.sums: dict[int, ChunkSum] = {}
        self.parts: dict[int, Tensor] = {}
        self._has_gradient: set[int] = set()
        for n in self.needed:
            tensor = tensors[n]
            assert tensor is not None
            if plan.inputs[n].layout is None:
                self.sums[n] = ChunkSum(tensor, plan.axis.policy.exact)
            else:
                self.parts[n] = torch.zeros_like(tensor)

    def add(
        self, span: Span, leaves: Sequence[Tensor | None], outputs: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> None:
        """Differentiate one chunk."""
        differentiable = [(o, t) for o, t in zip(outputs, tangents, strict=True) if o.requires_grad]
        if not differentiable or not self.needed:
            return
        inputs = [leaf for n in self.needed if (leaf := leaves[n]) is not None]
        with torch.enable_grad():  # ops without a gradient for an input are fine, as in backward()
            grads = torch.autograd.grad(
                [o for o, _ in differentiable], inputs, [t for _, t in differentiable], allow_unused=True
            )
        for n, grad in zip(self.needed, grads, strict=True):
            if grad is None:
                continue
            if n in self.sums:
                self.sums[n].add(grad)
            else:
                self._has_gradient.add(n)
                layout = self.plan.inputs[n].layout
                assert layout is not None
                layout.write_chunk(self.parts[n], span, grad)

    def take(self, scale: Tensor | None = None) -> dict[int, Tensor]:
        """Return the gradients times a number, in the memory they were summed in; they can be taken once."""
        taken = {n: total.take(scale) for n, total in self.sums.items() if total.used}
        parts = {n: part for n, part in self.parts.items() if n in self._has_gradient}
        return taken | {n: part if scale is None else scale_(part, scale) for n, part in parts.items()}


def chunk_leaves(
    plan: ChunkSchedule, span: Span, tensors: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the inputs of one chunk, as leaves of an autograd graph of its own; None for those that aren't given."""
    out: list[Tensor | None] = []
    for read, tensor, needs in zip(plan.inputs, tensors, needed, strict=True):
        if tensor is None:
            out.append(None)
            continue
        part = tensor.detach() if read.layout is None else read.layout.chunk_of(tensor.detach(), span)
        out.append(part.detach().requires_grad_(needs) if needs else part)
    return out


def run_chunk(
    plan: ChunkSchedule,
    span: Span,
    leaves: Sequence[Tensor | None],
    gradients: Gradients | None = None,
    results_read: bool = True,
) -> list[Tensor | None]:
    """Run one chunk; its results are tracked by autograd where `gradients` is given.

    Args:
        plan: the pass.
        span: the chunk's rows.
        leaves: its inputs.
        gradients: the sums that products with replicated operands add to; None where nothing is differentiated.
        results_read: whether the results are read, or only differentiated: then a product is left out that no gradient
            reads.

    Returns:
        for each output of the pass, this chunk's part; None for a stack where the chunk has none of the rows, and for
        results without a gradient where none are read.
    """
    known: dict[int, Tensor | None] = {}
    inputs = {id(read): leaf for read, leaf in zip(plan.inputs, leaves, strict=True)}
    positions = {id(read): n for n, read in enumerate(plan.inputs)}

    def operand(x: PyTree) -> PyTree:
        if isinstance(x, Input):
            return inputs[id(x)]
        if isinstance(x, LazyValue):
            return known[id(x)]
        return x.value_in(span) if isinstance(x, PerChunk) else x

    for step in _program(plan):
        if step.rides and not results_read:
            for value in step.last_uses:
                known.pop(id(value), None)
            continue
        if step.rows is not None and step.rows.dim_size and not step.rows.size_in(span):
            known.update({id(v): None for v in step.outputs})
            continue
        with torch.set_grad_enabled(gradients is not None and step.grad and not step.rides):
            product = None if gradients is None else _product(step, positions, gradients, results_read)
            if product is not None:
                (a, b, added), sums, is_read = product
                result = ProductInto.apply(  # type: ignore[no-untyped-call]
                    operand(a), operand(b), operand(added), sums, is_read
                )
            else:
                args, kwargs = step.spec.unflatten([operand(x) for x in step.leaves])
                result = step.op(*args, **kwargs)
        for output, tensor in zip(step.outputs, tree_find(Tensor, result), strict=True):
            if output is not None:
                known[id(output)] = tensor
        del result, tensor
        for value in step.last_uses:
            known.pop(id(value), None)
    return [known.get(id(v)) for v in plan.outputs]


def _program(plan: ChunkSchedule) -> Sequence[ScheduledStep]:
    """Return the ops of a pass, with runs of them compiled where the policy says so."""
    if not plan.axis.policy.compiled:
        return plan.steps
    if plan.program is None:
        outputs = {id(v) for v in plan.outputs}
        plan.program = compiled_program(plan.steps, outputs, lambda step: step.op in _UNCOMPILED)
    return plan.program


_UNCOMPILED = {
    *(aten.mm.default, aten.addmm.default, overwritten, cross_entropy),
    *(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
}
"""Products, which add to gradients in place; what a compiler takes for a copy; an op with kernels of its own; and those
whose compiled code ends the process at a target that is no class."""

# op: the positions of the two factors of a product and of the addend.
_FACTORS: dict[object, tuple[int, int, int | None]] = {aten.mm.default: (0, 1, None), aten.addmm.default: (1, 2, 0)}


def _product(
    step: ScheduledStep, positions: dict[int, int], gradients: Gradients, results_read: bool
) -> tuple[tuple[PyTree, PyTree, PyTree], Sums, bool] | None:
    """Return a product's operands, the sums of their gradients, and whether it is read; None: an op like any other."""
    found = _FACTORS.get(step.op) if step.grad and not step.rides else None
    if found is None:
        return None
    a, b = step.leaves[found[0]], step.leaves[found[1]]
    added = None if found[2] is None else step.leaves[found[2]]
    of_a, of_b, of_added = (
        gradients.sums.get(positions[id(x)]) if isinstance(x, Input) else None for x in (a, b, added)
    )
    is_read = results_read or not step.without_value
    if is_read and of_a is of_b:  # neither has a sum
        return None
    return (a, b, added), (of_a, of_b, of_added), is_read
