"""The loss of a linear layer's logits without the logits: a block of them at a time, overwritten by its gradient.

For hidden states X (N, H), a weight W (V, H) and logits Y = X W^T (N, V), the loss needs L = log sum_k exp Y_k of each
row, and the gradients need G = d loss / dY:

    dX = G W,      dW = G^T X,      db = column sums of G

Y is larger than everything else together (V is in the 100,000s), but a block of it is needed only between its GEMM and
the two GEMMs that read its gradient:

    by rows                                     by columns
          V                                           columns
      +-----------------+   GEMM -> Y block       +---+---+---+---+   pass 1: GEMM, fold into L
    N |                 |                         |   |   |   |   |   pass 2: Y again (or kept), G over it,
      |#################|   L, loss, G over Y     |   |###|   |   |           rows of dW, dX += G W
      |                 |   dX rows, dW += G^T X  |   |   |   |   |
      +-----------------+                         +---+---+---+---+

By rows: a chunk holds complete rows, so its loss and G follow at once. Three GEMMs. The first chunks may be longer, by
the memory that dX does not take yet. dW is a sum over chunks: `accumulate="fast"` adds in the gradient's dtype,
`"exact"` in float32 (`compensated_sum.py`), for two more bytes an element of W.

By columns: pass 1 gives L, pass 2 gives G and its rows of dW, in one GEMM over all N: exact without more memory. dX is
a float32 sum (N x H) of a product or two, and one for each block of what did not stay in memory. Between the passes
logits wait in the memory of dW, which is not written yet: all but a block for N <= H, else a share of H / N; the others
are computed again, so 3 to 4 GEMMs (`column_passes.py`).

G has the dtype of Y, as it has under autograd; everything between is float32. Where all of Y fits, both are the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy import exp_passes, logits_block
from subtensors.kernels.cross_entropy.column_passes import ColumnPasses, Parts, parts
from subtensors.kernels.cross_entropy.compensated_sum import GradientSum
from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, GradientFactors, RowLoss, RowStatistics
from subtensors.kernels.cross_entropy.exp_passes import ExponentialPasses
from subtensors.kernels.cross_entropy.logits_block import (
    Block,
    GradFlags,
    LinearHead,
    LossAndGradients,
    add_over_rows,
    launch_options,
    product_into,
    uses_kernels,
)
from subtensors.kernels.cross_entropy.row_sums import Factors, RowSums, StatisticsOptions
from subtensors.kernels.cross_entropy.vocabulary_shard import VocabularyShard
from subtensors.kernels.runtime.launcher import cached_launcher

Accumulate = Literal["exact", "fast"]


class LossPasses:
    """The passes of a loss over blocks of logits.

    Args:
        row_loss: the loss of all rows.
        device: of the logits.
        kernels: whether to use Triton kernels.
        complete: whether each block holds complete rows, so that their statistics are written, not folded into.
    """

    def __init__(self, row_loss: RowLoss, device: torch.device, kernels: bool, complete: bool = False) -> None:
        self.row_loss, self.device, self.kernels, self.complete = row_loss, device, kernels, complete

    @cached_property
    def sums(self) -> RowSums:
        """The sums of all rows that blocks are folded into."""
        row_loss, targets, given = self.row_loss, self.row_loss.class_targets, self.row_loss.options
        options = StatisticsOptions(given.softcap, given.temperature, smoothing=row_loss.has_smoothing)
        classes = torch.empty(0, row_loss.rows, dtype=torch.int64, device=self.device)
        classes = classes if targets is None else targets.class_indices[None]
        like = torch.empty(0, dtype=row_loss.dtype, device=self.device)
        return RowSums(options, classes, None, like, self.kernels, row_loss.soft, row_loss.class_weight)

    @cached_property
    def statistics(self) -> RowStatistics:
        """The statistics of all rows, of the logits that were folded in."""
        if self.complete and self.kernels:
            return RowStatistics.uninitialized(self.row_loss.rows, self.row_loss.dtype, self.device)
        sums = self.sums
        return RowStatistics(sums.row_max, sums.sum_exp, sums.target_logits[0], sums.logit_sum)

    def factors(self, factors: GradientFactors) -> Factors:
        """Return the factors of the gradient, every column folded in."""
        statistics, of_softmax = self.statistics, factors.grad_softmax
        if self.row_loss.has_z_loss:
            of_softmax = of_softmax + factors.grad_z_loss * statistics.log_sum_exp()
        nothing = statistics.row_max
        of_targets, of_smoothing = -factors.grad_target[None], -factors.grad_smoothing
        return Factors(statistics.sum_exp.log(), of_softmax, nothing, nothing, of_targets, of_smoothing)

    def fold_and_write_gradient(self, block: Block, factors: GradientFactors) -> None:
        """Fold a block of complete rows, and write its gradient over it; the statistics of its rows are overwritten."""
        if not self.kernels:
            self.sums.reset(*block.rows)
            self.sums.fold(block)
            self.sums.write_gradient(block, self.factors(factors), block.logits)
            return
        logits, row_loss, options = block.logits, self.row_loss, self.row_loss.options
        rows, columns = logits.shape
        soft = logits if row_loss.soft is None else row_loss.soft
        soft = soft if soft.stride(1) == 1 else soft.contiguous()
        weight = logits if row_loss.class_weight is None else row_loss.class_weight
        class_indices = logits if row_loss.class_targets is None else row_loss.class_targets.class_indices
        tile = logits_block.LONG_ROWS if columns >= logits_block.MIN_LONG_COLUMNS else logits_block.WHOLE_ROWS
        # The kernel takes all rows and the first of them: a slice of each operand would take longer than the launch.
        cached_launcher("cross_entropy.softmax_gradient_kernel", "softmax_gradient_kernel")(
            rows,
            (logits, soft, weight, class_indices, *self.statistics, *factors),
            *(logits.stride(0), soft.stride(0), block.first_row, columns),
            *(1.0 if options.softcap is None else float(options.softcap), 1.0 / options.temperature),
            SOFT_TARGETS=row_loss.soft is not None,
            HAS_CLASS_WEIGHT=row_loss.class_weight is not None,
            HAS_SMOOTHING=row_loss.has_smoothing,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_Z_LOSS=row_loss.has_z_loss,
            **launch_options(tile, columns),
        )


@dataclass
class Problem(LinearHead):
    """A linear layer with cross entropy: the operands, the options, and the gradients to compute.

    The values per row take many small kernels. They are computed on first use, which is after the first logits: the
    GPU runs a matrix product while the host prepares them.
    """

    target: Tensor
    options: CrossEntropy
    upstream: Tensor | None
    kernels: bool
    has_complete_rows: bool = False
    """True where each block holds complete rows, and gradients are needed."""

    @cached_property
    def row_loss(self) -> RowLoss:
        """The loss as a function of the statistics of rows."""
        return RowLoss(self.options, self.target, self.classes, self.compute_dtype, self.kernels)

    @cached_property
    def factors(self) -> GradientFactors:
        """The factors of the gradient of the logits."""
        return self.row_loss.gradient_factors(self.upstream)

    @cached_property
    def passes(self) -> LossPasses:
        """The passes over blocks of logits."""
        return LossPasses(self.row_loss, self.hidden.device, self.kernels, self.has_complete_rows)

    def exponentials(self, rows: int, most_rows: int) -> ExponentialPasses | None:
        """Return the passes by exponentials; None where logits are computed.

        Args:
            rows: of a chunk.
            most_rows: of the longest one.
        """
        if not self.has_complete_rows or not self.kernels:
            return None
        if not exp_passes.takes_exponentials(self.hidden, self.weight, self.bias, self.target, self.options):
            return None
        if not exp_passes.is_worth_exponentials(rows, *self.weight.shape):
            return None
        targets = self.row_loss.class_targets
        assert targets is not None
        return ExponentialPasses(
            self, targets.class_indices, self.options, self.passes.statistics, self.factors, most_rows
        )

    def result(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> LossAndGradients:
        """Return the loss, and these gradients in the dtypes of their operands."""
        loss = self.row_loss.loss(self.passes.statistics)
        hidden, bias = (None if t is None else t.to(self.hidden.dtype) for t in (hidden, bias))
        return LossAndGradients(loss, hidden, weight, bias)


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
    shard: VocabularyShard | None = None,
) -> LossAndGradients:
    """Compute the cross entropy of `hidden @ weight.T + bias` and its gradients, with a part of the logits at a time.

    Args:
        hidden: (N, H), floating point.
        weight: (V, H), of the same dtype and device.
        target: (N,) int64 class indices, or (N, V) floating point distributions.
        bias: (V,), of the same dtype.
        options: of the cross entropy; None: the mean over all rows whose target is not -100.
        needs: whether the gradients of hidden, weight and bias are needed.
        rows: rows of the logits that are in memory at once; None: all of them.
        columns: instead of `rows`, columns of the logits that are in memory at once.
        kept: with `columns`, the number of further columns whose logits have memory between the two passes.
        accumulate: how the gradient of the weight is summed over chunks of rows: "exact" or, in its own dtype, "fast".
        upstream: the gradient of the loss, of its shape; None: ones.
        weight_grad_dtype: of the weight's gradient, the weight's own or float32; None: the weight's own.
        kernels: whether to use Triton kernels; None: on a GPU, except for float64.
        shard: with `columns`, the classes of weight and bias where other processes have more, V in all; None: all.

    Returns:
        The loss, float32 (float64 for float64 inputs), (N,) for reduction "none" and 0-d otherwise; the gradients in
        the shapes and dtypes of their operands, None where not needed.

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
    problem = Problem(
        hidden=hidden,
        weight=weight,
        bias=bias,
        needs=GradFlags(needs[0], needs[1], needs[2] and bias is not None),
        weight_grad_dtype=weight_grad_dtype or weight.dtype,
        shard=shard,
        target=target,
        options=options or CrossEntropy(),
        upstream=upstream,
        kernels=uses_kernels(hidden, kernels),
    )
    with torch.set_grad_enabled(False):
        if columns is not None and hidden.shape[0]:
            return _by_columns(problem, columns, kept)
        return _by_rows(problem, rows or max(1, hidden.shape[0]), accumulate == "exact")


def _by_rows(problem: Problem, rows: int, exact: bool) -> LossAndGradients:
    classes, is_summed = problem.weight.shape[0], exact and problem.needs.hidden and problem.needs.weight
    early, late = _row_parts(*problem.hidden.shape, classes, rows, TILE if is_summed else None)
    problem.has_complete_rows = any(problem.needs)
    sums, number = None, len(early) + len(late)
    exponentials = problem.exponentials(min(rows, problem.hidden.shape[0]), (early or late or [(0, 0)])[0][1])
    for chunks in filter(None, (early, late)):
        if sums is not None:
            sums.gather()
        buffer = problem.hidden.new_empty(chunks[0][1] - chunks[0][0], classes)
        for begin, end in chunks:
            if exponentials is None:
                block = problem.logits_of_rows(buffer, begin, end)
                if problem.has_complete_rows:
                    problem.passes.fold_and_write_gradient(block, problem.factors)
                else:
                    problem.passes.sums.fold(block)
                del block
            if not problem.has_complete_rows:
                continue
            # Made late: while the host prepares the sums, the GPU computes the first logits.
            sums = sums or _RowSums(problem, rows, exact, number, early[-1][1] if early else 0)
            hidden, hidden_grad = problem.hidden[begin:end], sums.hidden_grad(begin, end)
            if exponentials is not None:
                # The operand of dW is in the memory of dX until dX is computed.
                hidden = torch.empty_like(hidden) if hidden_grad is None else hidden_grad
                exponentials.write(buffer, begin, end, hidden if problem.needs.weight else None)
            sums.add(buffer[: end - begin], hidden, hidden_grad)
        del buffer  # its memory is reused by dX, or for rounding a sum
    sums = sums or _RowSums(problem, rows, exact, number, 0)
    if exponentials is not None:
        exponentials.release()
    result = sums.take()
    if exponentials is not None:
        exponentials.complete(*result[:2])
    return problem.result(*result)


TILE = 128
"""Rows of the logits in a tile of a GEMM."""


@functools.lru_cache(maxsize=256)
def _row_parts(count: int, width: int, classes: int, rows: int, tile: int | None) -> tuple[Parts, Parts]:
    """Return the longer chunks, which come first, and the others as [begin, end).

    The first chunks may hold more of the logits, in the memory that dX does not take yet. Every chunk reads and writes
    the sum of dW where that is exact, so fewer chunks are better. Their rows of dX are in pieces, which take no more
    than the memory of a chunk: they are copied while dX is there and no logits are.

    Args:
        count, width, classes: N, H, V.
        rows: of a chunk.
        tile: the longer chunks are multiples of this; None: no chunk is longer.
    """
    if tile is None or rows >= count:
        return [], parts(count, rows)
    longer = (rows // tile + 1) * tile
    in_dx = (count * width - (longer - rows) * classes) // (longer * width)
    in_logits = rows * classes // (longer * width)  # in whose memory the pieces of dX are while they are copied
    early = min(in_dx, in_logits, count // longer)
    edge = max(early, 0) * longer
    if math.ceil((count - edge) / rows) + edge // longer == math.ceil(count / rows):
        edge = 0
    return parts(edge, longer), [(edge + begin, edge + end) for begin, end in parts(count - edge, rows)]


class _RowSums:
    """The gradients of a loss that is computed by rows.

    Args:
        problem: the operands and options.
        rows: of a chunk.
        exact: whether the gradient of the weight is summed in float32.
        chunks: the number of chunks.
        edge: up to this row the gradient of hidden states is kept in pieces.
    """

    def __init__(self, problem: Problem, rows: int, exact: bool, chunks: int, edge: int) -> None:
        self._problem, self._edge = problem, edge
        self._pieces: list[Tensor] = []
        self._hidden: Tensor | None = None
        self._bias = problem.bias_grad()
        self._weight_grad: Tensor | None = None
        self._weight_sum: GradientSum | None = None
        if chunks == 1:  # one product needs no sum
            self._weight_grad = problem.weight_grad()
        elif problem.needs.weight:
            self._weight_sum = _weight_sum(problem, rows, exact)

    def hidden_grad(self, begin: int, end: int) -> Tensor | None:
        """Return memory for the gradient of the hidden states of rows [begin, end); None where it is not needed."""
        hidden = self._problem.hidden
        if not self._problem.needs.hidden:
            return None
        if end > self._edge:
            return self.gather()[begin:end]
        self._pieces.append(hidden.new_empty(end - begin, hidden.shape[1]))
        return self._pieces[-1]

    def add(self, gradient: Tensor, hidden: Tensor, hidden_grad: Tensor | None) -> None:
        """Add the products of the gradient of some rows of logits.

        Args:
            gradient: (rows, V).
            hidden: (rows, H), the other operand of the weight's.
            hidden_grad: of these rows.
        """
        if self._weight_grad is not None:
            product_into(self._weight_grad, gradient.t(), hidden, accumulate=False)
        elif self._weight_sum is not None:
            self._weight_sum.add_product(gradient.t(), hidden)
        if hidden_grad is not None:
            torch.mm(gradient, self._problem.weight, out=hidden_grad)
        if self._bias is not None:
            add_over_rows(self._bias, Block(gradient))

    def gather(self) -> Tensor:
        """Return the gradient of all hidden states, with the rows that are computed so far."""
        if self._hidden is None:
            self._hidden = self._problem.hidden.new_empty(self._problem.hidden.shape)
            if self._pieces:
                torch.cat(self._pieces, out=self._hidden[: self._edge])
                self._pieces.clear()
        return self._hidden

    def take(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias."""
        hidden = self.gather() if self._problem.needs.hidden else None
        if self._weight_sum is not None:
            self._weight_grad = self._weight_sum.take().to(self._problem.weight_grad_dtype)
        return hidden, self._weight_grad, self._bias


def _weight_sum(problem: Problem, rows: int, exact: bool) -> GradientSum:
    """Return the accumulator of the weight's gradient over chunks of `rows` rows."""
    dtype, is_short = problem.weight_grad_dtype, problem.hidden.itemsize == 2
    is_own = dtype == problem.hidden.dtype
    if exact and is_own and is_short and rows >= problem.weight.shape[1]:
        # A chunk of logits, freed by then, took as much memory as the result.
        return GradientSum(problem.weight.new_empty(problem.weight.shape, dtype=torch.float32), exact=False)
    result = problem.weight_grad()
    assert result is not None
    return GradientSum(result, exact and is_own, problem.kernels)


def _by_columns(problem: Problem, columns: int, kept: int) -> LossAndGradients:
    passes, loss = ColumnPasses(problem, columns, kept), problem.passes
    passes.fold(problem, loss.sums.fold)
    loss.sums.complete(problem.shard)
    if not any(problem.needs):
        return problem.result(None, None, None)
    factors = loss.factors(problem.factors)
    gradients = passes.gradients(problem, lambda block, into: loss.sums.write_gradient(block, factors, into))
    return problem.result(*gradients)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    rows: int | None,
    columns: int | None,
    accumulate: str,
) -> None:
    """Raise ValueError for operands and options that do not fit together."""
    hidden_shape, weight_shape, target_shape = hidden.shape, weight.shape, target.shape
    if len(hidden_shape) != 2 or len(weight_shape) != 2 or hidden_shape[1] != weight_shape[1]:
        raise ValueError(f"hidden is (N, H) and weight (V, H); got {tuple(hidden_shape)} and {tuple(weight_shape)}")
    if len(target_shape) not in (1, 2) or target_shape[0] != hidden_shape[0]:
        raise ValueError(f"target is ({hidden_shape[0]},) or ({hidden_shape[0]}, V); got {tuple(target_shape)}")
    if bias is not None and bias.shape != weight_shape[:1]:
        raise ValueError(f"bias must have the shape {tuple(weight_shape[:1])}; got {tuple(bias.shape)}")
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
