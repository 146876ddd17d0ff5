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
    """The values that a backward of the functions below needs."""

    is_zero: IsZero | None
    zero: float
    saved_tensors: tuple[Tensor, ...]


class MaskGradient(torch.autograd.Function):
    """The identity; its gradient is zero where a mask is False."""

    @staticmethod
    def forward(ctx: _Context, dense: Tensor, mask: Tensor, zero: float | Tensor, is_zero: IsZero | None) -> Tensor:
        """An alias of `dense`."""
        _keep(ctx, mask, zero, is_zero)
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient where the mask is True, else zero."""
        return _masked(ctx, gradients[0]), None, None, None


class FillPadding(torch.autograd.Function):
    """Other values where a mask is False; the gradient there is zero."""

    @staticmethod
    def forward(
        ctx: _Context, dense: Tensor, mask: Tensor, value: float | Tensor, zero: float | Tensor, is_zero: IsZero | None
    ) -> Tensor:
        """The filled values."""
        _keep(ctx, mask, zero, is_zero)
        return torch.where(mask, dense, value)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient where the mask is True, else zero."""
        return _masked(ctx, gradients[0]), None, None, None, None


def _keep(ctx: _Context, mask: Tensor, zero: float | Tensor, is_zero: IsZero | None) -> None:
    ctx.is_zero, ctx.zero = is_zero, 0 if isinstance(zero, Tensor) else zero
    ctx.save_for_backward(*[t for t in (mask, zero) if isinstance(t, Tensor)])


def _masked(ctx: _Context, gradient: Tensor) -> Tensor:
    if ctx.is_zero is not None and ctx.is_zero() and not torch.is_grad_enabled():
        return gradient
    mask, *zero = ctx.saved_tensors
    return torch.where(mask, gradient, zero[0] if zero else ctx.zero)
