"""Sums of matrix products that are as exact as one product, without a second copy of the result in float32.

A gradient summed over C chunks in its own 16-bit dtype is rounded C times, and its error grows with C. Summed in
float32 it is rounded once; a float32 sum takes twice the memory of the result, and the result's own memory is half of
that. So the sum of the upper half of the rows lives in the memory of the result and that of the lower half in a buffer,
and at the end both are rounded into place: the upper one over itself, from the front, in stretches that double.

        during the sum          [ float32, rows 0 .. V/2  ]    [ float32, rows V/2 .. V ]
        at the end              [ 16 bits, rows 0 .. V    ]    (freed)

This takes two bytes an element beside the result, and every addition happens inside a GEMM. `Float32Sum` sums in one
float32 matrix and rounds it into new memory: for callers that have freed as much by then.

A float32 result keeps the rounding errors of its additions in bfloat16 (Kahan, https://doi.org/10.1145/363707.363723,
by Knuth's exact sum of two): two bytes an element as well. Its products are added by a kernel, a piece at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.logits_block import product_into
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.kernels.runtime.launcher import launching_on

BLOCK = 2048

PIECE_BYTES = 64 * 2**20
"""The size of a piece: float32 products are added to a compensated sum a piece at a time."""

FIRST_STRETCH = 2**16
"""The number of elements that are rounded into place through a copy; the following stretches double."""


def compensated_add_by_kernel(partial: Tensor, total: Tensor, lost: Tensor, first: bool) -> None:
    """Compute total + lost += partial by a Triton kernel, where lost is the rounding error of the total.

    Args:
        partial, total: float32, contiguous, of one shape.
        lost: bfloat16, of that shape.
        first: True where nothing was added yet, and `total` and `lost` are uninitialized.
    """
    from subtensors.kernels.cross_entropy.scale_add_kernel import compensated_add_kernel

    count = partial.numel()
    if count:
        with launching_on(total.device):
            compensated_add_kernel[(-(-count // BLOCK),)](partial, total, lost, count, FIRST=first, BLOCK=BLOCK)


def compensated_add(partial: Tensor, total: Tensor, lost: Tensor, first: bool) -> None:
    """Compute the same in plain torch: the kernel's reference."""
    if first:
        total.copy_(partial)
        lost.zero_()
        return
    added = partial + lost.float()
    after = total + added
    seen = after - total
    rounded_off = (total - (after - seen)) + (added - seen)
    lost.copy_(torch.where(rounded_off.isnan(), 0.0, rounded_off))  # the rounding error of an infinite sum is NaN
    total.copy_(after)


class CompensatedGemmSum:
    """A sum of matrix products a^T b, the weight gradient of chunk after chunk.

    Args:
        result: (rows, columns), contiguous and uninitialized; it holds the sum after the last product.
        operand_dtype: of the factors. A wider result needs no compensation.
        exact: whether to keep rounding errors between additions; otherwise each sum is rounded to the result's dtype.
        terms: the number of products that will be added.
        kernels: whether to add by a Triton kernel, or in plain torch.
    """

    def __init__(self, result: Tensor, operand_dtype: torch.dtype, exact: bool, terms: int, kernels: bool) -> None:
        self.result, self.terms, self.added = result, terms, 0
        self.buffer: Tensor | None = None
        """The memory kept in addition to the result until the sum is complete."""
        self._is_compensated = result.dtype == torch.float32
        self._kernels = kernels
        if terms == 0:
            result.zero_()
        elif exact and terms > 1 and result.dtype == operand_dtype and result.dtype != torch.float64:
            rows, columns = result.shape
            if self._is_compensated:
                self.buffer = result.new_empty(rows, columns, dtype=torch.bfloat16)
                self._partial = result.new_empty(min(rows, max(1, PIECE_BYTES // (4 * max(1, columns)))), columns)
            else:
                half = rows // 2
                self.buffer = result.new_empty(rows - half, columns, dtype=torch.float32)
                self._upper = result.view(-1)[: 2 * half * columns].view(torch.float32).view(half, columns)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b.

        Args:
            a: (n, rows).
            b: (n, columns), of the same dtype.
        """
        first, last = self.added == 0, self.added == self.terms - 1
        self.added += 1
        if self.buffer is None:
            product_into(self.result, a.t(), b, accumulate=not first)
        elif self._is_compensated:
            self._add_compensated(a, b, first)
        else:
            half = self._upper.shape[0]
            product_into(self._upper, a[:, :half].t(), b, accumulate=not first)
            product_into(self.buffer, a[:, half:].t(), b, accumulate=not first)
            if last:
                self._round()

    def take(self) -> Tensor:
        """Return the complete sum."""
        return self.result

    def _add_compensated(self, a: Tensor, b: Tensor, first: bool) -> None:
        assert self.buffer is not None
        add = compensated_add_by_kernel if self._kernels else compensated_add
        for begin in range(0, self.result.shape[0], self._partial.shape[0]):
            end = min(begin + self._partial.shape[0], self.result.shape[0])
            partial = self._partial[: end - begin]
            product_into(partial, a[:, begin:end].t(), b, accumulate=False)
            add(partial, self.result[begin:end], self.buffer[begin:end], first)

    def _round(self) -> None:
        """Round the sums in the memory of the result into place, then those in the buffer."""
        assert self.buffer is not None
        sums, result = self._upper.view(-1), self.result.view(-1)
        begin, end = 0, min(FIRST_STRETCH, sums.numel())
        result[:end].copy_(sums[:end].clone())
        # Elements [begin, end) are bytes [2 begin, 2 end), and their sums bytes [4 begin, 4 end).
        while end < sums.numel():
            begin, end = end, min(2 * end, sums.numel())
            result[begin:end].copy_(sums[begin:end])
        self.result[self._upper.shape[0] :].copy_(self.buffer)


class Float32Sum:
    """A sum of matrix products a^T b in float32 (float64 for such factors), rounded once into memory of its own.

    One product into one matrix is faster than two into two halves. Rounding needs the memory of the result in addition.

    Args:
        rows, columns: the shape of the sum.
        like: a tensor of the dtype and device of the result.
    """

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        self._dtype = like.dtype
        self._sum = torch.empty(rows, columns, dtype=arithmetic_dtype(like.dtype), device=like.device)
        self._is_empty = True

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b.

        Args:
            a: (n, rows).
            b: (n, columns), of the same dtype.
        """
        product_into(self._sum, a.t(), b, accumulate=not self._is_empty)
        self._is_empty = False

    def take(self) -> Tensor:
        """Return the sum in the dtype of the result."""
        return self._sum.to(self._dtype)
