"""Adamax: Adam with the largest gradient in place of the second moment."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import OwnOptions


class Adamax(Optimizer):
    """Adam in the infinity norm; takes and saves what `torch.optim.Adamax` does.

        g <- g + weight_decay p
        m <- beta1 m + (1 - beta1) g
        u <- max(beta2 u, |g| + eps)
        p <- p - lr m / ((1 - beta1^t) u)

    Args:
        betas: the decay rates of the average and of the largest gradient.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.Adamax([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization" (2015), section 7.1.
    """

    _accepted = Accepted(torch.optim.Adamax)
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_inf": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        exp_avg: Tensor,
        exp_inf: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2 = betas
        step.add_(1)
        if weight_decay is not None:
            g = g + weight_decay * p
        exp_avg.mul_(beta1).add_((1 - beta1) * g)
        exp_inf.copy_(torch.maximum(beta2 * exp_inf, g.abs() + eps))
        p.sub_((lr / (1 - beta1 ** step.double())) * (exp_avg / exp_inf))
