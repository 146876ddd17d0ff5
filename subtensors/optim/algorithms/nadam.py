"""NAdam: Adam with Nesterov momentum."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.algorithms.adam import adam_denominator, decay_weights, update_moments
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class NAdam(Optimizer):
    """Adam with Nesterov momentum; takes and saves what `torch.optim.NAdam` does.

        g <- g + weight_decay p                         decoupled: p <- p - lr weight_decay p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)
        P_t  = mu_1 ... mu_t
        p <- p - lr ((1 - mu_t) / (1 - P_t) g + mu_t+1 / (1 - P_t+1) m) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        weight_decay: the L2 penalty; decoupled, the share of lr that a step takes off the parameter.
        momentum_decay: as in the math.
        decoupled_weight_decay: as in AdamW.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.NAdam([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.4718, 1.5282])

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (2016).
    """

    _accepted = Accepted(torch.optim.NAdam)
    optional = ("weight_decay",)
    host_entries = ("step", "mu_product")
    state = {
        "mu_product": lambda p: torch.ones((), device=p.device, dtype=torch.float32),
        "exp_avg": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        mu_product: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float | None,
        momentum_decay: float,
        decoupled_weight_decay: bool,
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2 = betas
        step.add_(1)
        t = step.double()
        g = decay_weights(p, g, lr, weight_decay, decoupled_weight_decay)
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        # Saved in float32, so torch's product of float32 numbers is taken.
        mu_product.mul_(mu.float())
        product = mu_product.double()

        update_moments(exp_avg, exp_avg_sq, g, beta1, beta2)
        gradient_factor = lr * (1 - mu) / (1 - product)
        average_factor = lr * mu_next / (1 - product * mu_next)
        direction = gradient_factor * g + average_factor * exp_avg
        p.sub_(direction / adam_denominator(exp_avg_sq, beta2, t, eps))
