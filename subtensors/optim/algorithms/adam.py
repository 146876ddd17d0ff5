"""Adam, and AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import Options
from subtensors.optim.traced_update import add_decay

Betas = tuple[float | Tensor, float | Tensor]


class Adam(Optimizer):
    """Adam; takes and saves what `torch.optim.Adam` does.

        g <- g + weight_decay p                         decoupled: p <- p - lr weight_decay p
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr m' / (sqrt(v') + eps)               m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

    With `amsgrad`, v' is made of the largest v so far. Factors that depend on t alone are computed once a tensor, so an
    element takes one square root and one division:

        p <- p - (lr / (1 - beta1^t)) (m / (sqrt(v) (1 - beta2^t)^(-1/2) + eps))

    Args:
        betas: the decay rate of each average; two numbers or two tensors of one element.
        weight_decay: the L2 penalty; decoupled, the share of lr that a step takes off the parameter.
        amsgrad: divide by the largest v so far.
        decoupled_weight_decay: as in AdamW.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization" (2015); Reddi et al., "On the Convergence of Adam
    and Beyond" (2018) for amsgrad.
    """

    _accepted = Accepted(torch.optim.Adam)
    optional = ("weight_decay",)
    low_bit = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
    state = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like, "max_exp_avg_sq": torch.zeros_like}
    _optional_state = {"max_exp_avg_sq": "amsgrad"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def update(
        self, p, g, step, exp_avg, exp_avg_sq, max_exp_avg_sq, *, lr, betas, eps, weight_decay, decoupled_weight_decay
    ):
        beta1, beta2 = betas
        g = decay_weights(p, g, lr, weight_decay, decoupled_weight_decay)
        t = update_moments(step, exp_avg, exp_avg_sq, g, betas)
        v = exp_avg_sq
        if max_exp_avg_sq is not None:
            v = max_exp_avg_sq.copy_(torch.maximum(max_exp_avg_sq, exp_avg_sq))
        p.sub_((lr / (1 - beta1**t)) * (exp_avg / adam_denominator(v, beta2, t, eps)))


def decay_weights(p: Tensor, g: Tensor, lr: float, weight_decay: float | None, is_decoupled: bool) -> Tensor:
    """The gradient with an L2 penalty; if decoupled, the gradient, and the decay is taken off the parameter."""
    if not is_decoupled:
        return add_decay(g, p, weight_decay)
    if weight_decay is not None:
        p.mul_(1 - lr * weight_decay)
    return g


def update_moments(step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, g: Tensor, betas: tuple[float, float]) -> Tensor:
    """t <- t + 1, m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2; return t."""
    beta1, beta2 = betas
    exp_avg.mul_(beta1).add_((1 - beta1) * g)
    exp_avg_sq.mul_(beta2).add_((1 - beta2) * g * g)
    # In float64, as torch computes it on the host: near 1, float32 would lose most digits of 1 - beta2.
    t: Tensor = step.add_(1).double()
    return t


def adam_denominator(v: Tensor, beta2: float, t: Tensor, eps: float) -> Tensor:
    """sqrt(v / (1 - beta2^t)) + eps."""
    return v.sqrt() * (1 - beta2**t) ** -0.5 + eps


class AdamW(Adam):
    """Adam with decoupled weight decay; takes and saves what `torch.optim.AdamW` does.

        p <- p - lr weight_decay p                      then as in Adam, without its L2 penalty

    Args:
        weight_decay: the share of lr that a step takes off the parameter.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.AdamW([w], lr=0.5, weight_decay=0.5)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.2500, 1.2500])

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    _accepted = Accepted(torch.optim.AdamW)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state saved by Adam doesn't make this Adam.
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
