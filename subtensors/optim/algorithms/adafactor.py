"""Adafactor: a second moment in rows and columns, and steps as long as the tensor they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.fused.fuse import fused
from subtensors.kernels.fused.row_column_means import reference, row_column_means
from subtensors.kernels.runtime.custom_ops import arithmetic_dtype
from subtensors.optim.algorithms.matrix_optimizer import MatrixOptimizer, assign, by_shape
from subtensors.optim.batches import BatchKind
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options, ParamGroup
from subtensors.optim.traced_update import StepValues

Eps = tuple[float | None, float]


class Adafactor(MatrixOptimizer):
    """Adam with little state: of n x m numbers it keeps n + m; takes and saves what `torch.optim.Adafactor` does.

        b = t^beta2_decay
        a = max(eps2, RMS(p)) min(lr, 1 / sqrt(t))
        p <- p - lr weight_decay p
        R <- (1 - b) R + b mean of g^2 over columns      C <- (1 - b) C + b mean of g^2 over rows
        V = R C / max(mean of R, eps1)                   with less than two dimensions: V <- (1 - b) V + b g^2
        u = g / max(sqrt(V), eps1)
        p <- p - a u / max(1, RMS(u) / d)

    Rows and columns are those of the last two dimensions. All matrices are updated in three sweeps of fused kernels:
    one for their rows and columns, one for the two root mean squares, one for p; V is never in memory. Tensors of more
    dimensions are stacked by shape, and V is made.

    Args:
        params: parameters, `(name, parameter)` pairs, or parameter groups; real.
        lr: the largest relative step, and the scale of the weight decay; a number or a tensor of one element.
        beta2_decay: how the share of the newest squares falls.
        eps: `(eps1, eps2)`; eps1 None is the distance from 1 to the next number of the parameter's dtype.
        d: the largest root mean square of a direction.
        weight_decay: decoupled.

    Raises:
        ValueError: a value is out of range, or a parameter is complex.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2, 2))
        >>> opt = st.optim.Adafactor([w], lr=0.5)
        >>> w.grad = torch.tensor([[3.0, -1.0], [3.0, -1.0]])
        >>> opt.step()
        >>> w.detach()
        tensor([[0.5000, 1.5000],
                [0.5000, 1.5000]])

    Source: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), with torch's lr and
    placing of eps1.
    """

    _accepted = Accepted(torch.optim.Adafactor)
    is_replayable = True
    optional = ("weight_decay",)
    state = {
        "row_var": lambda p: torch.zeros_like(p[..., :1]),
        "col_var": lambda p: torch.zeros_like(p[..., :1, :]),
        "variance": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: Eps = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def applies_to(self, entry: str, p: Tensor, group: ParamGroup) -> bool:
        """Rows and columns for tensors that have them, and the full second moment for the rest."""
        return entry == "step" or (entry == "variance") != (p.dim() > 1 and p.numel() > 0)

    def update(self, p, g, step, row_var, col_var, variance, *, lr, beta2_decay, eps, d, weight_decay):
        """The math of the class, for tensors that are all matrices, or all have more dimensions, or all have less."""
        share: Any = _share(step, beta2_decay=beta2_decay)
        values: StepValues = {"lr": lr, "d": d, "eps": eps, "weight_decay": weight_decay}
        if variance is not None:
            _descend_unfactored(p, g, variance, share, step, values)
            return
        assert row_var is not None
        assert col_var is not None
        if _are_matrices(p.tensors):
            rows, columns = map(p.like, _means(g.tensors))
            mean = _approach_rows(row_var, rows, share)
            _approach(col_var, columns, share)
            row, column = (
                p.like([t.expand_as(q) for t, q in zip(x.tensors, p.tensors, strict=True)]) for x in (row_var, col_var)
            )
            _descend_factored(p, g, row, column, mean, step, values)
            return
        row, column, u = by_shape(partial(_factored_direction, eps=eps), g, row_var, col_var, share)
        assign(row_var, row)
        assign(col_var, column)
        _descend(p, u, step, **values)

    def _split_kinds(
        self, kinds: dict[BatchKind, list[int]], params: list[Tensor]
    ) -> Iterator[tuple[BatchKind, list[int]]]:
        for kind, indices in kinds.items():
            stacked = [i for i in indices if params[i].dim() > 1 and not _are_matrices([params[i]])]
            matrices = [i for i in indices if _are_matrices([params[i]])]
            rest = [i for i in indices if params[i].dim() < 2]
            yield from ((kind, part) for part in (matrices, rest) if part)
            if stacked:
                yield from super()._split_kinds({kind: stacked}, params)


def _are_matrices(tensors: Sequence[Tensor]) -> bool:
    """Return whether one kernel can take the rows and columns of these tensors; all of a batch agree."""
    return tensors[0].dim() == 2 and tensors[0].numel() > 0


def _means(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The mean squares of the rows, (rows, 1), and of the columns, (1, columns), of each."""
    if gradients[0].device.type != "cuda" and not interprets_kernels():
        return reference(gradients)
    rows, columns = list(gradients), list(gradients)
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        own = [i for i, g in enumerate(gradients) if g.dtype == dtype]
        results = row_column_means([gradients[i].contiguous() for i in own])
        for i, row, column in zip(own, *results, strict=True):
            rows[i], columns[i] = row, column
    return rows, columns


def _wide(x: Tensor) -> Tensor:
    return x.to(arithmetic_dtype(x.dtype))


@fused
def _share(step: Tensor, *, beta2_decay: float) -> Tensor:
    """The share of the newest squares."""
    share: Tensor = step.add_(1).double() ** beta2_decay
    return share


@fused
def _approach(average: Tensor, newest: Tensor, share: Tensor) -> None:
    kept = _wide(average)
    average.copy_(kept + share * (newest - kept))


@fused
def _approach_rows(average: Tensor, newest: Tensor, share: Tensor) -> Tensor:
    """Update the averages of rows, and return their mean."""
    kept = _wide(average)
    kept = kept + share * (newest - kept)
    average.copy_(kept)
    return kept.mean()


def _smallest(eps: Eps, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps[0] is None else eps[0]


def _move(
    p: Tensor, u: Tensor, step: Tensor, *, lr: float | Tensor, d: float, eps: Eps, weight_decay: float | None
) -> None:
    """A step in direction u, shortened where u is longer than `d`."""
    t, w = step.double(), _wide(p)
    relative = torch.minimum(t**-0.5, lr if isinstance(lr, Tensor) else torch.full_like(t, lr))
    length = (w * w).mean().sqrt().double().clamp(min=eps[1]) * relative
    excess = ((u * u).mean().sqrt().double() / d).clamp(min=1)
    if weight_decay is not None:
        w = w * (1 - lr * weight_decay)
    p.copy_(w - (length / excess) * u)


_descend = fused(_move)


@fused
def _descend_unfactored(
    p: Tensor, g: Tensor, variance: Tensor, share: Tensor, step: Tensor, values: StepValues
) -> None:
    """The step of a tensor with an unfactored second moment."""
    smallest, kept, g = _smallest(values["eps"], variance.dtype), _wide(variance), _wide(g)
    kept = kept + share * (g * g - kept)
    variance.copy_(kept)
    _move(p, g * kept.clamp(min=smallest * smallest).rsqrt(), step, **values)


@fused
def _descend_factored(
    p: Tensor, g: Tensor, row: Tensor, column: Tensor, mean: Tensor, step: Tensor, values: StepValues
) -> None:
    """The step of a matrix; rows and columns are expanded to it, and `mean` is that of the rows."""
    smallest = _smallest(values["eps"], row.dtype)
    v = _wide(row) * _wide(column) * (1 / mean.clamp(min=smallest))
    _move(p, _wide(g) * v.clamp(min=smallest * smallest).rsqrt(), step, **values)


def _factored_direction(
    g: Tensor,  # (n, ..., rows, columns)
    row_var: Tensor,  # (n, ..., rows, 1)
    col_var: Tensor,  # (n, ..., 1, columns)
    share: Tensor,  # (n,)
    *,
    eps: Eps,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new rows and columns of the second moment, and the gradient over its root."""
    smallest, g = _smallest(eps, row_var.dtype), _wide(g)
    share = share.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
    row_mean = torch.linalg.vector_norm(g, dim=-1, keepdim=True).square_().div_(max(g.shape[-1], 1))
    col_mean = torch.linalg.vector_norm(g, dim=-2, keepdim=True).square_().div_(max(g.shape[-2], 1))
    row = torch.lerp(row_var.to(g.dtype), row_mean, share)
    col = torch.lerp(col_var.to(g.dtype), col_mean, share)
    variance = row @ col
    variance.div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest))
    return row, col, variance.clamp_(min=smallest * smallest).rsqrt_() * g
