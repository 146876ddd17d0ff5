"""Cross entropy of a linear layer and its gradients, with a part of the logits in memory at a time.

For hidden states X (N, H), a weight W (V, H) and logits Y = X W^T, the loss needs L = log sum_k exp Y_k of each row,
the gradients need G = d loss / dY:

    dX = G W,      dW = G^T X,      db = column sums of G

Two orders, which meet where everything fits at once.

By rows: a chunk of rows of Y is complete, so its loss and G follow at once and G is written over it. Three GEMMs in
all. dX is written once, and dW is a sum over chunks: `accumulate="fast"` adds in the gradient's dtype, `"exact"` in
float32 (`exact_accumulation`), two bytes more for each element of W.

By columns: a block of columns of Y for all rows. A first pass over blocks gives L; a second computes each block again,
writes G over it, and with it the block's rows of dW, once and over all of N inside one GEMM: as exact as can be, and no
memory of the size of W. dX is the sum over blocks, in float32, which costs N x H. A fourth GEMM is the price. The
second pass goes backwards, so that the last block of the first pass need not be computed again.

G has the dtype of Y, as it has under autograd; everything between is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy import CrossEntropy, RowTerms, Statistics
from subtensors.kernels.exact_accumulation import ProductSum, product_into
from subtensors.kernels.logits_block import Block, BlockOps, KernelOps, block_ops

Accumulate = Literal["exact", "fast"]


class Needs(NamedTuple):
    """Which gradients are wanted; one that is not costs nothing."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class LossAndGradients(NamedTuple):
    """What `linear_cross_entropy` gives: the loss, and each gradient that was asked for."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@torch.no_grad()
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
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    terms = RowTerms(options or CrossEntropy(), target, weight.shape[0], compute)
    task = _Task(
        hidden,
        weight,
        bias,
        Needs(needs[0], needs[1], needs[2] and bias is not None),
        terms,
        Statistics.none(hidden.shape[0], compute, hidden.device),
        block_ops(terms, hidden, kernels),
        weight_grad_dtype or weight.dtype,
    )
    if columns is not None and hidden.shape[0]:
        return _by_columns(task, min(columns, weight.shape[0]), upstream)
    return _by_rows(task, rows or max(1, hidden.shape[0]), upstream, accumulate == "exact")


@dataclass(frozen=True)
class _Task:
    """What is to be computed, and of what."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    needs: Needs
    terms: RowTerms
    statistics: Statistics
    ops: BlockOps
    weight_grad_dtype: torch.dtype

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which sums are kept."""
        return self.terms.mass.dtype

    def logits(self, buffer: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Block:
        """Compute a block of logits into the beginning of a buffer of at least its size."""
        block = buffer[: (rows[1] - rows[0]) * (columns[1] - columns[0])].view(rows[1] - rows[0], -1)
        hidden, weight = self.hidden[slice(*rows)], self.weight[slice(*columns)].t()
        if self.bias is None:
            torch.mm(hidden, weight, out=block)
        else:
            torch.addmm(self.bias[slice(*columns)], hidden, weight, out=block)
        return Block(block, rows[0], columns[0])

    def weight_grad(self) -> Tensor | None:
        """Memory for the gradient of the weight, where it is wanted."""
        if not self.needs.weight:
            return None
        return torch.empty(self.weight.shape, dtype=self.weight_grad_dtype, device=self.weight.device)

    def bias_grad(self) -> Tensor | None:
        """Zeros to add the gradient of the bias to, where it is wanted."""
        if not self.needs.bias:
            return None
        return torch.zeros(self.weight.shape[0], dtype=self.compute, device=self.weight.device)

    def result(self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> LossAndGradients:
        """The loss, and these gradients in the dtypes of what they are of."""
        loss = self.terms.loss(self.statistics)
        hidden, bias = (None if t is None else t.to(self.hidden.dtype) for t in (hidden, bias))
        return LossAndGradients(loss, hidden, weight, bias)


def _by_rows(task: _Task, rows: int, upstream: Tensor | None, exact: bool) -> LossAndGradients:
    count, width = task.hidden.shape
    classes = task.weight.shape[0]
    chunks = _parts(count, rows)
    buffer = task.hidden.new_empty(min(rows, count) * classes)
    factors = task.terms.gradient_factors(upstream) if any(task.needs) else None
    hidden_grad = task.hidden.new_empty(count, width) if task.needs.hidden else None
    weight_grad, bias_grad = task.weight_grad(), task.bias_grad()
    weight_sum = None
    if weight_grad is not None:
        kernels = isinstance(task.ops, KernelOps)
        weight_sum = ProductSum(weight_grad, task.hidden.dtype, exact, len(chunks), kernels)
    for begin, end in chunks:
        block = task.logits(buffer, (begin, end), (0, classes))
        if factors is None:
            task.ops.fold(block, task.statistics)
            continue
        task.ops.fold_and_write_gradient(block, task.statistics, factors)
        if hidden_grad is not None:
            torch.mm(block.logits, task.weight, out=hidden_grad[begin:end])
        if weight_sum is not None:
            weight_sum.add(block.logits, task.hidden[begin:end])
        if bias_grad is not None:
            bias_grad += block.logits.sum(0, dtype=task.compute)
    return task.result(hidden_grad, weight_grad, bias_grad)


def _by_columns(task: _Task, columns: int, upstream: Tensor | None) -> LossAndGradients:
    count, width = task.hidden.shape
    blocks = _parts(task.weight.shape[0], columns)
    buffer = task.hidden.new_empty(count * columns)
    for part in blocks:
        block = task.logits(buffer, (0, count), part)
        task.ops.fold(block, task.statistics)
    if not any(task.needs):
        return task.result(None, None, None)
    factors = task.terms.gradient_factors(upstream)
    normaliser = task.statistics.log_normaliser()
    hidden_sum = None
    if task.needs.hidden:
        hidden_sum = torch.empty(count, width, dtype=task.compute, device=task.hidden.device)
    weight_grad, bias_grad = task.weight_grad(), task.bias_grad()
    for part in reversed(blocks):
        begin, end = part
        if part != blocks[-1]:
            block = task.logits(buffer, (0, count), part)
        task.ops.write_gradient(block, normaliser, factors)
        if hidden_sum is not None:
            product_into(hidden_sum, block.logits, task.weight[begin:end], accumulate=part != blocks[-1])
        if weight_grad is not None:
            product_into(weight_grad[begin:end], block.logits.t(), task.hidden, accumulate=False)
        if bias_grad is not None:
            torch.sum(block.logits, 0, dtype=task.compute, out=bias_grad[begin:end])
    del buffer, block  # the dX of the result takes its place
    return task.result(hidden_sum, weight_grad, bias_grad)


def _parts(count: int, size: int) -> list[tuple[int, int]]:
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
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden is (N, H) and weight (V, H); got {tuple(hidden.shape)} and {tuple(weight.shape)}")
    if target.dim() not in (1, 2) or target.shape[0] != hidden.shape[0]:
        raise ValueError(f"target is ({hidden.shape[0]},) or ({hidden.shape[0]}, V); got {tuple(target.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape {tuple(weight.shape[:1])}; got {tuple(bias.shape)}")
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ValueError(f"hidden, weight and bias have one floating-point dtype; got {sorted(map(str, dtypes))}")
    if rows is not None and columns is not None:
        raise ValueError(f"give rows or columns, not both; got rows={rows}, columns={columns}")
    for name, size in (("rows", rows), ("columns", columns)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
    if accumulate not in ("exact", "fast"):
        raise ValueError(f"accumulate must be 'exact' or 'fast'; got {accumulate!r}")
