"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options


class Lion(Optimizer):
    """Lion: every element moves by lr, in the direction of its momentum; one state tensor a parameter.

        p <- p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
        m <- beta2 m + (1 - beta2) g

    Args:
        lr: the learning rate, a number or a tensor of one element; the paper takes 3 to 10 times less than for AdamW.
        betas: the decay rates of the momentum in the direction, and in the next momentum.
        weight_decay: decoupled; the paper takes 3 to 10 times more than for AdamW.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.Lion([w], lr=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2.
    """

    _accepted = Accepted()
    optional = ("weight_decay",)
    low_bit = {"exp_avg": True}
    state = {"exp_avg": torch.zeros_like}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self,
        p: Tensor,
        g: Tensor,
        exp_avg: Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        beta1, beta2 = betas
        direction = torch.sign(beta1 * exp_avg + (1 - beta1) * g)
        if weight_decay is not None:
            direction = direction + weight_decay * p
        p.sub_(lr * direction)
        exp_avg.mul_(beta2).add_((1 - beta2) * g)
