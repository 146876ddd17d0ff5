"""Two passes over the logits of a linear layer by blocks of columns: fold them, then write their gradient over them.

What lies between the passes is the caller's: a cross entropy runs both at once, row statistics run the second one when
autograd brings their gradients. See `linear_cross_entropy.py` for why columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.compensated_sum import GradientSum
from subtensors.kernels.cross_entropy.logits_block import Block, LinearHead, product_into

Parts = list[tuple[int, int]]


@dataclass
class _Memory:
    """The memory of both passes.

    Args:
        scratch: of one block of logits; after the first pass it holds the last one.
        weight_grad: of the weight's gradient; until it is written, kept logits wait there.
        places: the memory of the blocks that are kept between the passes, by number.
    """

    scratch: Tensor
    weight_grad: Tensor | None
    places: dict[int, Tensor] = field(default_factory=dict)


class ColumnPasses:
    """The two passes over the logits of a linear layer, to which nothing refers between them.

    Args:
        linear: the linear layer.
        columns: of a block.
        kept: the number of columns, beside those in the memory of the weight's gradient, that are kept between the
            passes; others are computed again.
    """

    def __init__(self, linear: LinearHead, columns: int, kept: int) -> None:
        self.columns = min(columns, linear.weight.shape[0])
        self.blocks = parts(linear.weight.shape[0], self.columns)
        self.own: range = _kept_blocks(linear, self.blocks, self.columns, kept)
        """The blocks that are kept in memory of their own."""
        self._memory: _Memory | None = None
        """The memory with logits of the first pass; None before it, and once the second one has overwritten them."""

    def fold(self, linear: LinearHead, fold: Callable[[Block], None]) -> None:
        """Run the first pass: call `fold` with each block of logits, in order."""
        all_rows = 0, linear.hidden.shape[0]
        memory = self._allocate(linear)
        if any(linear.needs):
            memory.places = _places(linear, self.blocks, self.columns, memory.weight_grad, self.own)
            self._memory = memory
        for number, part in enumerate(self.blocks):
            fold(linear.logits(memory.places.get(number, memory.scratch), all_rows, part))

    def gradients(
        self, linear: LinearHead, write_gradient: Callable[[Block, Tensor], None]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Run the second pass. It may run again: then all logits are computed again.

        Args:
            linear: the linear layer.
            write_gradient: called with a block of logits and the tensor that takes their gradient; both may share
                memory.

        Returns:
            the gradients of hidden states, weight and bias; None where one is not needed. That of the bias is in the
            dtype of the computation.
        """
        all_rows, needs = (0, linear.hidden.shape[0]), linear.needs
        first_pass, self._memory = self._memory, None
        memory = self._allocate(linear) if first_pass is None else first_pass
        places, scratch, weight_grad = memory.places, memory.scratch, memory.weight_grad
        bias_grad = linear.bias_grad()
        hidden_sum = _hidden_sum(linear, len(self.blocks), self.columns) if needs.hidden else None
        # First the last block, which is still in the scratch memory; then the kept ones, from the front of their
        # memory, because the gradient of the weight is written behind the logits that are yet to be read.
        last = len(self.blocks) - 1
        order = [last, *(n for n in places if n != last), *(n for n in range(last) if n not in places)]
        for number in order:
            begin, end = part = self.blocks[number]
            place = places.get(number, scratch)
            if number in places or (number == last and first_pass is not None):
                block = linear.block(place, all_rows, part)
            else:
                block = linear.logits(place, all_rows, part)
            gradient = linear.block(scratch, all_rows, part).logits
            write_gradient(block, gradient)
            if hidden_sum is not None:
                hidden_sum.add_product(gradient, linear.weight[begin:end])
            if weight_grad is not None:
                product_into(weight_grad[begin:end], gradient.t(), linear.hidden, accumulate=False)
            if bias_grad is not None:
                torch.sum(gradient, 0, dtype=linear.compute_dtype, out=bias_grad[begin:end])
        del memory, first_pass, scratch, places, place, block, gradient  # their memory is reused by dX
        if hidden_sum is None:
            return None, weight_grad, bias_grad
        hidden_grad = hidden_sum.take()
        if linear.shard is not None:
            linear.shard.reduced(hidden_grad, "SUM")
        return hidden_grad.to(linear.hidden.dtype), weight_grad, bias_grad

    def _allocate(self, linear: LinearHead) -> _Memory:
        return _Memory(linear.hidden.new_empty(linear.hidden.shape[0] * self.columns), linear.weight_grad())


def _hidden_sum(linear: LinearHead, blocks: int, columns: int) -> GradientSum:
    """Return the accumulator of the hidden states' gradient over blocks of columns."""
    hidden = linear.hidden
    if columns >= hidden.shape[1] or hidden.itemsize != 2 or linear.shard is not None:
        # A block took as much memory as the result, or nothing is rounded, or other processes add to it.
        return GradientSum(hidden.new_empty(hidden.shape, dtype=linear.compute_dtype), exact=False)
    return GradientSum(hidden.new_empty(hidden.shape), exact=blocks > 1, kernels=False)


def blocks_in_gradient(blocks: int, rows: int, elements: int) -> int:
    """Return how many blocks of logits, the first ones, the memory of the weight's gradient keeps.

    Args:
        blocks: of the logits.
        rows: N.
        elements: how many logits take the memory of a class's row of that gradient.

    >>> blocks_in_gradient(8, 4096, 4096), blocks_in_gradient(8, 8192, 4096)
    (8, 3)
    """
    # The last block's rows of dW are written first, so nothing may wait there.
    return blocks if rows <= elements else (blocks - 1) * elements // rows


def _elements_per_column(linear: LinearHead) -> int:
    """Return how many logits take the memory of a class's row of the weight's gradient; 0 without that gradient."""
    return linear.weight_grad_dtype.itemsize * linear.hidden.shape[1] // linear.hidden.itemsize * linear.needs.weight


def _kept_blocks(linear: LinearHead, blocks: Parts, columns: int, kept: int) -> range:
    """Return the blocks that are kept in memory of `kept` columns, and cut in two the one that is kept in part."""
    first = blocks_in_gradient(len(blocks), linear.hidden.shape[0], _elements_per_column(linear))
    last = len(blocks) - 1
    whole, part = divmod(kept, columns)
    if whole >= last - first:
        return range(first, max(first, last))
    cut = first + whole
    if part:
        begin, end = blocks[cut]
        blocks[cut : cut + 1] = [(begin, begin + part), (begin + part, end)]
    return range(first, cut + bool(part))


def _places(
    linear: LinearHead, blocks: Parts, columns: int, weight_grad: Tensor | None, own: range
) -> dict[int, Tensor]:
    """Return the memory that keeps logits for the second pass, by block number; other blocks are recomputed.

    The memory of the weight's gradient is reused. Per column the gradient takes H elements, and the logits N. A
    column's logits are placed at its number times max(H, N), so that the gradient is written behind the logits that
    are yet to be read. The blocks in `own` have memory of their own.
    """
    count = linear.hidden.shape[0]
    places: dict[int, Tensor] = {}
    if weight_grad is not None:
        memory, stride = weight_grad.view(-1).view(linear.hidden.dtype), max(count, _elements_per_column(linear))
        places = {n: memory[n * columns * stride :] for n in range(own.start)}
    if own:
        begin, end = blocks[own.start][0], blocks[own.stop - 1][1]
        memory = linear.hidden.new_empty((end - begin) * count)
        places |= {n: memory[(blocks[n][0] - begin) * count :] for n in own}
    return places


def parts(count: int, size: int) -> Parts:
    """Return [begin, end) of parts of at most this size.

    >>> parts(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
