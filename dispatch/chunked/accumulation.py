"""Gradients of replicated operands, summed over chunks.

They are as exact as one sum, for two more bytes an element (`kernels/cross_entropy/compensated_sum.py`), or rounded to
their own dtype at each chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from subtensors.kernels.cross_entropy.compensated_sum import GradientSum
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype


class ChunkSum:
    """A sum of gradients of one tensor, of any number of dims.

    Args:
        like: the tensor; the sum has its sizes and dtype, and where it is dense its strides.
        exact: compensate rounding errors.

    Example:
        >>> one, small = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-9, dtype=torch.bfloat16)
        >>> for exact in (False, True):
        ...     total = ChunkSum(one, exact)
        ...     for part in (one, small, small, small, small):
        ...         total.add(part)
        ...     print(total.take().item())
        1.0
        1.0078125
    """

    def __init__(self, like: Tensor, exact: bool) -> None:
        # Sums go row after row of memory, so for a transposed tensor its transpose is summed.
        self._transposed = like.ndim == 2 and like.stride(0) == 1 and like.stride(1) == like.shape[0] > 1
        memory = torch.empty(like.t().shape if self._transposed else like.shape, dtype=like.dtype, device=like.device)
        self._result = memory.t() if self._transposed else memory
        self._sum = GradientSum(memory.view(memory.shape[0] if memory.ndim else 1, math.prod(memory.shape[1:])), exact)

    @property
    def used(self) -> bool:
        """Return whether a gradient was added."""
        return not self._sum.is_empty

    def add(self, part: Tensor) -> None:
        """Add a tensor of the same sizes, of this dtype or a wider one."""
        self._sum.add(part.t() if self._transposed else part.reshape(self._sum.result.shape))

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right, (m, k) and (k, n), where the sum is (m, n)."""
        self._sum.add_product(*((right.t(), left.t()) if self._transposed else (left, right)))

    def take(self, scale: Tensor | None = None) -> Tensor:
        """Return the sum times a number, 0-d; it can be neither added to nor taken again."""
        self._sum.take(scale)
        return self._result


Sums = tuple[ChunkSum | None, ChunkSum | None, ChunkSum | None]
"""The sums that the gradients of both factors of a product and of the addend are added to; None: returned instead."""


class _ProductContext(FunctionCtx):
    """The state that forward keeps for backward."""

    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    sums: Sums
    added_shape: torch.Size | None


class ProductInto(torch.autograd.Function):
    """a @ b (+ added), whose gradients are added to sums inside the GEMM, or never computed itself.

    Operands with a sum get no gradient from this function; the others do.
    """

    @staticmethod
    def forward(ctx: _ProductContext, a: Tensor, b: Tensor, added: Tensor | None, sums: Sums, is_read: bool) -> Tensor:
        """Compute the product, or return memory of its sizes where it is not read."""
        ctx.save_for_backward(a, b)
        ctx.sums = sums
        ctx.added_shape = None if added is None else added.shape
        if not is_read:
            return a.new_empty(a.shape[0], b.shape[1])
        return a @ b if added is None else torch.addmm(added, a, b)

    @staticmethod
    def backward(
        ctx: _ProductContext, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Add to the sums, and return the gradients of the operands without one."""
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_added = ctx.needs_input_grad[:3]
        a_sum, b_sum, added_sum = ctx.sums
        grad = grads[0]
        grad_a = grad_b = grad_added = None
        if b_sum is not None:
            b_sum.add_product(a.mH, grad)
        elif needs_b:
            grad_b = a.mH @ grad
        if a_sum is not None:
            a_sum.add_product(grad, b.mH)
        elif needs_a:
            grad_a = grad @ b.mH
        if needs_added:
            assert ctx.added_shape is not None
            wide = arithmetic_dtype(grad.dtype)
            summed = _summed_to(grad, ctx.added_shape, wide if added_sum is not None else grad.dtype)
            if added_sum is None:
                grad_added = summed
            else:
                added_sum.add(summed)
        return grad_a, grad_b, grad_added, None, None


def _summed_to(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an operand that was broadcast from `shape`."""
    dims = [d for d in range(2) if d < 2 - len(shape) or (shape[d - 2 + len(shape)] == 1 and grad.shape[d] != 1)]
    return grad.sum(dims, dtype=dtype).reshape(shape) if dims else grad
