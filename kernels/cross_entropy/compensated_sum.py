"""Sums of matrix products that are as exact as one product, without a second copy of the result in float32.

A gradient summed over C chunks in its own 16-bit dtype is rounded C times, and its error grows with C. Summed in
float32 it is rounded once; a float32 sum takes twice the memory of the result, and the result's own memory is half of
that. So the sum of the upper half of the rows lives in the memory of the result and that of the lower half in a buffer,
and at the end both are rounded into place: the upper one over itself, from the front, in stretches that double.

        during the sum          [ float32, rows 0 .. V/2  ]    [ float32, rows V/2 .. V ]
        at the end              [ 16 bits, rows 0 .. V    ]    (freed)

This takes two bytes an element beside the result, and every product is added inside a GEMM. Callers that have freed as
much memory by then sum in one float32 matrix and round that, which is faster than two products into two halves.

A float32 result keeps the rounding errors of its additions in bfloat16 (Kahan, https://doi.org/10.1145/363707.363723,
by Knuth's exact sum of two): two bytes an element as well. Its products are added by a kernel, a piece at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.logits_block import product_into, rows_at_once, scale_, uses_kernels
from subtensors.kernels.runtime.launcher import cached_launcher

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
    count = partial.numel()
    if count:
        launch = cached_launcher("cross_entropy.scale_add_kernel", "compensated_add_kernel")
        launch(-(-count // BLOCK), (partial, total, lost), count, FIRST=first, BLOCK=BLOCK)


def compensated_add(partial: Tensor, total: Tensor, lost: Tensor, first: bool) -> None:
    """Compute the same in plain torch: the kernel's reference."""
    if first:
        total.copy_(partial)
        lost.zero_()
        return
    size = rows_at_once(total.numel(), 1)
    pieces = (t.view(-1).split(size) for t in (partial, total, lost))
    for part, own_total, own_lost in zip(*pieces, strict=True):
        added = part + own_lost.float()
        after = own_total + added
        seen = after - own_total
        rounded_off = (own_total - (after - seen)) + (added - seen)
        own_lost.copy_(rounded_off.masked_fill_(rounded_off.isnan(), 0.0))  # of an infinite sum it is NaN
        own_total.copy_(after)


class GradientSum:
    """A sum of matrix products and other terms: the gradient of a weight over chunk after chunk.

    Args:
        result: (rows, columns), contiguous and uninitialized; it holds the sum once that is taken.
        exact: whether to keep rounding errors between additions; otherwise each sum is rounded to the result's dtype.
        kernels: whether to add by a Triton kernel; None: on a GPU.
    """

    def __init__(self, result: Tensor, exact: bool, kernels: bool | None = None) -> None:
        self.result, self.is_empty = result, True
        self.buffer: Tensor | None = None
        """The memory kept in addition to the result until the sum is complete."""
        self._upper: Tensor | None = None
        """The sums of the upper rows in the memory of a 16-bit result."""
        self._kernels = uses_kernels(result, kernels)
        rows, columns = result.shape
        if exact and result.dtype == torch.float32:
            self.buffer = torch.empty_like(result, dtype=torch.bfloat16)
        elif exact and result.itemsize == 2:
            half = rows // 2
            self.buffer = result.new_empty(rows - half, columns, dtype=torch.float32)
            self._upper = result.view(-1)[: 2 * half * columns].view(torch.float32).view(half, columns)

    def add(self, part: Tensor) -> None:
        """Add a tensor of the same sizes, of the result's dtype or a wider one."""
        first, self.is_empty = self.is_empty, False
        if self.buffer is not None and self._upper is None:
            for piece in self._pieces():
                self._compensate(piece, part[piece].to(torch.float32).contiguous(), first)
            return
        for total, piece in self._totals():
            if first:
                total.copy_(part[piece])
            else:
                total.add_(part[piece])

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right.

        Args:
            left: (rows, k).
            right: (k, columns), of the same dtype.
        """
        first, self.is_empty = self.is_empty, False
        if self.buffer is not None and self._upper is None:
            for piece in self._pieces():
                partial = self.result.new_empty(self.result[piece].shape)
                product_into(partial, left[piece], right, accumulate=False)
                self._compensate(piece, partial, first)
            return
        for total, piece in self._totals():
            if len(total):
                product_into(total, left[piece], right, accumulate=not first)

    def take(self, scale: Tensor | None = None) -> Tensor:
        """Return the sum times a number, in its own memory; it can be neither added to nor taken again.

        Args:
            scale: 0-d, or None for one.
        """
        buffer, self.buffer = self.buffer, None
        if self.is_empty:
            return self.result.zero_()
        if self._upper is not None and buffer is not None:
            self._round(self._upper, buffer, scale)
            return self.result
        if buffer is not None:
            for piece in self._pieces():
                self.result[piece].add_(buffer[piece])
        return self.result if scale is None else scale_(self.result, scale)

    def _totals(self) -> list[tuple[Tensor, slice]]:
        """Return the matrices that are summed in, and the rows of the result that each holds."""
        if self._upper is None or self.buffer is None:
            return [(self.result, slice(None))]
        half = len(self._upper)
        return [(self._upper, slice(half)), (self.buffer, slice(half, None))]

    def _compensate(self, piece: slice, part: Tensor, first: bool) -> None:
        assert self.buffer is not None
        add = compensated_add_by_kernel if self._kernels else compensated_add
        add(part, self.result[piece], self.buffer[piece], first)

    def _pieces(self) -> list[slice]:
        """Return slices of the rows of the sum, which are added to one at a time."""
        rows, columns = self.result.shape
        step = max(1, PIECE_BYTES // (4 * max(columns, 1)))
        return [slice(start, start + step) for start in range(0, rows, step)]

    def _round(self, upper: Tensor, lower: Tensor, scale: Tensor | None) -> None:
        """Round the sums in the memory of the result into place, from the front, then those in the buffer."""
        sums, result = upper.view(-1), self.result.view(-1)
        if scale is not None:
            scale_(sums, scale)
            scale_(lower, scale)
        begin, end = 0, min(FIRST_STRETCH, sums.numel())
        result[:end].copy_(sums[:end].clone())
        # Elements [begin, end) are bytes [2 begin, 2 end), and their sums bytes [4 begin, 4 end).
        while end < sums.numel():
            begin, end = end, min(2 * end, sums.numel())
            result[begin:end].copy_(sums[begin:end])
        self.result[len(upper) :].copy_(lower)
