"""Writes without gradients to a value that has one: as in plain torch, the gradient passes them unchanged.

with torch.no_grad():
    logits[:, banned] = -torch.inf     # new numbers, and the gradient that `logits` had before
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.dispatch.chunked.lazy_graph import LazyValue, emit, is_differentiated, replicated
from subtensors.dispatch.chunked.record import sliced


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, old: Tensor, new: Tensor) -> Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """Return the new numbers, whose gradient is that of the old ones."""
    out: Tensor = _Overwritten.apply(old, new)  # type: ignore[no-untyped-call]
    return out


def with_gradient_of(old: LazyValue, new: LazyValue) -> LazyValue:
    """Return a value that was written over another one, with that one's gradient if the write had no part in it.

    Args:
        old: the value before.
        new: of the same sizes and dtype, without a gradient.
    """
    is_detached = new.node is not None and new.node.op is torch.ops.aten.detach.default
    if is_detached or is_differentiated() or not old.needs_grad:
        return new
    layout = old.layout
    operand = replicated(new) if layout is None else sliced(new, layout)
    axis = None if layout is None else layout.axis
    out: LazyValue = emit(overwritten, (old, operand), {}, old.meta, [layout], axis, grad=True)
    return out
