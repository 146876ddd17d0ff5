"""RMSprop: steps divided by a running root mean square."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from subtensors.optim.hyperparameters import Accepted, hyperparameters
from subtensors.optim.optimizer import Optimizer, Params
from subtensors.optim.options import OwnOptions, ParamGroup


class RMSprop(Optimizer):
    """Steps divided by a running root mean square; takes and saves what `torch.optim.RMSprop` does.

        g <- g + weight_decay p
        v <- alpha v + (1 - alpha) g^2
        a <- alpha a + (1 - alpha) g                    centered; otherwise a = 0
        d = g / (sqrt(v - a^2) + eps)
        b <- momentum b + d                             with a momentum; otherwise b = d
        p <- p - lr b

    Args:
        alpha: the decay rate of each average.
        momentum: 0 keeps no buffer.
        centered: divide by the standard deviation instead.

    Example:
        >>> import subtensors as st
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = st.optim.RMSprop([w], lr=0.05)
        >>> w.grad = torch.tensor([3.0, -1.0])
        >>> opt.step()
        >>> w.detach()
        tensor([0.5000, 1.5000])

    Source: Hinton, "Neural Networks for Machine Learning", lecture 6 (2012); Graves, "Generating Sequences With
    Recurrent Neural Networks" (2013) for centered.
    """

    _accepted = Accepted(torch.optim.RMSprop)
    optional = ("weight_decay",)
    state = {
        "square_avg": torch.zeros_like,
        "momentum_buffer": torch.zeros_like,
        "grad_avg": torch.zeros_like,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        super().__init__(params, hyperparameters(locals()), **options)

    def needs_state(self, entry: str, group: ParamGroup) -> bool:
        """A buffer only with a momentum, an average of the gradients only when centered."""
        needs = {"momentum_buffer": "momentum", "grad_avg": "centered"}
        return entry not in needs or bool(group[needs[entry]])

    def update(
        self,
        p: Tensor,
        g: Tensor,
        step: Tensor,
        square_avg: Tensor,
        momentum_buffer: Tensor | None,
        grad_avg: Tensor | None,
        *,
        lr: float,
        alpha: float,
        eps: float,
        weight_decay: float | None,
        momentum: float,
    ) -> None:
        """The math of the class, for one tensor."""
        step.add_(1)
        if weight_decay is not None:
            g = g + weight_decay * p
        square_avg.mul_(alpha).add_((1 - alpha) * g * g)
        variance = square_avg
        if grad_avg is not None:
            grad_avg.mul_(alpha).add_((1 - alpha) * g)
            variance = square_avg - grad_avg * grad_avg
        d = g / (variance.sqrt() + eps)
        if momentum_buffer is not None:
            d = momentum_buffer.mul_(momentum).add_(d)
        p.sub_(lr * d)
