"""RAdam: Adam with a rectified variance."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.algorithms.adam import decay_weights, update_moments
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class RAdam(Optimizer):
    """Adam whose first steps go without the second moment; takes and saves what `torch.optim.RAdam` does.

        g <- g + weight_decay p                         decoupled: p <- p - lr weight_decay p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
        r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
        p <- p - lr m / (1 - beta1^t) * { r sqrt(1 - beta2^t) / (sqrt(v) + eps)   where rho > 5
                                        { 1                                      elsewhere

    Args:
        weight_decay: the L2 penalty; decoupled, the share of lr that a step takes off the parameter.
        decoupled_weight_decay: as in AdamW.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.RAdam([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([-0.5000,  1.5000])

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (2020), with torch's threshold of 5.
    """

    _accepted = Accepted(torch.optim.RAdam)
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float | None,
        decoupled_weight_decay: bool,
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2 = betas
        step.add_(1)
        t = step.double()
        g = decay_weights(p, g, lr, weight_decay, decoupled_weight_decay)
        update_moments(exp_avg, exp_avg_sq, g, beta1, beta2)

        decay = beta2**t
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * t * decay / (1 - decay)
        squared = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        # Negative where rho is small, and not used there.
        rectification = torch.where(rho > 5, squared, 1.0) ** 0.5
        adaptive = (rectification * (1 - decay) ** 0.5) / (exp_avg_sq.sqrt() + eps)
        p.sub_((lr / (1 - beta1**t)) * exp_avg * torch.where(rho > 5, adaptive, 1.0))
