"""Gradients in the padding: masked where they are unknown, left alone where they are known to be zero.

A backward goes call by call, from results to operands. A rule states when its gradient for an operand is zero in the
padding: always, or if the gradients of some results are. Most of a model's ops keep zeros there, so a mask at the loss
serves all of its layers.

In a double backward every mask is applied, since the gradients of gradients are undefined in the padding as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

IsZero = Callable[[], bool]
"""Called in the backward; returns True if the incoming gradient is zero in the padding already."""


class GradientTracker:
    """The knowledge of the gradient that arrives at a value: an operand of a call, or the result of a rule.

    Args:
        is_masked: True if the rule that made the value masks the gradient.
    """

    def __init__(self, is_masked: bool = False) -> None:
        self.is_masked = is_masked
        self.outside: list[bool] = []
        """One flag for each use of the value outside of the call: True if its last gradient was zero in the padding."""
        self.uses = 0
        """The number of rules in the call that used the value."""
        self.conditions: list[Sequence[GradientTracker]] = []
        """One entry for each use whose gradient is zero in the padding if the gradients of these results are."""

    def arrives_zero(self) -> bool:
        """Return whether the gradient that arrives is zero in the padding."""
        if self.uses != len(self.conditions) or not (self.uses or self.outside):
            return False
        return all(self.outside) and all(result.is_zero() for each in self.conditions for result in each)

    def is_zero(self) -> bool:
        """Return whether the gradient is zero in the padding once the value's own mask is applied."""
        return self.is_masked or self.arrives_zero()


class _Context(FunctionCtx):
    """The values that the backward needs."""

    is_zero: IsZero | None
    zero: float
    saved_tensors: tuple[Tensor, ...]


class MaskGradient(torch.autograd.Function):
    """The same values, or another one where a mask is False; the gradient there is zero."""

    @staticmethod
    def forward(
        ctx: _Context,
        dense: Tensor,
        mask: Tensor,
        value: float | Tensor | None,
        zero: float | Tensor,
        is_zero: IsZero | None,
    ) -> Tensor:
        """An alias of `dense` without a value, else the filled values."""
        ctx.is_zero, ctx.zero = is_zero, 0 if isinstance(zero, Tensor) else zero
        ctx.save_for_backward(*[t for t in (mask, zero) if isinstance(t, Tensor)])
        return dense.view_as(dense) if value is None else torch.where(mask, dense, value)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient where the mask is True, else zero."""
        gradient = gradients[0]
        if ctx.is_zero is None or not ctx.is_zero() or torch.is_grad_enabled():
            mask, *zero = ctx.saved_tensors
            gradient = torch.where(mask, gradient, zero[0] if zero else ctx.zero)
        return gradient, None, None, None, None
