"""Cross entropy of a linear layer and its gradients, with a part of the logits in memory at a time.

For hidden states X (N, H), a weight W (V, H) and logits Y = X W^T, the loss needs L = log sum_k exp Y_k of each row,
the gradients need G = d loss / dY:

    dX = G W,      dW = G^T X,      db = column sums of G

Two orders, which meet where everything fits at once.

By rows: a chunk of rows of Y is complete, so its loss and G follow at once and G is written over it. Three GEMMs in
all. dX is written once; the first chunks may be longer by what memory it does not take yet. dW is a sum over chunks:
`accumulate="fast"` adds in the gradient's dtype, `"exact"` in float32 (`exact_accumulation`), two bytes more for each
element of W.

By columns: a block of columns of Y for all rows. A first pass over blocks gives L; a second gives G, and with it the
block's rows of dW, once and over all of N inside one GEMM: as exact as can be, and without memory of the size of W. dX
is the sum over blocks, in float32, which costs N x H. Between the passes blocks wait in the memory of dW, which is not
yet written: with N <= H all of them do, and with N > H a share of H / N. The others are computed again, so there are 3
to 4 GEMMs.

G has the dtype of Y, as it has under autograd; everything between is float32.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.compensated_sum import CompensatedGemmSum, Float32Sum, product_into
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy
from subtensors.kernels.cross_entropy.logits_block import uses_kernels
from subtensors.kernels.cross_entropy.problem import GradFlags, LossAndGradients, Problem

Accumulate = Literal["exact", "fast"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    options: CrossEntropy | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    rows: int | None = None,
    columns: int | None = None,
    kept: int = 0,
    accumulate: Accumulate = "exact",
    upstream: Tensor | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    kernels: bool | None = None,
) -> LossAndGradients:
    """The cross entropy of `hidden @ weight.T + bias`, and its gradients, without ever holding all of the logits.

    Args:
        hidden: (N, H), floating point.
        weight: (V, H), of the same dtype and device.
        target: (N,) int64 class indices, or (N, V) floating point distributions.
        bias: (V,), of the same dtype.
        options: which cross entropy; None: the mean over all rows but those of target -100.
        needs: whether the gradients of hidden, weight and bias are wanted.
        rows: rows of the logits that are in memory at once; None: all of them.
        columns: instead of `rows`, columns of the logits that are in memory at once.
        kept: with `columns`, so many columns more have memory to wait in for the second pass.
        accumulate: how the gradient of the weight adds up over chunks of rows: "exact" or, in its own dtype, "fast".
        upstream: the gradient of the loss, of its shape; None: ones.
        weight_grad_dtype: of the weight's gradient, the weight's own or float32; None: the weight's own.
        kernels: whether by Triton kernels; None: on a GPU, but for float64.

    Returns:
        The loss, float32 (float64 for float64 inputs), (N,) for reduction "none" and 0-d otherwise; the gradients in
        the shapes and dtypes of what they are of, None where not wanted.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or both of `rows` and `columns`.
        IndexError: a target that is no class, on a CPU; on a GPU torch's device assertion.

    Example:
        >>> hidden, weight, target = torch.eye(3), torch.eye(4, 3), torch.tensor([0, 1, 3])
        >>> result = linear_cross_entropy(hidden, weight, target, rows=2)
        >>> result.loss.allclose(torch.nn.functional.cross_entropy(hidden @ weight.T, target))
        True
        >>> result.weight.shape
        torch.Size([4, 3])
    """
    _check(hidden, weight, target, bias, rows, columns, accumulate)
    task = Problem(
        hidden,
        weight,
        target,
        bias,
        options or CrossEntropy(),
        GradFlags(needs[0], needs[1], needs[2] and bias is not None),
        upstream,
        weight_grad_dtype or weight.dtype,
        kernels,
    )
    with torch.set_grad_enabled(False):
        if columns is not None and hidden.shape[0]:
            return _by_columns(task, min(columns, weight.shape[0]), kept)
        return _by_rows(task, rows or max(1, hidden.shape[0]), accumulate == "exact")


def _by_rows(task: Problem, rows: int, exact: bool) -> LossAndGradients:
    classes, is_summed = task.weight.shape[0], exact and task.needs.hidden and task.needs.weight
    early, late = _row_parts(*task.hidden.shape, classes, rows, TILE if is_summed else None)
    task.writes_whole_rows = any(task.needs)
    sums, number = None, len(early) + len(late)
    for chunks in (early, late):
        if not chunks:
            continue
        if sums is not None:
            sums.gather()
        buffer = task.hidden.new_empty(chunks[0][1] - chunks[0][0], classes)
        for begin, end in chunks:
            block = task.logits_of_rows(buffer, begin, end)
            if not task.writes_whole_rows:
                task.ops.fold(block, task.statistics)
                continue
            task.ops.fold_and_write_gradient(block, task.statistics, task.factors)
            # Only now: while the host prepares what follows, the GPU has the first logits to do.
            sums = sums or _RowSums(task, rows, exact, number, early[-1][1] if early else 0)
            sums.add(block.logits, begin, end)
        del buffer, block  # dX takes their place, or a sum that is rounded
    sums = sums or _RowSums(task, rows, exact, number, 0)
    return task.result(*sums.take())


TILE = 128
"""Rows of the logits that a GEMM computes together."""

Parts = list[tuple[int, int]]


@functools.lru_cache(maxsize=256)
def _row_parts(count: int, width: int, classes: int, rows: int, tile: int | None) -> tuple[Parts, Parts]:
    """The chunks, those first that are longer, since the memory that dX does not yet take holds more of the logits.

    Every chunk costs a look at the whole sum of dW where that is exact, so it is worth having fewer of them.

    Args:
        count, width, classes: N, H, V.
        rows: of a chunk.
        tile: what longer chunks have a multiple of; None: all are alike.
    """
    if tile is None or rows >= count:
        return [], _parts(count, rows)
    longer = (rows // tile + 1) * tile
    early = min((count * width - (longer - rows) * classes) // (longer * width), count // longer)
    edge = max(early, 0) * longer
    if math.ceil((count - edge) / rows) + edge // longer == math.ceil(count / rows):
        edge = 0
    return _parts(edge, longer), [(edge + begin, edge + end) for begin, end in _parts(count - edge, rows)]


class _RowSums:
    """The gradients of a loss that is gone through by rows.

    Args:
        task: what is computed.
        rows: of a chunk.
        exact: how the gradient of the weight adds up.
        chunks: how many there are.
        edge: up to this row the gradient of hidden states is kept in pieces.
    """

    def __init__(self, task: Problem, rows: int, exact: bool, chunks: int, edge: int) -> None:
        self._task, self._edge = task, edge
        self._pieces: list[Tensor] = []
        self._hidden: Tensor | None = None
        self._bias = task.bias_grad()
        self._weight = _weight_sum(task, rows, exact, chunks) if task.needs.weight else None

    def add(self, gradient: Tensor, begin: int, end: int) -> None:
        """Take in the gradient of the logits of rows [begin, end)."""
        task = self._task
        if task.needs.hidden and end <= self._edge:
            self._pieces.append(torch.mm(gradient, task.weight))
        elif task.needs.hidden:
            torch.mm(gradient, task.weight, out=self.gather()[begin:end])
        if self._weight is not None:
            self._weight.add(gradient, task.hidden[begin:end])
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=task.compute)

    def gather(self) -> Tensor:
        """The memory of the gradient of all hidden states, with what is known of it."""
        if self._hidden is None:
            self._hidden = self._task.hidden.new_empty(self._task.hidden.shape)
            if self._pieces:
                torch.cat(self._pieces, out=self._hidden[: self._edge])
                self._pieces.clear()
        return self._hidden

    def take(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias."""
        hidden = self.gather() if self._task.needs.hidden else None
        return hidden, None if self._weight is None else self._weight.take(), self._bias


def _weight_sum(task: Problem, rows: int, exact: bool, chunks: int) -> CompensatedGemmSum | Float32Sum:
    """Return the accumulator of the weight's gradient over chunks of `rows` rows."""
    classes, width = task.weight.shape
    is_short = task.weight_grad_dtype == task.hidden.dtype and task.hidden.itemsize == 2
    if exact and chunks > 1 and is_short and rows >= width:  # the logits take as much as the result
        return Float32Sum(classes, width, task.weight)
    weight_grad = task.weight_grad()
    assert weight_grad is not None
    kernels = uses_kernels(task.hidden, task.kernels)
    return CompensatedGemmSum(weight_grad, task.hidden.dtype, exact, chunks, kernels)


def _by_columns(task: Problem, columns: int, kept: int) -> LossAndGradients:
    count = task.hidden.shape[0]
    blocks = _parts(task.weight.shape[0], columns)
    scratch = task.hidden.new_empty(count * columns)
    if not any(task.needs):
        for part in blocks:
            block = task.logits(scratch, (0, count), part)
            task.ops.fold(block, task.statistics)
        return task.result(None, None, None)
    weight_grad, bias_grad = task.weight_grad(), task.bias_grad()
    places = _places(task, blocks, weight_grad, kept)
    whole = (0, count)
    for number, part in enumerate(blocks):
        block = task.logits(places.get(number, scratch), whole, part)
        task.ops.fold(block, task.statistics)
    hidden_sum = _hidden_sum(task, columns, len(blocks)) if task.needs.hidden else None
    # The block that was computed last may still be in the scratch memory; then those that were kept, from the front of
    # the memory that they are kept in, because the gradient of the weight is written behind whoever reads there.
    last = len(blocks) - 1
    order = [last, *(n for n in places if n != last), *(n for n in range(last) if n not in places)]
    for number in order:
        begin, end = part = blocks[number]
        place = places.get(number, scratch)
        if number in places or number == last:
            block = task.block(place, whole, part)
        else:
            block = task.logits(place, whole, part)
        gradient = task.block(scratch, whole, part).logits
        task.ops.write_gradient(block, task.statistics, task.factors, gradient)
        if hidden_sum is not None:
            hidden_sum.add(gradient.t(), task.weight[begin:end])
        if weight_grad is not None:
            product_into(weight_grad[begin:end], gradient.t(), task.hidden, accumulate=False)
        if bias_grad is not None:
            torch.sum(gradient, 0, dtype=task.compute, out=bias_grad[begin:end])
    del scratch, places, place, block, gradient  # the dX of the result takes their place
    return task.result(None if hidden_sum is None else hidden_sum.take(), weight_grad, bias_grad)


def _hidden_sum(task: Problem, columns: int, blocks: int) -> CompensatedGemmSum | Float32Sum:
    """Return the accumulator of the hidden states' gradient over blocks of `columns` columns."""
    count, width = task.hidden.shape
    if columns >= width or task.hidden.itemsize != 2:  # a block takes as much as the result, or needs no rounding
        return Float32Sum(count, width, task.hidden)
    return CompensatedGemmSum(task.hidden.new_empty(count, width), task.hidden.dtype, True, blocks, kernels=False)


def _places(task: Problem, blocks: list[tuple[int, int]], weight_grad: Tensor | None, kept: int) -> dict[int, Tensor]:
    """Return the memory that keeps logits for the second pass, by block number; other blocks are recomputed.

    The memory of the weight's gradient is reused. Per column the gradient takes H elements, and the logits N. A
    column's logits are placed at its number times max(H, N), so that the gradient is written behind the logits that
    are yet to be read. `kept` further columns have memory of their own.
    """
    count, width = task.hidden.shape
    columns, last = blocks[0][1], len(blocks) - 1
    places: dict[int, Tensor] = {}
    if weight_grad is not None:
        memory = weight_grad.view(-1).view(task.hidden.dtype)
        share = weight_grad.itemsize * width // task.hidden.itemsize
        if count <= share:
            places = {n: memory[n * columns * share :] for n in range(len(blocks))}
        else:  # the last block's rows of dW are written first, so nothing may wait there
            free = last * columns * share // (columns * count)
            places = {n: memory[n * columns * count :] for n in range(free)}
    own = min(kept // columns, last - len(places))
    if own > 0:
        memory = task.hidden.new_empty(own * columns * count)
        first = len(places)
        places |= {first + n: memory[n * columns * count :] for n in range(own)}
    return places


def _parts(count: int, size: int) -> Parts:
    """[begin, end) of parts of at most this size."""
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    rows: int | None,
    columns: int | None,
    accumulate: str,
) -> None:
    """Refuse what does not fit together."""
    of_hidden, of_weight, of_target = hidden.shape, weight.shape, target.shape
    if len(of_hidden) != 2 or len(of_weight) != 2 or of_hidden[1] != of_weight[1]:
        raise ValueError(f"hidden is (N, H) and weight (V, H); got {tuple(of_hidden)} and {tuple(of_weight)}")
    if len(of_target) not in (1, 2) or of_target[0] != of_hidden[0]:
        raise ValueError(f"target is ({of_hidden[0]},) or ({of_hidden[0]}, V); got {tuple(of_target)}")
    if bias is not None and bias.shape != of_weight[:1]:
        raise ValueError(f"bias must have the shape {tuple(of_weight[:1])}; got {tuple(bias.shape)}")
    dtype = hidden.dtype
    if weight.dtype is not dtype or (bias is not None and bias.dtype is not dtype) or not dtype.is_floating_point:
        dtypes = {str(t.dtype) for t in (hidden, weight, bias) if t is not None}
        raise ValueError(f"hidden, weight and bias have one floating-point dtype; got {sorted(dtypes)}")
    if rows is not None and columns is not None:
        raise ValueError(f"give rows or columns, not both; got rows={rows}, columns={columns}")
    if (rows is not None and rows < 1) or (columns is not None and columns < 1):
        name, size = ("rows", rows) if columns is None else ("columns", columns)
        raise ValueError(f"{name} must be at least 1; got {size}")
    if accumulate not in ("exact", "fast"):
        raise ValueError(f"accumulate must be 'exact' or 'fast'; got {accumulate!r}")
