"""Sums of matrix products that are as exact as one product, without a second copy of the result in float32.

A gradient summed over C chunks in its own 16-bit dtype is rounded C times, and its error grows with C. Summed in
float32 it is rounded once; a float32 sum takes twice the memory of the result, but the result's own memory is half of
that. So the sum of the upper half of the rows lives in the memory of the result, that of the lower half beside it, and
at the end both are rounded into place: the upper one over itself, from the front, in stretches that double.

        while it is summed      [ float32, rows 0 .. V/2  ]    [ float32, rows V/2 .. V ]
        at the end              [ 16 bits, rows 0 .. V    ]    (freed)

Two bytes an element beside the result, and every addition happens inside a GEMM. Who has as much memory to give back
at the end sums in one float32 matrix, and rounds it into new memory.

A float32 result keeps what its additions round off in bfloat16 (Kahan, https://doi.org/10.1145/363707.363723, by
Knuth's exact sum of two): two bytes an element as well. Its products are added by a kernel, a piece at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.kernels.runtime.current_device import launching_on
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype

BLOCK = 2048

PIECE_BYTES = 64 * 2**20
"""Float32 products that are added at one time to a compensated sum."""

FIRST_STRETCH = 2**16
"""Elements that are rounded into place by way of a copy; from there on stretches double."""


def compensated_add_by_kernel(partial: Tensor, total: Tensor, lost: Tensor, first: bool) -> None:
    """total + lost += partial, where lost is what rounding took from the total, by a Triton kernel.

    Args:
        partial, total: float32, contiguous, of one shape.
        lost: bfloat16, of that shape.
        first: nothing was added yet, and `total` and `lost` hold nothing.
    """
    from subtensors.kernels.cross_entropy.scale_add_kernel import compensated_add_kernel

    count = partial.numel()
    if count:
        with launching_on(total.device):
            compensated_add_kernel[(-(-count // BLOCK),)](partial, total, lost, count, FIRST=first, BLOCK=BLOCK)


def compensated_add(partial: Tensor, total: Tensor, lost: Tensor, first: bool) -> None:
    """The same in plain torch: the kernel's reference."""
    if first:
        total.copy_(partial)
        lost.zero_()
        return
    added = partial + lost.float()
    after = total + added
    seen = after - total
    rounded_off = (total - (after - seen)) + (added - seen)
    lost.copy_(torch.where(rounded_off.isnan(), 0.0, rounded_off))  # beside infinity nothing is lost
    total.copy_(after)


class CompensatedGemmSum:
    """A sum of matrix products a^T b, the weight gradient of chunk after chunk.

    Args:
        result: (rows, columns), contiguous; what it holds is overwritten, and it holds the sum after the last product.
        operand_dtype: of what will be multiplied. A result that is wider has bits enough as it is.
        exact: keep more than the bits of the result between additions; otherwise each sum is rounded to its dtype.
        terms: how many products will be added.
        kernels: whether Triton kernels add; otherwise torch.
    """

    def __init__(self, result: Tensor, operand_dtype: torch.dtype, exact: bool, terms: int, kernels: bool) -> None:
        self.result, self.terms, self.added = result, terms, 0
        self.beside: Tensor | None = None
        """The buffer kept beside the result until the sum is complete."""
        self._is_compensated = result.dtype == torch.float32
        self._kernels = kernels
        if terms == 0:
            result.zero_()
        elif exact and terms > 1 and result.dtype == operand_dtype and result.dtype != torch.float64:
            rows, columns = result.shape
            if self._is_compensated:
                self.beside = result.new_empty(rows, columns, dtype=torch.bfloat16)
                self._partial = result.new_empty(min(rows, max(1, PIECE_BYTES // (4 * max(1, columns)))), columns)
            else:
                half = rows // 2
                self.beside = result.new_empty(rows - half, columns, dtype=torch.float32)
                self._upper = result.view(-1)[: 2 * half * columns].view(torch.float32).view(half, columns)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a^T b.

        Args:
            a: (n, rows).
            b: (n, columns), of the same dtype.
        """
        first, last = self.added == 0, self.added == self.terms - 1
        self.added += 1
        if self.beside is None:
            product_into(self.result, a.t(), b, accumulate=not first)
        elif self._is_compensated:
            self._add_compensated(a, b, first)
        else:
            half = self._upper.shape[0]
            product_into(self._upper, a[:, :half].t(), b, accumulate=not first)
            product_into(self.beside, a[:, half:].t(), b, accumulate=not first)
            if last:
                self._round()

    def take(self) -> Tensor:
        """The sum, complete."""
        return self.result

    def _add_compensated(self, a: Tensor, b: Tensor, first: bool) -> None:
        assert self.beside is not None
        add = compensated_add_by_kernel if self._kernels else compensated_add
        for begin in range(0, self.result.shape[0], self._partial.shape[0]):
            end = min(begin + self._partial.shape[0], self.result.shape[0])
            partial = self._partial[: end - begin]
            product_into(partial, a[:, begin:end].t(), b, accumulate=False)
            add(partial, self.result[begin:end], self.beside[begin:end], first)

    def _round(self) -> None:
        """Write the result over the sums that lie in its memory, then those that lie beside it."""
        assert self.beside is not None
        sums, result = self._upper.view(-1), self.result.view(-1)
        begin, end = 0, min(FIRST_STRETCH, sums.numel())
        result[:end].copy_(sums[:end].clone())
        # Elements [begin, end) are bytes [2 begin, 2 end), and their sums bytes [4 begin, 4 end).
        while end < sums.numel():
            begin, end = end, min(2 * end, sums.numel())
            result[begin:end].copy_(sums[begin:end])
        self.result[self._upper.shape[0] :].copy_(self.beside)


class Float32Sum:
    """A sum of matrix products a^T b in float32 (float64 of such), rounded once into memory that is taken at the end.

    A product goes into one matrix, which is faster than into two halves. While it is rounded there is the result beside
    it: for those who by then have let go of as much.

    Args:
        rows, columns: of the sum.
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
        """The sum."""
        return self._sum.to(self._dtype)


def product_into(result: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """result = a @ b, or += where it accumulates, each element summed in float32 (float64 for such operands).

    Args:
        result: (m, n), of the operands' dtype or float32.
        a: (m, k).
        b: (k, n).
        accumulate: add to what the result holds.
    """
    if result.dtype == a.dtype:
        if accumulate:
            result.addmm_(a, b)
        else:
            torch.mm(a, b, out=result)
    elif result.is_cuda:
        if accumulate:
            torch.addmm(result, a, b, out_dtype=result.dtype, out=result)
        else:
            torch.mm(a, b, out_dtype=result.dtype, out=result)
    else:  # a GEMM with a wider result exists on GPUs alone
        product_into(result, a.to(result.dtype), b.to(result.dtype), accumulate)
