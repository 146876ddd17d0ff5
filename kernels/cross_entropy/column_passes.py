"""Two passes over the logits of a linear layer by columns: fold them, then write their gradient over them.

What lies between the passes is the caller's: a cross entropy runs both at once, row statistics run the second one when
autograd brings their gradients. See `linear_cross_entropy.py` for why columns.

Logits lie class by class, so those of adjacent classes are one operand of a product, however many they are:

    memory of dW     [ dW, rows 0 .. ->            |   <- .. logits of the first classes ]
    a buffer         [ logits of the next classes ]     then, one after the other, of those that were not kept

That is the second pass, from left to right. While logits wait in the memory of dW, its rows are written from the front,
some classes at a time, behind the logits that are yet to be read. The first pass begins with what is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from subtensors.kernels.cross_entropy.compensated_sum import GradientSum
from subtensors.kernels.cross_entropy.logits_block import (
    ROW_MULTIPLE,
    Block,
    LinearHead,
    add_over_rows,
    padded_rows,
    product_into,
)

Parts = list[tuple[int, int]]


class _Memory(NamedTuple):
    """The memory of both passes.

    Args:
        weight_grad: of the weight's gradient; until it is written, logits wait at its end.
        buffer: of other logits.
    """

    weight_grad: Tensor | None
    buffer: Tensor


class ColumnPasses:
    """The two passes over the logits of a linear layer, to which nothing refers between them.

    Args:
        linear: the linear layer.
        columns: how many have a buffer at least; and how many rows of the weight's gradient are written at once while
            logits wait in its memory.
        kept: how many more columns have a buffer, so that they need not be computed again.
    """

    def __init__(self, linear: LinearHead, columns: int, kept: int) -> None:
        (rows, _), classes = linear.hidden.shape, linear.weight.shape[0]
        self.columns, self.padded_rows = min(columns, classes), padded_rows(rows)
        kept *= any(linear.needs)
        elements = logits_per_class(linear.hidden.shape[1], linear.hidden.itemsize, linear.weight_grad_dtype.itemsize)
        self.split = ColumnSplit.of(classes, self.columns, kept, self.padded_rows, elements * linear.needs.weight)
        self._memory: _Memory | None = None
        """The memory with logits of the first pass; None before it, and once the second one has overwritten them."""

    def fold(self, linear: LinearHead, fold: Callable[[Block], None]) -> None:
        """Run the first pass: call `fold` with each block of logits, in any order."""
        memory = self._allocate(linear)
        for part in self.split.recomputed:
            fold(linear.logits(memory.buffer, part))
        for part, place in self._kept(linear, memory):
            fold(linear.logits(place, part))
        if any(linear.needs):
            self._memory = memory

    def gradients(
        self, linear: LinearHead, write_gradient: Callable[[Block, Tensor], None]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Run the second pass. It may run again: then all logits are computed again.

        Args:
            linear: the linear layer.
            write_gradient: called with a block of logits and the tensor that takes their gradient; both share memory.

        Returns:
            the gradients of hidden states, weight and bias; None where one is not needed. That of the bias is in the
            dtype of the computation.
        """
        is_computed, memory, needs = self._memory is not None, self._memory or self._allocate(linear), linear.needs
        self._memory = None
        weight_grad, bias_grad = memory.weight_grad, linear.bias_grad()
        hidden_sum = self._hidden_sum(linear) if needs.hidden else None
        kept = self._kept(linear, memory)
        recomputed = [(part, memory.buffer) for part in self.split.recomputed]
        for number, (part, place) in enumerate([*kept, *recomputed]):
            is_there = is_computed and number < len(kept)
            block = linear.block(place, part) if is_there else linear.logits(place, part)
            gradient, (begin, end) = block.logits, part
            write_gradient(block, gradient)
            if hidden_sum is not None:
                hidden_sum.add_product(gradient, linear.weight[begin:end])
            if bias_grad is not None:
                add_over_rows(bias_grad[begin:end], block)
            if weight_grad is not None:
                step = self.columns if part == self.split.in_gradient else end - begin
                for first, last in parts(end - begin, step):
                    result = weight_grad[begin + first : begin + last]
                    product_into(result, gradient[:, first:last].t(), linear.hidden, accumulate=False)
        del memory, kept, recomputed, place, block, gradient  # their memory is reused by dX
        if hidden_sum is None:
            return None, weight_grad, bias_grad
        hidden_grad = hidden_sum.take()
        if linear.shard is not None:
            linear.shard.reduced(hidden_grad, "SUM")
        return hidden_grad.to(linear.hidden.dtype), weight_grad, bias_grad

    def _allocate(self, linear: LinearHead) -> _Memory:
        begin, end = self.split.in_buffer
        return _Memory(linear.weight_grad(), linear.hidden.new_empty((end - begin) * self.padded_rows))

    def _kept(self, linear: LinearHead, memory: _Memory) -> list[tuple[tuple[int, int], Tensor]]:
        """Return the columns whose logits are kept between the passes, and where."""
        in_buffer, count = (self.split.in_buffer, memory.buffer), self.split.in_gradient[1]
        if memory.weight_grad is None or not count:
            return [in_buffer]
        logits = memory.weight_grad.view(-1).view(linear.hidden.dtype)
        end = aligned(logits.numel())
        return [(self.split.in_gradient, logits[end - count * self.padded_rows : end]), in_buffer]

    def _hidden_sum(self, linear: LinearHead) -> GradientSum:
        """Return the accumulator of the hidden states' gradient."""
        hidden = linear.hidden
        if self.split.has_wide_sum(hidden.shape[1], hidden.itemsize) or linear.shard is not None:  # processes add to it
            return GradientSum(hidden.new_empty(hidden.shape, dtype=linear.compute_dtype), exact=False)
        return GradientSum(hidden.new_empty(hidden.shape), exact=self.split.products > 1, kernels=False)


class ColumnSplit(NamedTuple):
    """The places of the logits of a linear layer's classes.

    Args:
        in_gradient: classes [begin, end) whose logits lie in the memory of the weight's gradient.
        in_buffer: the next ones, whose logits lie in a buffer.
        recomputed: the others, in parts that take turns in the buffer, so that the second pass computes them again.
    """

    in_gradient: tuple[int, int]
    in_buffer: tuple[int, int]
    recomputed: Parts

    @staticmethod
    def of(classes: int, columns: int, kept: int, rows: int, elements: int) -> ColumnSplit:
        """Return where the logits are.

        Args:
            classes: V.
            columns, kept: see `ColumnPasses`.
            rows: N, padded.
            elements: how many logits take the memory of a class's row of that gradient.

        >>> ColumnSplit.of(100, 20, 0, 16, 16)
        ColumnSplit(in_gradient=(0, 80), in_buffer=(80, 100), recomputed=[])
        >>> ColumnSplit.of(100, 20, 10, 32, 16)
        ColumnSplit(in_gradient=(0, 32), in_buffer=(32, 70), recomputed=[(70, 100)])
        """
        # Rows [c, c + columns) of dW must end before the logits of class c begin, which their product reads.
        room = aligned(classes * elements) - columns * min(rows, elements)
        fitting = max(0, min(room // max(rows, elements, 1), classes - 1))
        first, last = aligned(fitting), min(classes, fitting + columns + kept)
        recomputed = [(last + begin, last + end) for begin, end in parts(classes - last, max(1, last - first))]
        return ColumnSplit((0, first), (first, last), recomputed)

    @property
    def products(self) -> int:
        """The number of products that add up to the gradient of the hidden states."""
        return (self.in_gradient[1] > 0) + 1 + len(self.recomputed)

    def has_wide_sum(self, width: int, itemsize: int) -> bool:
        """Return whether that gradient is summed in float32 and then cast, rather than rounded into its own memory.

        It is where the buffer, free by then, is as large as the result, or where nothing is rounded.
        """
        begin, end = self.in_buffer
        return self.products > 1 and (end - begin >= width or itemsize != 2)


def aligned(elements: int) -> int:
    """Round a number of elements or classes down, since kernels are compiled for multiples of 16.

    >>> aligned(100)
    96
    """
    return elements // ROW_MULTIPLE * ROW_MULTIPLE


def logits_per_class(width: int, itemsize: int, weight_grad_itemsize: int) -> int:
    """Return how many logits take the memory of a class's row of the weight's gradient.

    >>> logits_per_class(4096, 2, 4)
    8192
    """
    return weight_grad_itemsize * width // itemsize


def parts(count: int, size: int) -> Parts:
    """Return [begin, end) of parts of at most this size.

    >>> parts(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
