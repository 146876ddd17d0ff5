"""Gradients of whole operands, added up over chunks.

In its own 16-bit dtype a sum over C chunks is rounded C times. Here an exact sum is a pair of tensors: `high`, which is
the gradient itself, and `low`, what rounding took from it. For 16-bit gradients `low` has their dtype: together they
keep 16 bits of fraction of a bfloat16 sum, so that only the last rounding is felt. For float32 it is a bfloat16. So
there is never a float32 copy beside a 16-bit gradient. Additions are done in float32 a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 24
"""Bytes of a float32 piece."""

_LOW = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, torch.float32: torch.bfloat16}


class GradientSum:
    """A sum of gradients of one tensor.

    Args:
        like: the tensor; the sum has its sizes, strides and dtype.
        exact: keep what rounding takes.

    Example:
        >>> one, small = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-9, dtype=torch.bfloat16)
        >>> for exact in (False, True):
        ...     total = GradientSum(one, exact)
        ...     for part in (one, small, small, small, small):
        ...         total.add(part)
        ...     print(total.take().item())
        1.0
        1.0078125
    """

    def __init__(self, like: Tensor, exact: bool) -> None:
        self.used = False
        """Was anything added?"""
        self.high = torch.zeros_like(like)
        low = _LOW.get(like.dtype) if exact else None
        self.low = None if low is None else torch.zeros_like(like, dtype=low)

    def add(self, part: Tensor) -> None:
        """Add a tensor of the same sizes."""
        self.used = True
        if self.low is None:
            self.high.add_(part)
            return
        for place in self._pieces():
            self._add(place, part[place].to(torch.float32))

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right.

        Args:
            left: (m, k).
            right: (k, n), where the sum is (m, n).
        """
        self.used = True
        if self.low is None:
            self.high.addmm_(left, right)
            return
        columns = self._by_columns()
        for place in self._pieces():
            a, b = (left, right[:, place[1]]) if columns else (left[place[0]], right)
            if self.high.dtype == torch.float32:
                part = a @ b
            elif a.is_cuda:
                part = torch.mm(a, b, out_dtype=torch.float32)
            else:
                part = a.to(torch.float32) @ b.to(torch.float32)
            self._add(place, part)

    def take(self, scale: Tensor | None = None) -> Tensor:
        """The sum, times a number, in the memory of the sum: it can't be added to or taken again.

        Args:
            scale: 0-d, or None for one.
        """
        if self.low is None:
            return self.high if scale is None else self.high.mul_(scale)
        for place in self._pieces():
            high = self.high[place]
            total = high.to(torch.float32) + self.low[place]
            # inf - inf is NaN, where there is nothing left to add.
            total = torch.where(torch.isfinite(high), total, high.to(torch.float32))
            high.copy_(total if scale is None else total * scale)
        return self.high

    def _add(self, place: tuple[slice, ...], part: Tensor) -> None:
        assert self.low is not None
        high, low = self.high[place], self.low[place]
        if high.dtype == torch.float32:
            total = high + part
            moved = total - high
            lost = (high - (total - moved)) + (part - moved)
            low.add_(torch.where(torch.isfinite(lost), lost, 0))
            high.copy_(total)
            return
        total = part.add_(high).add_(low)
        high.copy_(total)
        lost = total.sub_(high)
        low.copy_(torch.where(torch.isfinite(lost), lost, 0))

    def _by_columns(self) -> bool:
        """Is the second dim the one that pieces are cut from, because its columns are what lies together?"""
        return self.high.ndim == 2 and self.high.stride(1) > self.high.stride(0)

    def _pieces(self) -> Iterator[tuple[slice, ...]]:
        """Places of the sum that take at most `PIECE` bytes in float32, each together in memory."""
        sizes = self.high.shape
        if not sizes:
            yield ()
            return
        dim = 1 if self._by_columns() else 0
        step = max(1, PIECE // max(4 * self.high.numel() // max(sizes[dim], 1), 1))
        for start in range(0, sizes[dim], step):
            place = slice(start, min(start + step, sizes[dim]))
            yield (slice(None), place) if dim else (place,)


class ProductInto(torch.autograd.Function):
    """a @ b (+ added) where one factor is the same for every chunk: its gradient goes straight into a sum.

    What has a sum gets no gradient of its own here; the others do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
        into: GradientSum,
        second: bool,
        added_into: GradientSum | None,
    ) -> Tensor:
        """The product; `second` says that `b` is the factor with the sum."""
        ctx.save_for_backward(a, b)
        ctx.sums = into, second, added_into
        ctx.added_shape = None if added is None else added.shape
        return a @ b if added is None else torch.addmm(added, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Add to the sums, and give the others their gradients."""
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_added = ctx.needs_input_grad[:3]
        into, second, added_into = ctx.sums
        grad = grads[0]
        grad_a = grad_b = grad_added = None
        if second:
            into.add_product(a.t(), grad)
            grad_a = grad @ b.t() if needs_a else None
        else:
            into.add_product(grad, b.t())
            grad_b = a.t() @ grad if needs_b else None
        if needs_added:
            wide = torch.float32 if grad.element_size() == 2 else grad.dtype
            summed = _summed_to(grad, ctx.added_shape, wide if added_into is not None else grad.dtype)
            if added_into is None:
                grad_added = summed
            else:
                added_into.add(summed)
        return grad_a, grad_b, grad_added, None, None, None


def _summed_to(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of what was broadcast from `shape`."""
    dims = [d for d in range(2) if d < 2 - len(shape) or (shape[d - 2 + len(shape)] == 1 and grad.shape[d] != 1)]
    return grad.sum(dims, dtype=dtype).reshape(shape) if dims else grad
