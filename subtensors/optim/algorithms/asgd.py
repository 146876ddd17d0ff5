"""ASGD: stochastic gradient descent that averages its parameters."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import OwnOptions


class ASGD(Optimizer):
    """Averaged stochastic gradient descent; takes and saves what `torch.optim.ASGD` does.

        g <- g + weight_decay p
        p <- p - eta (g + lambd p)                      eta starts as lr
        a <- a + mu (p - a)                             the average, `state[p]["ax"]`; mu starts as 1
        eta <- lr / (1 + lambd lr t)^alpha
        mu <- 1 / max(1, t - t0)

    Args:
        lambd: how fast the parameter and the learning rate decay.
        alpha: the power of the learning rate's decay.
        t0: the step after which the average is one.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.ASGD([w], lr=0.5, lambd=0.0)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([-0.5000,  1.5000])

    Source: Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with Bottou's schedules.
    """

    _accepted = Accepted(torch.optim.ASGD)
    optional = ("weight_decay",)
    host_entries = ()  # torch, too, keeps these counts on the device
    state = {
        "eta": lambda p: torch.zeros((), device=p.device, dtype=torch.float32),
        "mu": lambda p: torch.ones((), device=p.device, dtype=torch.float32),
        "ax": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def init_state(self, entry: str, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The learning rate of the first step is lr."""
        started = super().init_state(entry, p, group)
        return started.fill_(float(group["lr"])) if entry == "eta" else started

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        eta: Tensor,
        mu: Tensor,
        ax: Tensor,
        *,
        lr: float,
        lambd: float,
        alpha: float,
        t0: float,
        weight_decay: float | None,
    ) -> None:
        """The math of the class, for one tensor."""
        step.add_(1)
        t, rate = step.double(), eta.double()
        if weight_decay is not None:
            g = g + weight_decay * p
        # Not (1 - lambd eta) p: so near to 1, the factor would be rounded to float32 the same way in every step.
        p.sub_(rate * (g + lambd * p))
        ax.copy_(torch.where(mu == 1, p, ax + mu * (p - ax)))
        eta.copy_(lr / (1 + lambd * lr * t) ** alpha)
        mu.copy_(1 / (t - t0).clamp(min=1))
