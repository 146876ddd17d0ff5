"""Adafactor: a second moment in rows and columns, and steps as long as the tensor they change."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.fuse import fused
from subtensors.optim.arguments import torch_defaults
from subtensors.optim.matrix_optimizer import MatrixOptimizer, by_shape
from subtensors.optim.optimizer import Params
from subtensors.optim.options import Options
from subtensors.tensor_list import TensorList


class Adafactor(MatrixOptimizer):
    """Adam with little state: of n x m numbers it keeps n + m; takes and saves what `torch.optim.Adafactor` does.

        b = t^beta2_decay
        a = max(eps2, RMS(p)) min(lr, 1 / sqrt(t))
        p <- p - lr weight_decay p
        R <- (1 - b) R + b mean of g^2 over columns      C <- (1 - b) C + b mean of g^2 over rows
        V = R C / max(mean of R, eps1)                   with less than two dimensions: V <- (1 - b) V + b g^2
        u = g / max(sqrt(V), eps1)
        p <- p - a u / max(1, RMS(u) / d)

    Rows and columns are those of the last two dimensions. They are reduced, and V is made, once a shape, on stacks;
    what is element by element, and what sums over a tensor, is a kernel over all of them.

    Args:
        params: parameters, `(name, parameter)` pairs, or parameter groups; real.
        lr: the largest relative step, and the scale of the weight decay; a number or a tensor of one element.
        beta2_decay: how the share of the newest squares falls.
        eps: `(eps1, eps2)`; eps1 None is the distance from 1 to the next number of the parameter's dtype.
        d: the largest root mean square of a direction.
        weight_decay: decoupled.
        foreach: recorded for torch.optim; changes nothing here.
        maximize: go up rather than down.
        options: those of every optimizer, `Options`.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: at a step, for a complex parameter.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2, 2))
        >>> opt = st.optim.Adafactor([w], lr=0.5)
        >>> w.grad = torch.tensor([[3.0, -1.0], [3.0, -1.0]])
        >>> opt.step()
        >>> w
        Parameter containing:
        tensor([[0.5000, 1.5000],
                [0.5000, 1.5000]], requires_grad=True)

    Source: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), with torch's lr and
    placing of eps1.
    """

    is_replayable = True
    optional = ("weight_decay",)
    state = {  # noqa: RUF012  (read by the base class)
        "row_var": lambda p: torch.zeros_like(p[..., :1]),
        "col_var": lambda p: torch.zeros_like(p[..., :1, :]),
        "variance": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, torch_defaults(torch.optim.Adafactor, locals()), **options)

    def suits(self, entry: str, p: Tensor, group: dict[str, Any]) -> bool:
        """Rows and columns for what has them, and otherwise the whole second moment."""
        if p.is_complex():
            raise RuntimeError("Adafactor does not support complex parameters")
        return entry == "step" or (entry == "variance") != (p.dim() > 1)

    def update(
        self,
        p: TensorList,
        g: TensorList,
        step: TensorList,
        row_var: TensorList | None,
        col_var: TensorList | None,
        variance: TensorList | None,
        *,
        lr: float | Tensor,
        beta2_decay: float,
        eps: tuple[float | None, float],
        d: float,
        weight_decay: float | None,
    ) -> None:
        """The maths of the class, for tensors that all have rows and columns, or all have not."""
        eps1, eps2 = eps
        share: Any
        share, length = _scales(p, step, lr=lr, beta2_decay=beta2_decay, eps2=eps2)
        u: Any
        if variance is not None:
            u = _direction(g, variance, share, eps1=eps1)
        else:
            assert row_var is not None
            assert col_var is not None
            row, col, u = by_shape(partial(_factored_direction, eps1=eps1), g, row_var, col_var, share)
            _keep(row_var, row)
            _keep(col_var, col)
        _descend(p, u, length, lr=lr, d=d, weight_decay=weight_decay)


@fused
def _scales(p: Tensor, step: Tensor, *, lr: float | Tensor, beta2_decay: float, eps2: float) -> tuple[Tensor, Tensor]:
    """The share of the newest squares, and how long the step may be."""
    step.add_(1)
    t = step.double()
    p = p if p.dtype == torch.float64 else p.float()
    rms = (p * p).mean().sqrt().double()
    relative = torch.minimum(t**-0.5, lr if isinstance(lr, Tensor) else torch.full_like(t, lr))
    return t**beta2_decay, rms.clamp(min=eps2) * relative


@fused
def _direction(g: Tensor, variance: Tensor, share: Tensor, *, eps1: float | None) -> Tensor:
    """The gradient over the root of its second moment, which is brought up to date."""
    least = torch.finfo(variance.dtype).eps if eps1 is None else eps1
    kept = variance.to(g.dtype)
    kept = kept + share * (g * g - kept)
    variance.copy_(kept)
    return g * kept.clamp(min=least * least).rsqrt()


def _factored_direction(
    g: Tensor,  # (n, ..., rows, columns)
    row_var: Tensor,  # (n, ..., rows, 1)
    col_var: Tensor,  # (n, ..., 1, columns)
    share: Tensor,  # (n,)
    *,
    eps1: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new rows and columns of the second moment, and the gradient over its root."""
    least = torch.finfo(row_var.dtype).eps if eps1 is None else eps1
    share = share.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
    row_mean = torch.linalg.vector_norm(g, dim=-1, keepdim=True).square_().div_(max(g.shape[-1], 1))
    col_mean = torch.linalg.vector_norm(g, dim=-2, keepdim=True).square_().div_(max(g.shape[-2], 1))
    row = torch.lerp(row_var.to(g.dtype), row_mean, share)
    col = torch.lerp(col_var.to(g.dtype), col_mean, share)
    variance = row @ col
    variance.div_(row.mean(dim=-2, keepdim=True).clamp_(min=least))
    return row, col, variance.clamp_(min=least * least).rsqrt_().mul_(g)


@fused
def _keep(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


@fused
def _descend(p: Tensor, u: Tensor, length: Tensor, *, lr: float | Tensor, d: float, weight_decay: float | None) -> None:
    """The step, shortened where the direction is longer than `d`."""
    w = p.to(u.dtype)
    if weight_decay is not None:
        w = w * (1 - lr * weight_decay)
    rms = (u * u).mean().sqrt().double()
    p.copy_(w - (length / (rms / d).clamp(min=1)) * u)
