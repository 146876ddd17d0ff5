"""AdEMAMix: Adam with a second, much slower average of the gradients."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.algorithms.adam import adam_denominator, update_moments
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class AdEMAMix(Optimizer):
    """Adam whose direction mixes a fast and a slow average of the gradients.

        m1 <- beta1 m1 + (1 - beta1) g
        m2 <- beta3_t m2 + (1 - beta3_t) g
        v  <- beta2 v + (1 - beta2) g^2
        p  <- p - lr ((m1 / (1 - beta1^t) + alpha_t m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

    While a warm-up of T steps lasts, a = min(t / T, 1):

        alpha_t = a alpha
        beta3_t = exp(1 / ((1 - a) / log beta1 + a / log beta3))      its half-life grows linearly, from that of beta1

    Args:
        betas: the decay rate of each average: `(beta1, beta2, beta3)`.
        alpha: the share of the slow average.
        beta3_warmup: steps until the slow average is as slow as beta3 says; None: from the start.
        alpha_warmup: steps until alpha is reached; None: from the start.
        weight_decay: decoupled.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.AdEMAMix([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.4999, 1.5001])

    Source: Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024), Algorithm 1.
    """

    _accepted = Accepted(alpha="[0, inf]", beta3_warmup="None or (0, inf]", alpha_warmup="None or (0, inf]")
    optional = ("weight_decay",)
    state = {
        "exp_avg_fast": torch.zeros_like,
        "exp_avg_slow": torch.zeros_like,
        "exp_avg_sq": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        exp_avg_fast: Tensor,
        exp_avg_slow: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float,
        betas: tuple[float, float, float],
        alpha: float,
        beta3_warmup: float | None,
        alpha_warmup: float | None,
        eps: float,
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2, beta3 = betas
        step.add_(1)
        t = step.double()
        slow, share = torch.full_like(t, beta3), torch.full_like(t, alpha)
        if beta3_warmup is not None:
            a = (t / beta3_warmup).clamp(max=1)
            slow = (1 / ((1 - a) / torch.full_like(t, beta1).log() + a / slow.log())).exp()
        if alpha_warmup is not None:
            share = (t / alpha_warmup).clamp(max=1) * alpha

        update_moments(exp_avg_fast, exp_avg_sq, g, beta1, beta2)
        exp_avg_slow.mul_(slow).add_((1 - slow) * g)
        denominator = adam_denominator(exp_avg_sq, beta2, t, eps)
        u = (exp_avg_fast * (1 / (1 - beta1**t)) + share * exp_avg_slow) / denominator
        if weight_decay is not None:
            u = u + weight_decay * p
        p.sub_(lr * u)
