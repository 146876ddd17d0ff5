"""Adadelta: steps in the units of the parameter."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import OwnOptions


class Adadelta(Optimizer):
    """Steps scaled by the steps before them; takes and saves what `torch.optim.Adadelta` does.

        g <- g + weight_decay p
        v <- rho v + (1 - rho) g^2
        d = sqrt(u + eps) / sqrt(v + eps) g
        u <- rho u + (1 - rho) d^2
        p <- p - lr d

    Args:
        lr: scales every step, a number or a tensor of one element.
        rho: the decay rate of each average.
        eps: starts the steps off, and keeps the quotient finite.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.Adadelta([w], lr=100.0)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.6838, 1.3162])

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012).
    """

    _accepted = Accepted(torch.optim.Adadelta)
    optional = ("weight_decay",)
    state = {"square_avg": torch.zeros_like, "acc_delta": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        square_avg: Tensor,
        acc_delta: Tensor,
        *,
        lr: float,
        rho: float,
        eps: float,
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        step.add_(1)
        if weight_decay is not None:
            g = g + weight_decay * p
        square_avg.mul_(rho).add_((1 - rho) * g * g)
        delta = (acc_delta + eps).sqrt() / (square_avg + eps).sqrt() * g
        acc_delta.mul_(rho).add_((1 - rho) * delta * delta)
        p.sub_(lr * delta)
