"""LAMB: Adam's direction, as long as the tensor it changes."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.algorithms.adam import adam_denominator, update_moments
from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class LAMB(Optimizer):
    """Adam with each tensor's step scaled to the tensor's own norm, for very large batches.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
        p <- p - lr ||p|| / ||u|| u                     a norm of 0 scales nothing: p <- p - lr u

    Args:
        weight_decay: decoupled, inside the norm of the step.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.LAMB([w], lr=0.5, weight_decay=0.0)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), Algorithm 2,
    with the identity for phi.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
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
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2 = betas
        step.add_(1)
        t = step.double()
        update_moments(exp_avg, exp_avg_sq, g, beta1, beta2)
        u = (1 / (1 - beta1**t)) * (exp_avg / adam_denominator(exp_avg_sq, beta2, t, eps))
        if weight_decay is not None:
            u = u + weight_decay * p
        length, change = p.norm(), u.norm()
        is_scaled = (length > 0) & (change > 0)
        ratio = torch.where(is_scaled, length / torch.where(is_scaled, change, 1.0), 1.0)
        p.sub_(lr * ratio * u)
