"""Gradients of replicated operands, summed over chunks.

In its own 16-bit dtype a sum over C chunks is rounded C times. Exact sums of 16-bit gradients are float32 sums, half in
the gradient's own memory and half in a buffer, that are rounded into place at the end. Exact sums of float32 gradients
keep the rounding errors in bfloat16 (`kernels/cross_entropy/compensated_sum.py`). Either takes two more bytes an
element.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.kernels.cross_entropy.compensated_sum import (
    FIRST_STRETCH,
    PIECE_BYTES,
    compensated_add,
    compensated_add_by_kernel,
)
from subtensors.kernels.cross_entropy.logits_block import product_into
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype, has_kernel


class GradientSum:
    """A sum of gradients of one tensor.

    Args:
        like: the tensor; the sum has its sizes and dtype, and where it is dense its strides.
        exact: compensate rounding errors.

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
        """True once a gradient was added."""
        # Sums go row after row of memory, so for a transposed tensor its transpose is summed.
        self._transposed = like.ndim == 2 and like.stride(0) == 1 and like.stride(1) == like.shape[0] > 1
        sizes = (like.shape[1], like.shape[0]) if self._transposed else like.shape
        memory = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        self.result = memory.t() if self._transposed else memory
        rows = memory.shape[0] if memory.ndim else 1
        self._matrix = memory.view(rows, math.prod(memory.shape[1:]))
        self._lost: Tensor | None = None
        self._halves: tuple[Tensor, Tensor] | None = None
        if exact and like.dtype == torch.float32:
            self._lost = torch.zeros_like(self._matrix, dtype=torch.bfloat16)
        elif exact and like.dtype in (torch.bfloat16, torch.float16):
            rows, columns = self._matrix.shape
            half = rows // 2
            upper = memory.view(-1)[: 2 * half * columns].view(torch.float32).view(half, columns)
            lower = torch.zeros(rows - half, columns, dtype=torch.float32, device=like.device)
            self._halves = upper, lower

    def add(self, part: Tensor) -> None:
        """Add a tensor of the same sizes, of this dtype or a wider one."""
        self.used = True
        part = part.t() if self._transposed else part.reshape(self._matrix.shape)
        if self._halves is not None:
            upper, lower = self._halves
            upper.add_(part[: len(upper)])
            lower.add_(part[len(upper) :])
        elif self._lost is not None:
            for piece in self._pieces():
                self._compensate(piece, part[piece].to(torch.float32).contiguous())
        else:
            self._matrix.add_(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right.

        Args:
            left: (m, k).
            right: (k, n), where the sum is (m, n).
        """
        self.used = True
        if self._transposed:
            left, right = right.t(), left.t()
        if self._halves is not None:
            upper, lower = self._halves
            if len(upper):
                product_into(upper, left[: len(upper)], right, accumulate=True)
            product_into(lower, left[len(upper) :], right, accumulate=True)
        elif self._lost is not None:
            for piece in self._pieces():
                self._compensate(piece, left[piece] @ right)
        else:
            self._matrix.addmm_(left, right)

    def take(self, scale: Tensor | None = None) -> Tensor:
        """Return the sum times a number, in its own memory; it can be neither added to nor taken again.

        Args:
            scale: 0-d, or None for one.
        """
        if self._halves is not None:
            self._round(scale)
            self._halves = None
            return self.result
        if self._lost is not None:
            for piece in self._pieces():
                self._matrix[piece].add_(self._lost[piece])
            self._lost = None
        return self.result if scale is None else self.result.mul_(scale)

    def _compensate(self, piece: slice, part: Tensor) -> None:
        assert self._lost is not None
        add = compensated_add_by_kernel if has_kernel(part) else compensated_add
        add(part, self._matrix[piece], self._lost[piece], False)

    def _pieces(self) -> list[slice]:
        """Return slices of the rows of the sum, which are added to one at a time."""
        rows, columns = self._matrix.shape
        step = max(1, PIECE_BYTES // (4 * max(columns, 1)))
        return [slice(start, start + step) for start in range(0, rows, step)]

    def _round(self, scale: Tensor | None) -> None:
        """Round the sums into the result: those in its memory from the front, then those in the buffer."""
        assert self._halves is not None
        upper, lower = self._halves
        sums, result = upper.view(-1), self._matrix.view(-1)
        if scale is not None:
            sums.mul_(scale)
            lower.mul_(scale)
        begin, end = 0, min(FIRST_STRETCH, sums.numel())
        result[:end].copy_(sums[:end].clone())
        # Elements [begin, end) are bytes [2 begin, 2 end), and their sums bytes [4 begin, 4 end).
        while end < sums.numel():
            begin, end = end, min(2 * end, sums.numel())
            result[begin:end].copy_(sums[begin:end])
        self._matrix[len(upper) :].copy_(lower)


class _ProductContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    sums: tuple[GradientSum, bool, GradientSum | None]
    added_shape: torch.Size | None


class ProductInto(torch.autograd.Function):
    """a @ b (+ added) where one factor is replicated: its gradient is added to a sum inside the GEMM.

    Operands with a sum get no gradient from this function; the others do.
    """

    @staticmethod
    def forward(
        ctx: _ProductContext,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
        into: GradientSum,
        second: bool,
        added_into: GradientSum | None,
    ) -> Tensor:
        """Compute the product; `second` says that `b` is the factor with the sum."""
        ctx.save_for_backward(a, b)
        ctx.sums = into, second, added_into
        ctx.added_shape = None if added is None else added.shape
        return a @ b if added is None else torch.addmm(added, a, b)

    @staticmethod
    def backward(
        ctx: _ProductContext, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Add to the sums, and return the gradients of the operands without one."""
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_added = ctx.needs_input_grad[:3]
        into, second, added_into = ctx.sums
        grad = grads[0]
        grad_a = grad_b = grad_added = None
        if second:
            into.add_product(a.mH, grad)
            grad_a = grad @ b.mH if needs_a else None
        else:
            into.add_product(grad, b.mH)
            grad_b = a.mH @ grad if needs_b else None
        if needs_added:
            assert ctx.added_shape is not None
            wide = arithmetic_dtype(grad.dtype)
            summed = _summed_to(grad, ctx.added_shape, wide if added_into is not None else grad.dtype)
            if added_into is None:
                grad_added = summed
            else:
                added_into.add(summed)
        return grad_a, grad_b, grad_added, None, None, None


def _summed_to(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an operand that was broadcast from `shape`."""
    dims = [d for d in range(2) if d < 2 - len(shape) or (shape[d - 2 + len(shape)] == 1 and grad.shape[d] != 1)]
    return grad.sum(dims, dtype=dtype).reshape(shape) if dims else grad
